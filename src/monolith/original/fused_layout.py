"""The fused layout: which slices of which features' embeddings make up each named output.

`FeatureConfigs` is the typed form of the original's message of the same name, with the same field names and numbers. It says
what a model reads. `fused_lookup` looks the features up, arranges them, and converts the messages themselves.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Annotated, Self

import torch
from pydantic import Field, model_validator

from monolith.config import Config
from monolith.errors import ConfigError
from monolith.features.batch import BatchColumn, column_of
from monolith.features.feature import Feature, FeaturePooling
from monolith.features.ragged import Ragged
from monolith.table.config import Segment

__all__ = [
    "FeatureConfig",
    "FeatureConfigs",
    "OutConfig",
    "OutType",
    "PoolingType",
    "SliceConfig",
    "arrange",
    "features_of",
    "join_slices",
    "layout_name",
]

Outputs = dict[str, torch.Tensor | tuple[torch.Tensor, ...]]
"""Tensors by output name, sorted. A tuple with one tensor per slice for `OutType.NONE`."""


class PoolingType(IntEnum):
    """How the ids of a row become one entry."""

    SUM = 0
    MEAN = 1
    FIRSTN = 3


class OutType(IntEnum):
    """How slices [rows, d] become an output: concatenated, stacked [rows, slices, d], added, or separate."""

    CONCAT = 0
    STACK = 1
    ADDN = 2
    NONE = 3


_POOLING: dict[PoolingType, FeaturePooling] = {
    PoolingType.SUM: "sum",
    PoolingType.MEAN: "mean",
    PoolingType.FIRSTN: "first_n",
}


class FeatureConfig(Config):
    """One feature: its table, the dims of the slices of its embedding, and its pooling."""

    table: Annotated[str, Field(min_length=1)]
    """Features of one table share rows: the same fid means the same embedding."""
    slice_dims: Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(min_length=1)]
    """Dims of the parts of the embedding, in order."""
    pooling_type: PoolingType = PoolingType.SUM
    """How the ids of a row become one entry."""
    max_sequence_length: Annotated[int, Field(ge=0)] = 0
    """Ids kept of each row with `FIRSTN`, otherwise 0."""

    @model_validator(mode="after")
    def _length_of_sequences(self) -> Self:
        if (self.pooling_type == PoolingType.FIRSTN) != (self.max_sequence_length > 0):
            raise ValueError("expected max_sequence_length > 0 with pooling_type FIRSTN, and 0 with the others")
        return self

    @property
    def dim(self) -> int:
        """Elements of the whole embedding."""
        return sum(self.slice_dims)


class SliceConfig(Config):
    """The elements [start, end) of the embedding of one feature."""

    feature_name: str
    start: Annotated[int, Field(ge=0)]
    end: int

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.end <= self.start:
            raise ValueError(f"end: expected more than start {self.start}, not {self.end}")
        return self

    @property
    def dim(self) -> int:
        """Elements of the slice."""
        return self.end - self.start


class OutConfig(Config):
    """One output: its slices, and how they are put together."""

    slice_configs: Annotated[tuple[SliceConfig, ...], Field(min_length=1)]
    """In the order of the output."""
    out_type: OutType = OutType.CONCAT
    """How the slices are put together."""


class FeatureConfigs(Config):
    """Features and outputs of a model.

    Sequences (`FIRSTN`, [rows, n, d]) may be put together with sequences of the same length only: CONCAT gives
    [rows, n, sum of d], STACK [rows, slices, n, d]. ADDN refuses them.

    Example:
        >>> configs = FeatureConfigs(
        ...     feature_configs={
        ...         "user": FeatureConfig(table="t", slice_dims=(1, 4)),
        ...         "item": FeatureConfig(table="t", slice_dims=(1, 4)),
        ...     },
        ...     out_configs={
        ...         "bias": OutConfig(
        ...             slice_configs=(
        ...                 SliceConfig(feature_name="user", start=0, end=1),
        ...                 SliceConfig(feature_name="item", start=0, end=1),
        ...             ),
        ...             out_type=OutType.ADDN,
        ...         )
        ...     },
        ... )
        >>> configs.shapes("bias")
        ((-1, 1),)
    """

    feature_configs: dict[str, FeatureConfig]
    """By feature name, which is the column of the batch."""
    out_configs: dict[str, OutConfig]
    """By output name."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, feature in self.feature_configs.items():
            other, first = next((n, f) for n, f in self.feature_configs.items() if f.table == feature.table)
            if first.slice_dims != feature.slice_dims:
                raise ValueError(
                    f"feature_configs[{name!r}]: slice_dims {feature.slice_dims}, but feature_configs[{other!r}] has "
                    f"{first.slice_dims} in the same table {feature.table!r}"
                )
        for name, out in self.out_configs.items():
            self._check(f"out_configs[{name!r}]", out)
        return self

    def _check(self, where: str, out: OutConfig) -> None:
        for place, part in enumerate(out.slice_configs):
            feature = self.feature_configs.get(part.feature_name)
            if feature is None:
                raise ValueError(f"{where}.slice_configs[{place}]: there is no feature_configs[{part.feature_name!r}]")
            if part.end > feature.dim:
                raise ValueError(
                    f"{where}.slice_configs[{place}]: end {part.end} is beyond the {feature.dim} elements of "
                    f"feature_configs[{part.feature_name!r}]"
                )
        if out.out_type == OutType.NONE:
            return
        lengths = [self.feature_configs[part.feature_name].max_sequence_length for part in out.slice_configs]
        if len(set(lengths)) > 1:
            raise ValueError(f"{where}: sequences of lengths {lengths} cannot be put together; use NONE")
        if out.out_type == OutType.ADDN and lengths[0]:
            raise ValueError(f"{where}: ADDN of FIRSTN sequences has no meaning; use NONE or STACK")
        dims = [part.dim for part in out.slice_configs]
        if out.out_type != OutType.CONCAT and len(set(dims)) > 1:
            raise ValueError(f"{where}: {out.out_type.name} needs slices of one dim, got {dims}")

    def shapes(self, output: str) -> tuple[tuple[int, ...], ...]:
        """Return the shape of each tensor of an output, with -1 for the rows of the batch."""
        out = self.out_configs[output]
        length = [self.feature_configs[part.feature_name].max_sequence_length for part in out.slice_configs]
        dims, count = [part.dim for part in out.slice_configs], len(out.slice_configs)
        sequence = (length[0],) if length[0] else ()
        match out.out_type:
            case OutType.CONCAT:
                return ((-1, *sequence, sum(dims)),)
            case OutType.STACK:
                return ((-1, count, *sequence, dims[0]),)
            case OutType.ADDN:
                return ((-1, dims[0]),)
            case OutType.NONE:
                return tuple((-1, n, d) if n else (-1, d) for n, d in zip(length, dims, strict=True))


