"""From the columns of a batch to one request for all tables, and from the answer back to outputs by feature.

Everything is a bag that pools to one vector. For pooled features a bag has the ids of a row. For sequences it has a single id,
or none, which reads zeros, as padding. So all features of a table are one call, whatever their pooling.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from monolith._core import put_slots, stack_fids
from monolith.errors import InvalidArgumentError
from monolith.features.batch import Batch, BatchColumn, IdMatrix, column_of, num_rows
from monolith.features.declaration import Declaration, FeatureGroup, TableDeclaration
from monolith.features.feature import Feature
from monolith.features.ragged import Ragged
from monolith.nn.kernels import split_bias
from monolith.table.bags import PackedBags, PackedLayout

__all__ = ["BagPlan", "BatchBags"]


@dataclass(frozen=True, kw_only=True)
class FeatureBags:
    """The bags of one feature, or of a stack of them, in one batch."""

    ids: np.ndarray
    """int64 [n], as the table knows them: fids where features have slots."""
    offsets: np.ndarray
    """int64 [rows + 1]: which ids belong to which row of the batch."""
    bag_splits: np.ndarray
    """int64 [bags + 1]: which ids pool to one vector."""
    scale: torch.Tensor | None
    """[bags, 1]: factor from the table's sum to the feature's pooling. None: the table pools as the feature does."""


class _Group:
    """A feature of a table, or a stack that is completely in it: makes bags of columns, and outputs of vectors."""

    def __init__(self, group: FeatureGroup, table: TableDeclaration) -> None:
        self.features, self.slots = group.features, group.slots
        self.stacked = None if group.stack is None else len(group.features)
        """Features of the stack, whose bags follow each other row by row. None: it is not a stack."""
        self.width = len(group.features)
        self._feature = group.features[0]
        self._pooling, self._has_bias = table.pooling, table.has_bias
        self._name = self._feature.name if self.stacked is None else self._feature.outputs[0]

    def bags(self, batch: Mapping[str, BatchColumn]) -> FeatureBags:
        """Return the bags of one batch."""
        if self.stacked is None:
            return self._bags(self._feature, self.slots[0], batch)
        pairs = zip(self.features, self.slots, strict=True)
        return _stacked_bags([self._bags(feature, slot, batch) for feature, slot in pairs])

    def _bags(self, feature: Feature, slot: int | None, batch: Mapping[str, BatchColumn]) -> FeatureBags:
        ids, offsets = _ids_by_row(feature.name, batch[feature.name])
        bag_splits, scale = offsets, None
        if feature.max_length is not None:
            ids, offsets, bag_splits = _padded(ids, offsets, feature.max_length, last=feature.pooling == "last_n")
        elif feature.pooling == "none":
            bag_splits = _even_splits(len(ids), 1)
        elif feature.pooling != self._pooling:
            scale = _scale(feature.pooling, offsets)
        fids = ids if slot is None else stack_fids([ids], [slot])
        return FeatureBags(ids=fids, offsets=offsets, bag_splits=bag_splits, scale=scale)

    def outputs(self, pooled: torch.Tensor, bags: FeatureBags | None) -> Iterable[tuple[str, BatchColumn]]:
        """Return the outputs, made of the vectors: float32 [bags, width]. Without `bags` each row has one id."""
        feature, name = self._feature, self._name
        if bags is not None and bags.scale is not None:
            pooled = pooled * bags.scale.to(pooled.device)
        if self._has_bias:
            bias, pooled = split_bias(pooled)
            if feature.bias:
                yield f"{name}.bias", self._by_row(bias, bags)
        yield name, self._by_row(pooled, bags)
        if bags is not None and feature.max_length is not None:
            mask = torch.from_numpy(np.diff(bags.bag_splits) == 1).view(-1, feature.max_length)
            yield f"{name}.mask", mask.to(pooled.device)

    def _by_row(self, vectors: torch.Tensor, bags: FeatureBags | None) -> BatchColumn:
        if bags is not None and self._feature.pooling == "none":
            return Ragged(vectors, bags.offsets)
        length = self.stacked or self._feature.max_length
        return vectors if length is None else vectors.reshape(-1, length, vectors.shape[1])


class _Run(NamedTuple):
    """Columns of one id per row that are copied together: those of a stack row by row, others one after the other."""

    columns: slice
    is_stack: bool
    slots: np.ndarray | None
    """int64, one per column, negative for none. None: no column has any."""


@dataclass(frozen=True, kw_only=True)
class BatchBags:
    """The request of one batch, and what is needed to make outputs of the answer."""

    packed: PackedBags
    parts: Sequence[Sequence[FeatureBags]] | None = None
    """By table and group. None: every row has one id of every feature."""
    devices: Sequence[torch.device] | None = None
    """Where the batch is, by table. None: in main memory."""
    rows: int
    """Rows of the batch."""


class BagPlan:
    """The part of requests and outputs that does not depend on the batch. A collection makes it once.

    Example:
        >>> from monolith.features import Feature, declare_tables
        >>> features = [Feature(name="user", dim=2), Feature(name="item", dim=2)]
        >>> plan = BagPlan(declare_tables(features), features)
        >>> plan.bags({"user": torch.tensor([3, 4]), "item": torch.tensor([5, 6])}).packed[1].ids.tolist()
        [5, 6]
    """

    def __init__(self, declaration: Declaration, features: Sequence[Feature]) -> None:
        self._groups = [[_Group(group, table) for group in table.groups] for table in declaration.tables]
        groups = [group for groups in self._groups for group in groups]
        self._names = [feature.name for group in groups for feature in group.features]
        self._matrix_names = tuple(self._names)
        self._runs = _runs(groups)
        # All columns one after the other, and their ids as they are: then a matrix of them is what tables are asked for.
        self._is_one_run = len(self._runs) == 1 and not self._runs[0].is_stack and self._runs[0].slots is None
        self._units = [sum(group.width for group in groups) for groups in self._groups]
        self._last_counts: tuple[int, tuple[int, ...]] = (-1, ())
        self._is_pooled = bool(groups) and all(feature.pools for group in groups for feature in group.features)
        self._output_names = list(dict.fromkeys(name for feature in features for name in feature.outputs))
        self._stacks = _spread_stacks(declaration, features)
        # Stacks over tables that hold nothing else: their vectors are adjacent from the beginning.
        self._side_by_side: dict[int, str] = {}
        table_of = {feature.name: n for n, table in enumerate(declaration.tables) for feature in table.features}
        arrays = {number: [number] for number in range(len(declaration.tables))}
        for stack, names in list(self._stacks.items()):
            tables = [table_of[name] for name in names]
            if all(_has_one_vector(declaration.tables[table]) for table in tables):
                del self._stacks[stack]
                self._side_by_side[tables[0]] = stack
                arrays = {first: members for first, members in arrays.items() if first not in tables[1:]}
                arrays[tables[0]] = tables
        self.layout = PackedLayout(
            tables=[table.config.name for table in declaration.tables],
            dims=[table.config.dim for table in declaration.tables],
            poolings=[table.pooling for table in declaration.tables],
            arrays=list(arrays.values()),
        )
        self._is_plain = not (self._side_by_side or self._stacks) and all(map(_has_one_vector, declaration.tables))
        self.array_outputs = tuple(self._output_names) if self._is_plain else None
        """Names of the outputs in the order of the arrays, if each output is an array as it is."""

    def bags(self, batch: Mapping[str, object]) -> BatchBags:
        """Return the request for all features of `batch`. It owns its memory, because the step may come after the next
        batch."""
        packed = self._one_id_per_row(batch)
        if packed is not None:
            return BatchBags(packed=packed, rows=packed.counts[0] // self._units[0])
        columns = {name: column_of(batch, name) for name in self._names}
        lengths = {len(column) for column in columns.values()}
        if len(lengths) > 1:
            num_rows(columns)  # raises, and names the columns
        parts = [[group.bags(columns) for group in groups] for groups in self._groups]
        every = [part for table in parts for part in table]
        packed = PackedBags(
            self.layout,
            ids=np.concatenate([np.empty(0, dtype=np.int64), *(part.ids for part in every)]),
            offsets=_joined([part.bag_splits for part in every]),
            counts=tuple(sum(len(part.bag_splits) - 1 for part in table) for table in parts),
        )
        firsts = [columns[groups[0].features[0].name] for groups in self._groups]
        devices = [(first.values if isinstance(first, Ragged) else first).device for first in firsts]
        return BatchBags(packed=packed, parts=parts, devices=devices, rows=lengths.pop() if lengths else 0)

    def _one_id_per_row(self, batch: Mapping[str, object]) -> PackedBags | None:
        """Return the request if every column is int64 [rows] in main memory, by three calls for all columns, otherwise None.

        NumPy arrays may have integers of any size.
        """
        if not self._is_pooled:
            return None
        if isinstance(batch, IdMatrix) and self._is_one_run and batch.names == self._matrix_names:
            return PackedBags(
                self.layout, ids=batch.ids.view(-1).numpy(), offsets=None, counts=self._counts(batch.rows)
            )
        try:
            found = [batch[name] for name in self._names]
            columns: list[torch.Tensor] = found  # type: ignore[assignment]
            if type(found[0]) is np.ndarray:
                pieces = _array_pieces(found, self._runs)
            elif {column.dtype for column in columns} == _INT64:
                pieces = [torch.stack(columns[run.columns], dim=int(run.is_stack)) for run in self._runs]
            else:
                return None
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError):
            return None  # the general path reports what is wrong, if anything is
        rows = columns[0].shape[0]
        for run, piece in zip(self._runs, pieces, strict=True):
            if piece.ndim != 2 or piece.shape[not run.is_stack] != rows or piece.device.type != "cpu":
                return None
            if run.slots is not None:
                put_slots(piece.numpy(), run.slots, by_row=not run.is_stack)
        ids = pieces[0].view(-1) if len(pieces) == 1 else torch.cat([piece.view(-1) for piece in pieces])
        return PackedBags(self.layout, ids=ids.numpy(), offsets=None, counts=self._counts(rows))

    def _counts(self, rows: int) -> tuple[int, ...]:
        """Return the bags of each table."""
        # Batches mostly have as many rows as the one before.
        last_rows, counts = self._last_counts
        if rows != last_rows:
            counts = tuple([rows * n for n in self._units])
            self._last_counts = rows, counts
        return counts

    def outputs(self, bags: BatchBags, arrays: Sequence[torch.Tensor], device: torch.device | None = None) -> Batch:
        """Return the outputs of all features, by name, made of the vectors in the arrays of the layout.

        They are on `device`, or where the batch is.
        """
        if device is not None:
            arrays = [array.to(device, non_blocking=True) for array in arrays]
        elif bags.devices is not None:
            pairs = zip(arrays, self.layout.arrays, strict=True)
            arrays = [array.to(bags.devices[tables[0]]) for array, tables in pairs]
        if self._is_plain:
            return dict(zip(self._output_names, arrays, strict=True))
        outputs: Batch = {}
        for array, tables in zip(arrays, self.layout.arrays, strict=True):
            stack = self._side_by_side.get(tables[0])
            if stack is None:
                outputs.update(self._outputs_of_table(tables[0], array, bags))
            else:
                outputs[stack] = array.view(array.shape[0], len(tables), array.shape[1] // len(tables))
        for stack, names in self._stacks.items():
            for ending in ("", ".bias") if f"{names[0]}.bias" in outputs else ("",):
                outputs[stack + ending] = torch.stack([outputs[name + ending] for name in names], dim=1)  # type: ignore[misc]
        return {name: outputs[name] for name in self._output_names}

    def _outputs_of_table(self, table: int, array: torch.Tensor, bags: BatchBags) -> Iterable[tuple[str, BatchColumn]]:
        groups = self._groups[table]
        if bags.parts is None:
            parts: Sequence[FeatureBags | None] = [None] * len(groups)
            counts = [bags.rows * group.width for group in groups]
        else:
            parts = bags.parts[table]
            counts = [len(part.bag_splits) - 1 for part in bags.parts[table]]
        # The gradient of a split is a concatenation, a copy of everything, even if there is one part.
        vectors = (array,) if len(groups) == 1 else torch.split(array, counts)
        for group, vector, part in zip(groups, vectors, parts, strict=True):
            yield from group.outputs(vector, part)


_INT64 = {torch.int64}


def _array_pieces(columns: Sequence[object], runs: Sequence[_Run]) -> list[torch.Tensor]:
    """Return the same of NumPy arrays of integers, without a tensor for each. Raises `TypeError` if they are something else."""
    arrays = [
        column for column in columns if type(column) is np.ndarray and column.ndim == 1 and column.dtype.kind == "i"
    ]
    if len(arrays) < len(columns) or len({array.shape for array in arrays}) > 1:
        raise TypeError("expected arrays of ids, all of one length")
    parts = [arrays[run.columns] for run in runs]
    joined = [np.concatenate(part, dtype=np.int64).reshape(len(part), len(part[0])) for part in parts]
    return [
        torch.from_numpy(np.ascontiguousarray(piece.T) if run.is_stack else piece)
        for run, piece in zip(runs, joined, strict=True)
    ]


def _runs(groups: Sequence[_Group]) -> list[_Run]:
    runs: list[_Run] = []
    column = 0
    for is_stack, members in groupby(groups, key=lambda group: group.stacked is not None):
        # Each stack by itself, all others together.
        for part in ([member] for member in members) if is_stack else [list(members)]:
            slots = [-1 if slot is None else slot for group in part for slot in group.slots]
            has_slots = any(slot >= 0 for slot in slots)
            columns = slice(column, column + len(slots))
            runs.append(_Run(columns, is_stack, np.array(slots, dtype=np.int64) if has_slots else None))
            column = columns.stop
    return runs


def _has_one_vector(table: TableDeclaration) -> bool:
    """Return whether a lookup of the table gives the output of its only feature as it is."""
    return len(table.features) == 1 and not table.has_bias and table.features[0].pools


def _spread_stacks(declaration: Declaration, features: Sequence[Feature]) -> dict[str, list[str]]:
    """Return the names of the features of each stack that spans several tables, in the order of declaration."""
    groups = [group for table in declaration.tables for group in table.groups if group.stack is None]
    spread = dict.fromkeys(group.features[0].stack for group in groups)
    return {stack: [f.name for f in features if f.stack == stack] for stack in spread if stack is not None}


def _stacked_bags(members: Sequence[FeatureBags]) -> FeatureBags:
    """Return the bags of several features, row by row instead of feature by feature."""
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
        ids=ids[np.repeat(begins.reshape(-1) - bag_splits[:-1], lengths) + np.arange(len(ids))],
        offsets=bag_splits[::count],
        bag_splits=bag_splits,
        scale=scale,
    )


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
    """Return the ids kept, their offsets by row, and `length` bags per row: of one id, or, as padding, of none."""
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
    """Return the offsets of concatenated batches."""
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
