"""`EmbeddingSlices`: declare the inputs of a model slice by slice, as in the original, and get their `FusedLayout`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from monolith.errors import ConfigError
from monolith.original.fused_layout import (
    FeatureConfig,
    FeatureConfigs,
    OutConfig,
    Outputs,
    OutType,
    PoolingType,
    SliceConfig,
    join_slices,
    layout_name,
)
from monolith.table.config import Segment

__all__ = ["EmbeddingSlices", "SliceLookup"]

FeatureName = int | str
"""The name of a feature. An integer n stands for `fc_slot_<n>`."""
Names = Sequence[FeatureName] | Sequence[tuple[str, int]] | Mapping[FeatureName, int] | Sequence[list[int]]
_Group = list[tuple[str, int]]

_JOINS = {"add_n": OutType.ADDN, "concat": OutType.CONCAT, "stack": OutType.STACK, None: OutType.NONE}
_POOLINGS = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN, "first_n": PoolingType.FIRSTN}


@dataclass(frozen=True, kw_only=True)
class SliceLookup:
    """Finds the tensors of one declared lookup in the outputs of a `FusedLayout`."""

    outputs: tuple[str, ...]
    """The outputs it is made of: one for all features, or one per group."""
    groups_by: OutType | None
    """How groups are joined, or None without groups."""

    def __call__(self, outputs: Outputs) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The slices: "add_n" [rows, d], "concat" [rows, sum of d], "stack" [rows, n, d], None a tuple of [rows, d]."""
        if self.groups_by is None:
            return outputs[self.outputs[0]]
        groups = [outputs[name] for name in self.outputs]
        return join_slices([group for group in groups if isinstance(group, torch.Tensor)], self.groups_by)


class EmbeddingSlices:
    """Features and the named slices of their embeddings, collected while a model is built.

    Asking for a slice of a feature again, by the same name, gives the same elements.

    Example:
        >>> from monolith.original import FusedLayout
        >>> from monolith.table import Ftrl, Zeros
        >>> slices = EmbeddingSlices()
        >>> weight = Segment(dim=1, initializer=Zeros(), optimizer=Ftrl())
        >>> bias = slices.lookup_embedding_slice(["user", "item"], "bias", weight, out_type="add_n")
        >>> vector = slices.lookup_embedding_slice({"user": 4, "item": 8}, "vector", out_type="concat")
        >>> layout = FusedLayout(slices.configs, segments=slices.segments)
        >>> outputs = layout({"user": torch.tensor([1, 2]), "item": torch.tensor([7, 7])})
        >>> list(bias(outputs).shape), list(vector(outputs).shape)
        ([2, 1], [2, 12])
    """

    def __init__(self) -> None:
        self._features: dict[str, tuple[str, PoolingType, int]] = {}
        self._tables: dict[str, dict[str, Segment]] = {}
        self._outputs: dict[str, OutConfig] = {}

    def create_embedding_feature_column(
        self,
        name: FeatureName,
        *,
        combiner: Literal["sum", "mean", "first_n"] = "sum",
        max_seq_length: int = 0,
        shared_name: FeatureName | None = None,
    ) -> None:
        """Set how a feature is pooled, and whose rows and slices it shares. Other features have their own rows and sum them.

        `max_seq_length` is the number of ids kept of each row with "first_n".
        """
        table = _named(name if shared_name is None else shared_name)
        described = (table, _POOLINGS[combiner], max_seq_length)
        if self._features.setdefault(_named(name), described) != described:
            raise ConfigError(f"{_named(name)}: described or looked up before, as {self._features[_named(name)]}")

    def lookup_embedding_slice(
        self,
        features: Names,
        slice_name: str,
        segment: Segment | None = None,
        *,
        group_out_type: Literal["add_n", "concat"] = "add_n",
        out_type: Literal["add_n", "concat", "stack"] | None = None,
    ) -> SliceLookup:
        """Declare the slice `slice_name` of each of `features`, joined by `out_type`. None keeps them separate.

        Args:
            features: names, or pairs of name and dim, or a mapping of name to dim, or groups, lists of integers, each of which
                is made one by `group_out_type` first.
            slice_name: names the slice in every feature.
            segment: initializer, optimizer and dim of the slice. Dims in `features` take precedence.
        """
        grouped, groups = _groups(features, None if segment is None else segment.dim)
        join = _JOINS[group_out_type if grouped else out_type]
        outputs = tuple(self._output(slice_name, group, segment or Segment(dim=1), join) for group in groups)
        return SliceLookup(outputs=outputs, groups_by=_JOINS[out_type] if grouped else None)

    @property
    def configs(self) -> FeatureConfigs:
        """Everything declared so far, for `FusedLayout`."""
        features = {
            name: FeatureConfig(
                table=table,
                slice_dims=tuple(segment.dim for segment in self._tables[table].values()),
                pooling_type=pooling,
                max_sequence_length=length,
            )
            for name, (table, pooling, length) in self._features.items()
            if table in self._tables
        }
        return FeatureConfigs(feature_configs=features, out_configs=self._outputs)

    @property
    def segments(self) -> dict[str, tuple[Segment, ...]]:
        """The rows of every table, for `FusedLayout`."""
        return {table: tuple(slices.values()) for table, slices in self._tables.items()}

    def _output(self, slice_name: str, group: _Group, segment: Segment, join: OutType) -> str:
        parts = tuple(self._slice(name, slice_name, segment.model_copy(update={"dim": dim})) for name, dim in group)
        name = layout_name(slice_name, [feature for feature, _ in group])
        out = OutConfig(slice_configs=parts, out_type=join)
        if self._outputs.setdefault(name, out) != out:
            raise ConfigError(
                f"{slice_name} of {', '.join(feature for feature, _ in group)}: declared before in another order or with "
                "another out_type; use what that call returned"
            )
        return name

    def _slice(self, feature: str, slice_name: str, segment: Segment) -> SliceConfig:
        table, _, _ = self._features.setdefault(feature, (feature, PoolingType.SUM, 0))
        slices = self._tables.setdefault(table, {})
        if slices.setdefault(slice_name, segment) != segment:
            raise ConfigError(
                f"{feature}: slice {slice_name!r} was declared as {slices[slice_name]!r}, now as {segment!r}"
            )
        # Slices are only ever added behind the others, so their places stay.
        before = list(slices)[: list(slices).index(slice_name)]
        start = sum(slices[name].dim for name in before)
        return SliceConfig(feature_name=feature, start=start, end=start + segment.dim)


def _named(name: FeatureName) -> str:
    return f"fc_slot_{name}" if isinstance(name, int) else name


def _groups(features: Names, dim: int | None) -> tuple[bool, list[_Group]]:
    """Return whether `features` are groups, and the names and dims of each group. Without groups all are in one."""
    if not features:
        raise ConfigError("features: expected at least one, got none")
    if isinstance(features, Mapping):
        return False, [[(_named(name), own) for name, own in features.items()]]
    pairs = [part for part in features if isinstance(part, tuple)]
    if len(pairs) == len(features):
        return False, [[(_named(name), own) for name, own in pairs]]
    if dim is None:
        raise ConfigError("segment: needed for its dim, which features without one of their own have")
    lists = [part for part in features if isinstance(part, list)]
    if len(lists) == len(features):
        return True, [[(_named(name), dim) for name in part] for part in lists]
    names = [part for part in features if isinstance(part, int | str)]
    if len(names) == len(features):
        return False, [[(_named(name), dim) for name in names]]
    raise ConfigError(f"features: expected names, (name, dim) pairs, a mapping or lists of integers, got {features!r}")