def layout_name(slice_name: str, features: Iterable[str]) -> str:
    """Return the original's name of an output: the slice's name, and the MD5 of the sorted feature names joined by commas.

    Example:
        >>> layout_name("vec", ["user", "item"])
        'vec_4a67a0256dacbca594916cce369e6d13'
    """
    digest = hashlib.md5(",".join(sorted(features)).encode(), usedforsecurity=False).hexdigest()
    return f"{slice_name}_{digest}"


def features_of(
    configs: FeatureConfigs, *, segments: Mapping[str, tuple[Segment, ...]] | None = None
) -> tuple[Feature, ...]:
    """Return the features, sorted by name, for an `EmbeddingBagCollection`, with one table for all that name it.

    `segments` gives, by table, optimizers and initializers to the slices of a row. A table not named gets the defaults.

    Example:
        >>> config = FeatureConfig(table="t", slice_dims=(1, 4), pooling_type=PoolingType.MEAN)
        >>> user, = features_of(FeatureConfigs(feature_configs={"user": config}, out_configs={}))
        >>> user.pooling, [segment.dim for segment in user.row]
        ('mean', [1, 4])
    """
    owners: dict[str, str] = {}
    features = []
    for name, config in sorted(configs.feature_configs.items()):
        pooling, max_length = _POOLING[config.pooling_type], config.max_sequence_length or None
        owner = owners.setdefault(config.table, name)
        if owner != name:
            features.append(Feature(name=name, pooling=pooling, max_length=max_length, shared_with=owner))
            continue
        row = (segments or {}).get(config.table) or tuple(Segment(dim=dim) for dim in config.slice_dims)
        if (dims := tuple(segment.dim for segment in row)) != config.slice_dims:
            raise ConfigError(
                f"segments[{config.table!r}]: dims {dims}, but feature_configs[{name!r}] has {config.slice_dims}"
            )
        features.append(Feature(name=name, pooling=pooling, max_length=max_length, table=config.table, segments=row))
    return tuple(features)


