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

from monolith.errors import InvalidArgumentError
from monolith.features.batch import Batch, Column, column_of, num_rows
from monolith.features.declaration import Declaration, TableDeclaration
from monolith.features.feature import Feature
from monolith.features.ids import to_fids
from monolith.features.ragged import Ragged
from monolith.table.store import Bags

__all__ = ["ColumnBags", "TableBags", "bags_of"]


@dataclass(frozen=True, kw_only=True)
class ColumnBags:
    """The bags of one feature, and how their vectors become its outputs."""

    feature: Feature
    ids: np.ndarray
    """int64 [n], as in the batch."""
    row_splits: np.ndarray
    """int64 [rows + 1]: which ids belong to which row of the batch."""
    bag_splits: np.ndarray
    """int64 [bags + 1]: which ids pool to one vector."""
    has_bias: bool
    """Whether the first element of a vector is a bias."""
    scale: torch.Tensor | None
    """[bags, 1]: what turns the sum that the table gives into the pooling asked for; None: nothing to do."""

    def outputs(self, pooled: torch.Tensor) -> Batch:
        """The outputs of the feature, made of its vectors: float32 [bags, width]."""
        name = self.feature.name
        if self.scale is not None:
            pooled = pooled * self.scale.to(pooled.device)
        outputs: Batch = {}
        if self.has_bias:
            # One split, not two slices: its gradient is one concatenation instead of two padded sums.
            bias, pooled = torch.split(pooled, [1, pooled.shape[1] - 1], dim=1)
            if self.feature.bias:
                outputs[f"{name}.bias"] = self._by_row(bias)
        outputs[name] = self._by_row(pooled)
        if self.feature.max_length is not None:
            mask = torch.from_numpy(np.diff(self.bag_splits) == 1).view(-1, self.feature.max_length)
            outputs[f"{name}.mask"] = mask.to(pooled.device)
        return outputs

    def _by_row(self, vectors: torch.Tensor) -> Column:
        if self.feature.pooling == "none":
            return Ragged(vectors, self.row_splits)
        if self.feature.max_length is not None:
            return vectors.reshape(len(self.row_splits) - 1, self.feature.max_length, vectors.shape[1])
        return vectors


@dataclass(frozen=True, kw_only=True)
class TableBags:
    """The request to one table, and whose bags are in it."""

    bags: Bags
    columns: Sequence[ColumnBags]
    counts: list[int]
    """Bags of each column."""
    device: torch.device
    """Where the batch is."""


def bags_of(declaration: Declaration, batch: Mapping[str, Column]) -> list[TableBags]:
    """One request per table for all features of `batch`."""
    num_rows(batch, [feature.name for table in declaration.tables for feature in table.features])
    return [_table_bags(table, batch) for table in declaration.tables]


def _table_bags(table: TableDeclaration, batch: Mapping[str, Column]) -> TableBags:
    columns = [_column_bags(feature, table, batch) for feature in table.features]
    ids = np.concatenate([column.ids for column in columns])
    if table.slots[0] is not None:
        ids = to_fids(ids, np.repeat(np.array(table.slots), [len(column.ids) for column in columns])).numpy()
    first = batch[table.features[0].name]
    return TableBags(
        bags=Bags(
            table=table.config.name,
            ids=ids,
            row_splits=_joined([column.bag_splits for column in columns]),
            pooling=table.pooling,
        ),
        columns=columns,
        counts=[len(column.bag_splits) - 1 for column in columns],
        device=(first.values if isinstance(first, Ragged) else first).device,
    )


def _column_bags(feature: Feature, table: TableDeclaration, batch: Mapping[str, Column]) -> ColumnBags:
    ids, row_splits = _ids_by_row(feature.name, column_of(batch, feature.name))
    bag_splits, scale = row_splits, None
    if feature.max_length is not None:
        ids, row_splits, bag_splits = _padded(ids, row_splits, feature.max_length, last=feature.pooling == "last_n")
    elif feature.pooling == "none":
        bag_splits = _even_splits(len(ids), 1)
    elif feature.pooling != table.pooling:
        scale = _scale(feature.pooling, row_splits)
    return ColumnBags(
        feature=feature,
        ids=ids,
        row_splits=row_splits,
        bag_splits=bag_splits,
        has_bias=table.has_bias,
        scale=scale,
    )


def _ids_by_row(name: str, column: Column) -> tuple[np.ndarray, np.ndarray]:
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
    ids = values.detach().to("cpu", torch.int64).numpy()
    if isinstance(column, Ragged):
        return np.ascontiguousarray(ids), column.row_splits.numpy()
    return ids.reshape(-1), _even_splits(len(ids), 1 if ids.ndim == 1 else ids.shape[1])


def _padded(
    ids: np.ndarray, row_splits: np.ndarray, length: int, *, last: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ids kept, where each row of them ends, and `length` bags a row: of one id, or, as padding, of none."""
    kept = np.minimum(np.diff(row_splits), length)
    splits = np.concatenate([[0], np.cumsum(kept)])
    if splits[-1] < len(ids):
        begins = row_splits[1:] - kept if last else row_splits[:-1]
        ids = ids[np.repeat(begins - splits[:-1], kept) + np.arange(splits[-1])]
    filled = np.arange(length) < kept[:, None]
    return ids, splits, np.concatenate([[0], np.cumsum(filled)])


def _scale(pooling: str, row_splits: np.ndarray) -> torch.Tensor:
    counts = torch.from_numpy(np.diff(row_splits)).clamp(min=1).float().unsqueeze(1)
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
