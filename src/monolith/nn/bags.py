"""From the columns of a batch to one request per table, and from the table's answer back to outputs by feature.

Everything is a bag that pools to one vector: the ids of a row for pooled features; single ids for sequences, with empty bags,
which read zeros, in the places of padding. So all features of a table are one call, whatever their pooling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from monolith._core import stack_fids
from monolith.errors import InvalidArgumentError
from monolith.features.batch import Batch, BatchColumn, column_of, num_rows
from monolith.features.declaration import Declaration, FeatureGroup, TableDeclaration
from monolith.features.feature import Feature
from monolith.features.ragged import Ragged
from monolith.nn.bias import split_bias
from monolith.table.store import Bags

__all__ = ["FeatureBags", "TableBags", "bags_of"]


@dataclass(frozen=True, kw_only=True)
class FeatureBags:
    """The bags of one feature, or of a stack of them, and how their vectors become outputs."""

    feature: Feature
    """The only one, or the first of a stack."""
    stacked: int | None = None
    """Features of the stack, whose bags follow each other row by row; None: it is no stack."""
    ids: np.ndarray
    """int64 [n], as the table knows them: fids where features have slots."""
    offsets: np.ndarray
    """int64 [rows + 1]: which ids belong to which row of the batch."""
    bag_splits: np.ndarray
    """int64 [bags + 1]: which ids pool to one vector."""
    has_bias: bool
    """Whether the first element of a vector is a bias."""
    scale: torch.Tensor | None
    """[bags, 1]: what turns the sum that the table gives into the pooling asked for; None: nothing to do."""

    def outputs(self, pooled: torch.Tensor) -> Batch:
        """The outputs, made of the vectors: float32 [bags, width]."""
        feature = self.feature
        name = feature.outputs[0] if self.stacked else feature.name
        if self.scale is not None:
            pooled = pooled * self.scale.to(pooled.device)
        outputs: Batch = {}
        if self.has_bias:
            bias, pooled = split_bias(pooled)
            if feature.bias:
                outputs[f"{name}.bias"] = self._by_row(bias)
        outputs[name] = self._by_row(pooled)
        if feature.max_length is not None:
            mask = torch.from_numpy(np.diff(self.bag_splits) == 1).view(-1, feature.max_length)
            outputs[f"{name}.mask"] = mask.to(pooled.device)
        return outputs

    def _by_row(self, vectors: torch.Tensor) -> BatchColumn:
        if self.feature.pooling == "none":
            return Ragged(vectors, self.offsets)
        length = self.stacked or self.feature.max_length
        return vectors if length is None else vectors.reshape(len(self.offsets) - 1, length, vectors.shape[1])


@dataclass(frozen=True, kw_only=True)
class TableBags:
    """The request to one table, and whose bags are in it."""

    bags: Bags
    parts: Sequence[FeatureBags]
    counts: list[int]
    """Bags of each part."""
    device: torch.device
    """Where the batch is."""


def bags_of(declaration: Declaration, batch: Mapping[str, object]) -> list[TableBags]:
    """One request per table for all features of `batch`."""
    names = [feature.name for table in declaration.tables for feature in table.features]
    columns = {name: column_of(batch, name) for name in names}
    if len({len(column) for column in columns.values()}) > 1:
        num_rows(columns)  # raises, and names the columns
    return [_table_bags(table, columns) for table in declaration.tables]


def _table_bags(table: TableDeclaration, batch: Mapping[str, BatchColumn]) -> TableBags:
    parts = [_group_bags(group, table, batch) for group in table.groups]
    ids = [part.ids for part in parts]
    first = batch[table.features[0].name]
    bags = Bags(
        table=table.config.name,
        ids=ids[0] if len(ids) == 1 else np.concatenate(ids),
        offsets=_joined([part.bag_splits for part in parts]),
        pooling=table.pooling,
    )
    return TableBags(
        bags=bags,
        parts=parts,
        counts=[len(part.bag_splits) - 1 for part in parts],
        device=(first.values if isinstance(first, Ragged) else first).device,
    )


def _group_bags(group: FeatureGroup, table: TableDeclaration, batch: Mapping[str, BatchColumn]) -> FeatureBags:
    if group.stack is None:
        return _feature_bags(group.features[0], group.slots[0], table, batch)
    if all(_has_one_id_per_row(batch[feature.name]) for feature in group.features):
        return _stacked_ids(group, table, batch)
    pairs = zip(group.features, group.slots, strict=True)
    return _stacked_bags([_feature_bags(feature, slot, table, batch) for feature, slot in pairs])


def _feature_bags(
    feature: Feature, slot: int | None, table: TableDeclaration, batch: Mapping[str, BatchColumn]
) -> FeatureBags:
    ids, offsets = _ids_by_row(feature.name, column_of(batch, feature.name))
    bag_splits, scale = offsets, None
    if feature.max_length is not None:
        ids, offsets, bag_splits = _padded(ids, offsets, feature.max_length, last=feature.pooling == "last_n")
    elif feature.pooling == "none":
        bag_splits = _even_splits(len(ids), 1)
    elif feature.pooling != table.pooling:
        scale = _scale(feature.pooling, offsets)
    return FeatureBags(
        feature=feature,
        ids=_stacked_fids([ids], [slot]),
        offsets=offsets,
        bag_splits=bag_splits,
        has_bias=table.has_bias,
        scale=scale,
    )


def _has_one_id_per_row(column: BatchColumn) -> bool:
    return isinstance(column, torch.Tensor) and column.ndim == 1


def _stacked_ids(group: FeatureGroup, table: TableDeclaration, batch: Mapping[str, BatchColumn]) -> FeatureBags:
    """The bags of several features with one id per row each, which every pooling leaves as it is."""
    columns = [_ids_by_row(feature.name, batch[feature.name])[0] for feature in group.features]
    bag_splits = _even_splits(len(columns[0]) * len(columns), 1)
    return FeatureBags(
        feature=group.features[0],
        stacked=len(columns),
        ids=_stacked_fids(columns, group.slots),
        offsets=bag_splits[:: len(columns)],
        bag_splits=bag_splits,
        has_bias=table.has_bias,
        scale=None,
    )


def _stacked_bags(members: Sequence[FeatureBags]) -> FeatureBags:
    """The bags of several features, row by row instead of feature by feature."""
    rows, count = len(members[0].offsets) - 1, len(members)
    ids = np.concatenate([member.ids for member in members])
    lengths = np.stack([np.diff(member.offsets) for member in members], axis=1).reshape(-1)
    begins = np.cumsum([0, *(len(member.ids) for member in members[:-1])])
    begins = np.stack([m.offsets[:-1] + begin for m, begin in zip(members, begins, strict=True)], axis=1)
    bag_splits = np.concatenate([[0], np.cumsum(lengths)])
    scale = None
    if any(member.scale is not None for member in members):
        ones = torch.ones(rows, 1)
        scale = torch.cat([ones if m.scale is None else m.scale for m in members], dim=1).reshape(-1, 1)
    return FeatureBags(
        feature=members[0].feature,
        stacked=count,
        ids=ids[np.repeat(begins.reshape(-1) - bag_splits[:-1], lengths) + np.arange(len(ids))],
        offsets=bag_splits[::count],
        bag_splits=bag_splits,
        has_bias=members[0].has_bias,
        scale=scale,
    )


def _stacked_fids(columns: Sequence[np.ndarray], slots: Sequence[int | None]) -> np.ndarray:
    """Always a copy: the step comes later, and by then the caller may have put the next batch into the same memory."""
    return stack_fids(columns, [-1 if slot is None else slot for slot in slots])


def _ids_by_row(name: str, column: BatchColumn) -> tuple[np.ndarray, np.ndarray]:
    values = column.values if isinstance(column, Ragged) else column
    if values.dtype not in (torch.int64, torch.int32):
        raise InvalidArgumentError(
            f"batch[{name!r}]: expected ids of type int64, got {values.dtype}; strings become ids with "
            "monolith.features.hash_strings"
        )
    expected = 1 if isinstance(column, Ragged) else 2
    if values.ndim > expected:
        shape = "values [n]" if isinstance(column, Ragged) else "[rows] or [rows, n]"
        raise InvalidArgumentError(f"batch[{name!r}]: expected {shape}, got {list(values.shape)}")
    ids = np.ascontiguousarray(values.detach().to("cpu", torch.int64).numpy())
    if isinstance(column, Ragged):
        return ids, column.offsets.numpy()
    return ids.reshape(-1), _even_splits(len(ids), 1 if ids.ndim == 1 else ids.shape[1])


def _padded(
    ids: np.ndarray, offsets: np.ndarray, length: int, *, last: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ids kept, where each row of them ends, and `length` bags a row: of one id, or, as padding, of none."""
    kept = np.minimum(np.diff(offsets), length)
    splits = np.concatenate([[0], np.cumsum(kept)])
    if splits[-1] < len(ids):
        begins = offsets[1:] - kept if last else offsets[:-1]
        ids = ids[np.repeat(begins - splits[:-1], kept) + np.arange(splits[-1])]
    filled = np.arange(length) < kept[:, None]
    return ids, splits, np.concatenate([[0], np.cumsum(filled)])


def _scale(pooling: str, offsets: np.ndarray) -> torch.Tensor:
    counts = torch.from_numpy(np.diff(offsets)).clamp(min=1).float().unsqueeze(1)
    return 1 / (counts if pooling == "mean" else counts.sqrt())


def _joined(splits: Sequence[np.ndarray]) -> np.ndarray:
    """The splits of batches put behind each other."""
    if len(splits) == 1:
        return splits[0]
    out = np.empty(sum(map(len, splits)) - len(splits) + 1, dtype=np.int64)
    out[0] = end = at = 0
    for part in splits:
        np.add(part[1:], end, out=out[at + 1 : at + len(part)])
        at += len(part) - 1
        end += int(part[-1])
    return out


@lru_cache(maxsize=64)
def _even_splits(rows: int, width: int) -> np.ndarray:
    return np.arange(0, rows * width + 1, width) if width else np.zeros(rows + 1, dtype=np.int64)
