"""Transforms: callables from batch to batch, vectorised over its rows.

Filters keep rows, labels and ids are changed, negatives made or dropped; `Compose` and `LogicalOr` join them and
`Transformed` puts them behind a source. Those that draw random numbers are `Seeded` and can be saved and restored.
"""

from monolith.data.transforms.compose import Compose, LogicalOr, Transformed
from monolith.data.transforms.expression import FilterByExpression
from monolith.data.transforms.features import FeatureCombine, FidMask, LogBucketFid, MapId, SwitchSlot, combine_ids
from monolith.data.transforms.field_labels import FillMultiRankOutput, MultiLabelGen, UseFieldAsLabel
from monolith.data.transforms.filters import FilterByAction, FilterByFid, FilterByLabel, FilterByValue, RowFilter
from monolith.data.transforms.hash_text import HashText
from monolith.data.transforms.item_pool import ItemPool
from monolith.data.transforms.labels import (
    AddAction,
    AddLabel,
    LabelNormalization,
    LabelUpperBound,
    ScatterLabel,
    TaskLabel,
)
from monolith.data.transforms.negatives import NegativeGen, NegativeGenConfig
from monolith.data.transforms.rows import concat_rows, select_rows
from monolith.data.transforms.sampling import InstanceReweight, NegativeSample, UpsamplePositives
from monolith.data.transforms.seeded import Seeded
from monolith.data.transforms.strategies import SpecialStrategy, StrategyRule
from monolith.data.transforms.text import FilterByText, read_filter_values

__all__ = [
    "AddAction",
    "AddLabel",
    "Compose",
    "FeatureCombine",
    "FidMask",
    "FillMultiRankOutput",
    "FilterByAction",
    "FilterByExpression",
    "FilterByFid",
    "FilterByLabel",
    "FilterByText",
    "FilterByValue",
    "HashText",
    "InstanceReweight",
    "ItemPool",
    "LabelNormalization",
    "LabelUpperBound",
    "LogBucketFid",
    "LogicalOr",
    "MapId",
    "MultiLabelGen",
    "NegativeGen",
    "NegativeGenConfig",
    "NegativeSample",
    "RowFilter",
    "ScatterLabel",
    "Seeded",
    "SpecialStrategy",
    "StrategyRule",
    "SwitchSlot",
    "TaskLabel",
    "Transformed",
    "UpsamplePositives",
    "UseFieldAsLabel",
    "combine_ids",
    "concat_rows",
    "read_filter_values",
    "select_rows",
]