def arrange(configs: FeatureConfigs, embeddings: Mapping[str, BatchColumn]) -> Outputs:
    """Return the outputs made of the embeddings of the features, [rows, dim], or [rows, n, dim] for sequences.

    Example:
        >>> feature = FeatureConfig(table="t", slice_dims=(1, 2))
        >>> slices = tuple(SliceConfig(feature_name="user", start=i, end=i + 1) for i in range(3))
        >>> out = OutConfig(slice_configs=slices, out_type=OutType.ADDN)
        >>> configs = FeatureConfigs(feature_configs={"user": feature}, out_configs={"sum": out})
        >>> arrange(configs, {"user": torch.tensor([[1.0, 2.0, 3.0]])})
        {'sum': tensor([[6.]])}
    """
    pieces = {name: _pieces(name, configs, embeddings) for name in configs.feature_configs}
    return {name: _put_together(out, pieces) for name, out in sorted(configs.out_configs.items())}


_Pieces = dict[tuple[int, int], torch.Tensor]


def _pieces(name: str, configs: FeatureConfigs, embeddings: Mapping[str, BatchColumn]) -> _Pieces:
    """Return an embedding split at every end of a slice, by (start, end).

    One split for all slices: its gradient is one concatenation, where each slice alone would add a whole padded embedding.
    """
    wanted = [s for out in configs.out_configs.values() for s in out.slice_configs if s.feature_name == name]
    if not wanted:
        return {}
    cuts = sorted({0, configs.feature_configs[name].dim} | {end for s in wanted for end in (s.start, s.end)})
    ranges = list(itertools.pairwise(cuts))
    parts = torch.split(_dense(embeddings, name), [end - start for start, end in ranges], dim=-1)
    return dict(zip(ranges, parts, strict=True))


def _slice(part: SliceConfig, pieces: _Pieces) -> torch.Tensor:
    inside = [piece for (start, end), piece in pieces.items() if part.start <= start and end <= part.end]
    return inside[0] if len(inside) == 1 else torch.cat(inside, dim=-1)


def _put_together(out: OutConfig, pieces: Mapping[str, _Pieces]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    return join_slices([_slice(part, pieces[part.feature_name]) for part in out.slice_configs], out.out_type)


def join_slices(parts: Sequence[torch.Tensor], out_type: OutType) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Join tensors [rows, d] into one output. See `OutType`.

    Example:
        >>> join_slices([torch.zeros(2, 3), torch.zeros(2, 3)], OutType.STACK).shape
        torch.Size([2, 2, 3])
    """
    match out_type:
        case OutType.CONCAT:
            return torch.cat(tuple(parts), dim=-1)
        case OutType.STACK:
            return torch.stack(tuple(parts), dim=1)
        case OutType.ADDN:
            return torch.stack(tuple(parts)).sum(dim=0)
        case OutType.NONE:
            return tuple(parts)


def _dense(embeddings: Mapping[str, BatchColumn], name: str) -> torch.Tensor:
    column = column_of(embeddings, name)
    if isinstance(column, Ragged):
        raise ConfigError(
            f"embeddings[{name!r}]: expected a tensor, got a Ragged; a layout pools or pads every feature"
        )
    return column
