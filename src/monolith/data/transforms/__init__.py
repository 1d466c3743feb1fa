"""Transforms: callables from batch to batch, vectorised over its rows.

They filter rows, change labels and ids, and make or drop negatives. `Compose` and `LogicalOr` combine transforms, and
`Transformed` applies them to a source. Those that draw random numbers are `Seeded` and can be saved and restored.
"""

from monolith.data.transforms.compose import Compose, LogicalOr, Seeded, Transformed
from monolith.data.transforms.expression import FilterByExpression
from monolith.data.transforms.features import (
    FeatureCombine,
    FidMask,
    HashText,
    LogBucketFid,
    MapId,
    SwitchSlot,
    combine_ids,
)
from monolith.data.transforms.filters import (
    FilterByAction,
    FilterByFid,
    FilterByLabel,
    FilterByText,
    FilterByValue,
    RowFilter,
    read_filter_values,
)
from monolith.data.transforms.labels import (
    AddAction,
    AddLabel,
    FillMultiRankOutput,
    LabelNormalization,
    LabelUpperBound,
    MultiLabelGen,
    ScatterLabel,
    TaskLabel,
    UseFieldAsLabel,
)
from monolith.data.transforms.negatives import ItemPool, NegativeGen, NegativeGenConfig
from monolith.data.transforms.rows import concat_rows, select_rows
from monolith.data.transforms.sampling import (
    InstanceReweight,
    NegativeSample,
    SpecialStrategy,
    StrategyRule,
    UpsamplePositives,
)

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
