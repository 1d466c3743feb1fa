"""`FusedLayout`: from a batch, or the original's messages, to the named outputs of a `FeatureConfigs`, with gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import nn

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features.batch import Batch, BatchColumn
from monolith.features.ids import fid_v1_to_v2
from monolith.features.ragged import Ragged
from monolith.nn.collection import EmbeddingBagCollection
from monolith.original.fused_layout import (
    FeatureConfig,
    FeatureConfigs,
    OutConfig,
    Outputs,
    OutType,
    PoolingType,
    SliceConfig,
    arrange,
    features_of,
)
from monolith.table.config import Segment
from monolith.table.store import Store

if TYPE_CHECKING:
    from monolith.proto import example_pb2, feature_pb2, layout_pb2

__all__ = ["FusedLayout", "batch_from_examples", "feature_configs_from_proto", "feature_configs_to_proto"]

_Member = TypeVar("_Member", bound=IntEnum)


def feature_configs_from_proto(message: layout_pb2.FeatureConfigs) -> FeatureConfigs:
    """Check and convert a message. Its shapes, which are optional, must be those that follow from the slices.

    Example:
        >>> from monolith.proto import layout_pb2
        >>> message = layout_pb2.FeatureConfigs()
        >>> message.feature_configs["user"].table = "t"
        >>> message.feature_configs["user"].slice_dims.extend([1, 4])
        >>> feature_configs_from_proto(message).feature_configs["user"].dim
        5
    """
    features = {name: _feature(name, feature) for name, feature in message.feature_configs.items()}
    outs = {name: _out(name, out) for name, out in message.out_configs.items()}
    configs = FeatureConfigs(feature_configs=features, out_configs=outs)
    for name, out in message.out_configs.items():
        said = tuple(tuple(shape.dims) for shape in out.shape)
        if said and said != configs.shapes(name):
            raise ConfigError(f"out_configs[{name!r}].shape: expected {configs.shapes(name)}, got {said}")
    return configs


def feature_configs_to_proto(configs: FeatureConfigs) -> layout_pb2.FeatureConfigs:
    """Return the message, with the shape of every output.

    Example:
        >>> configs = FeatureConfigs(feature_configs={"user": FeatureConfig(table="t", slice_dims=(1, 4))}, out_configs={})
        >>> feature_configs_from_proto(feature_configs_to_proto(configs)) == configs
        True
    """
    from monolith.proto import layout_pb2

    message = layout_pb2.FeatureConfigs()
    for name, feature in configs.feature_configs.items():
        message.feature_configs[name].CopyFrom(layout_pb2.FeatureConfig(**feature.model_dump()))
    for name, out in configs.out_configs.items():
        target = message.out_configs[name]
        target.CopyFrom(layout_pb2.OutConfig(out_type=layout_pb2.OutType.Name(out.out_type)))
        for part in out.slice_configs:
            target.slice_configs.add(**part.model_dump())
        for shape in configs.shapes(name):
            target.shape.add(dims=shape)
    return message


def batch_from_examples(message: example_pb2.ExampleBatch, names: Iterable[str]) -> Batch:
    """Return the fids of features `names` as `Ragged` columns, with v1 fids converted to v2.

    A feature shared by all rows is repeated for each. One that is missing has no ids in any row.

    Example:
        >>> from monolith.proto import example_pb2
        >>> message = example_pb2.ExampleBatch(batch_size=2)
        >>> user = message.named_feature_list.add(name="user", type=example_pb2.SHARED)
        >>> user.feature.add().fid_v2_list.value.append(7)
        >>> {name: column.to_lists() for name, column in batch_from_examples(message, ["user", "item"]).items()}
        {'user': [[7], [7]], 'item': [[], []]}
    """
    from monolith.proto import example_pb2

    lists = {column.name: column for column in message.named_feature_list}
    batch: Batch = {}
    for name in names:
        column = lists.get(name)
        rows = [] if column is None else [_fids(name, feature) for feature in column.feature]
        if column is None or (column.type == example_pb2.SHARED and not rows):
            rows = [np.empty(0, dtype=np.int64)] * message.batch_size
        elif column.type == example_pb2.SHARED:
            rows = rows[:1] * message.batch_size
        if len(rows) != message.batch_size:
            raise InvalidArgumentError(f"feature {name!r}: has {len(rows)} rows, the batch {message.batch_size}")
        values = np.concatenate([np.empty(0, dtype=np.int64), *rows])
        splits = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        batch[name] = Ragged(torch.from_numpy(values), splits)
    return batch


def _fids(name: str, feature: feature_pb2.Feature) -> np.ndarray:
    match feature.WhichOneof("type"):
        case "fid_v2_list":
            return np.array(feature.fid_v2_list.value, dtype=np.uint64).view(np.int64)
        case "fid_v1_list":
            return fid_v1_to_v2(np.array(feature.fid_v1_list.value, dtype=np.uint64).view(np.int64))
        case None:
            return np.empty(0, dtype=np.int64)
        case other:
            raise InvalidArgumentError(f"feature {name!r}: expected fid_v1_list or fid_v2_list, got {other}")


def _feature(name: str, feature: layout_pb2.FeatureConfig) -> FeatureConfig:
    return FeatureConfig(
        table=feature.table,
        slice_dims=tuple(feature.slice_dims),
        pooling_type=_member(PoolingType, feature.pooling_type, f"feature_configs[{name!r}].pooling_type"),
        max_sequence_length=feature.max_sequence_length,
    )


def _out(name: str, out: layout_pb2.OutConfig) -> OutConfig:
    slices = [SliceConfig(feature_name=s.feature_name, start=s.start, end=s.end) for s in out.slice_configs]
    out_type = _member(OutType, out.out_type, f"out_configs[{name!r}].out_type")
    return OutConfig(slice_configs=tuple(slices), out_type=out_type)


def _member(kind: type[_Member], number: int, where: str) -> _Member:
    try:
        return kind(number)
    except ValueError:
        raise ConfigError(f"{where}: {number} is not one of {', '.join(f'{e.name}={e.value}' for e in kind)}") from None


class FusedLayout(nn.Module):
    """Look up the features of `configs`, and arrange their slices into its outputs.

    `embeddings`, an `EmbeddingBagCollection`, looks up the rows, once per table, and trains them. `segments` gives their
    optimizers by table, see `monolith.original.fused_layout.features_of`.

    Shapes: a batch, or an ExampleBatch message, of B rows gives, by output name, CONCAT [B, sum of d], STACK [B, slices, d],
    ADDN [B, d], and NONE a tuple of one [B, d] per slice. For FIRSTN features there is an n before d.

    Example:
        >>> import torch
        >>> from monolith.original.fused_layout import FeatureConfig, FeatureConfigs, OutConfig, SliceConfig
        >>> from monolith.original import FusedLayout
        >>> slices = (SliceConfig(feature_name="user", start=1, end=5), SliceConfig(feature_name="item", start=1, end=5))
        >>> configs = FeatureConfigs(
        ...     feature_configs={name: FeatureConfig(table="t", slice_dims=(1, 4)) for name in ("user", "item")},
        ...     out_configs={"vec": OutConfig(slice_configs=slices)},
        ... )
        >>> layout = FusedLayout(configs)
        >>> layout({"user": torch.tensor([1, 2, 3]), "item": torch.tensor([7, 7, 8])})["vec"].shape
        torch.Size([3, 8])
    """

    def __init__(
        self,
        configs: FeatureConfigs,
        store: Store | None = None,
        *,
        segments: Mapping[str, tuple[Segment, ...]] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.configs = configs
        self.embeddings = EmbeddingBagCollection(features_of(configs, segments=segments), store, seed=seed)

    def forward(self, batch: Mapping[str, BatchColumn] | example_pb2.ExampleBatch) -> Outputs:
        """Look up the features and arrange the outputs."""
        columns = batch if isinstance(batch, Mapping) else batch_from_examples(batch, self.configs.feature_configs)
        return arrange(self.configs, self.embeddings(columns))
