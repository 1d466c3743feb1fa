"""Changes to feature ids: another slot, crosses of two features, numbering, marking, hashes of text."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from monolith.config import Config
from monolith.data.transforms.rows import matrix_of, repeat, rows_with
from monolith.errors import InvalidArgumentError
from monolith.features import Batch, BatchColumn, FidLayout, Ragged, fid_v1, fid_v2, hash_strings
from monolith.features.batch import column_of
from monolith.table.arrays import id_array

__all__ = ["FeatureCombine", "FidMask", "HashText", "LogBucketFid", "MapId", "SwitchSlot", "combine_ids"]

_Slot = Annotated[int, Field(ge=0, lt=32768)]


class SwitchSlot(Config):
    """Moves the ids of some columns to other slots. The signatures stay.

    Example:
        >>> batch = {"clicks": fid_v2.make(3, torch.tensor([5, 6]))}
        >>> fid_v2.slot_of(SwitchSlot(slots={"clicks": 9})(batch)["clicks"]).tolist()
        [9, 9]
    """

    slots: dict[str, _Slot]
    """The new slot of each column."""
    fid_version: Annotated[int, Field(ge=1, le=2)] = 2
    """Whether the ids are fids v1 or v2."""

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        layout = _layout(self.fid_version)
        switched: Batch = {}
        for name, slot in self.slots.items():
            column = column_of(batch, name)
            if isinstance(column, Ragged):
                switched[name] = Ragged(layout.switch_slot(column.values, slot), column.offsets)
            else:
                switched[name] = layout.switch_slot(column, slot)
        return {**batch, **switched}


class FeatureCombine(Config):
    """Adds a column of all pairs of ids of two columns, row by row, with the left column's ids in the outer loop.

    Example:
        >>> batch = {"a": Ragged.from_lists([[1, 2], []]), "b": torch.tensor([3, 4])}
        >>> combined = FeatureCombine(left="a", right="b", out="a_b", slot=7)(batch)["a_b"]
        >>> combined.offsets.tolist(), fid_v2.signature_of(combined.values).tolist()
        ([0, 2, 2], [3, 6])
    """

    left: str
    """A column of ids."""
    right: str
    """Another column of ids."""
    out: str
    """The name of the new column: `Ragged`, left times right ids in each row."""
    slot: _Slot
    """The slot of the new ids."""
    fid_version: Annotated[int, Field(ge=1, le=2)] = 2
    """Whether the new ids are fids v1 or v2."""

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        left, right = _ragged(column_of(batch, self.left)), _ragged(column_of(batch, self.right))
        lengths, others = left.row_lengths(), right.row_lengths()
        splits = torch.cat([lengths.new_zeros(1), torch.cumsum(lengths * others, 0)])
        repeats = others[left.value_rowids()]
        outer = repeat(torch.arange(len(left.values)), repeats)
        ends = torch.cumsum(repeats, 0)
        inner = torch.arange(int(splits[-1])) - (ends - repeats)[outer] + right.offsets[:-1][left.value_rowids()[outer]]
        layout = _layout(self.fid_version)
        combined = combine_ids(left.values[outer], right.values[inner])
        return {**batch, self.out: Ragged(layout.make(self.slot, layout.signature_of(combined)), splits)}


def combine_ids(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the high half xor the low half of the signed 128-bit product, element by element: int64.

    Example:
        >>> combine_ids(torch.tensor([3, -1, 2**40]), torch.tensor([5, 7, 2**40])).tolist()
        [15, 6, 65536]
    """
    a, b = id_array(left, "left"), id_array(right, "right")
    ua, ub = a.view(np.uint64), b.view(np.uint64)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a_low, a_high, b_low, b_high = ua & low, ua >> half, ub & low, ub >> half
    cross = a_high * b_low + (a_low * b_low >> half)
    carry = (cross & low) + a_low * b_high
    high = a_high * b_high + (cross >> half) + (carry >> half)
    # Read as unsigned, a negative a is a + 2**64: the product has b too much in its high half, and the other way round.
    high -= np.where(a < 0, ub, np.uint64(0)) + np.where(b < 0, ua, np.uint64(0))
    return torch.from_numpy((high ^ (ua * ub)).view(np.int64))


class MapId(Config):
    """Maps the ids of a column by a dictionary. An id that is not in it becomes `default`.

    Example:
        >>> MapId(column="chnid", ids={40: 0, 70: 1})({"chnid": torch.tensor([70, 40, 5])})["chnid"].tolist()
        [1, 0, -1]
    """

    column: str
    """The column to change: a tensor or `Ragged`."""
    ids: Annotated[dict[int, int], Field(min_length=1)]
    """Old id to new id."""
    default: int = -1
    """The new id of all others."""

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        column = column_of(batch, self.column)
        if isinstance(column, Ragged):
            return {**batch, self.column: Ragged(self._map(column.values), column.offsets)}
        return {**batch, self.column: self._map(column)}

    def _map(self, values: torch.Tensor) -> torch.Tensor:
        old = torch.tensor(sorted(self.ids))
        new = torch.tensor([self.ids[id_] for id_ in sorted(self.ids)])
        place = torch.searchsorted(old, values).clamp(max=len(old) - 1)
        return torch.where(old[place] == values, new[place], torch.tensor(self.default))


class LogBucketFid(Config):
    """Converts numbers v of some columns to fids v2 with the signature floor(log2(|v| + 1)): one id per order of magnitude.

    Example:
        >>> batch = LogBucketFid(slots={"price": 9})({"price": torch.tensor([0.0, 1.0, -7.5])})
        >>> fid_v2.slot_of(batch["price"]).tolist(), fid_v2.signature_of(batch["price"]).tolist()
        ([9, 9, 9], [0, 1, 3])
    """

    slots: dict[str, _Slot]
    """The slot of each column's ids. Columns are tensors or `Ragged`."""

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        buckets: Batch = {}
        for name, slot in self.slots.items():
            column = column_of(batch, name)
            if isinstance(column, Ragged):
                buckets[name] = Ragged(_log_bucket(column.values, slot), column.offsets)
            else:
                buckets[name] = _log_bucket(column, slot)
        return {**batch, **buckets}


class FidMask(Config):
    """Adds a column that marks the rows with the id `fid` in `column`: bool [rows].

    Example:
        >>> FidMask(column="ids", fid=3, out="has_3")({"ids": Ragged.from_lists([[3, 4], [5]])})["has_3"].tolist()
        [True, False]
    """

    column: str
    """A column of ids."""
    fid: int
    """The id to look for."""
    out: str
    """The name of the new column."""

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        return {**batch, self.out: rows_with(column_of(batch, self.column), (self.fid,))}


def _log_bucket(values: torch.Tensor, slot: int) -> torch.Tensor:
    # In float64: its logarithm is exact at powers of two, where the buckets begin.
    return fid_v2.make(slot, torch.log2(values.double().abs() + 1).long())


def _layout(version: int) -> FidLayout:
    return fid_v1 if version == 1 else fid_v2


def _ragged(column: BatchColumn) -> Ragged:
    if isinstance(column, Ragged):
        return column
    matrix = matrix_of(column)
    return Ragged(matrix.reshape(-1), torch.arange(len(column) + 1) * matrix.shape[1])


class HashText(Config):
    """Replaces text by ids of `monolith.features.hash_strings`: the same text is the same id in every column and run.

    One text in a row becomes int64 [rows]. Of lists of texts (`<name>.lengths` next to the bytes, as sources give nested
    columns) each list becomes a row of a `Ragged` of int64, and the lengths are dropped.

    A row without a text has the empty one, whose id gets a row of the table like any other. With `skip_empty` it has no id.

    Example:
        >>> batch = {"city": Ragged.from_lists([list(b"Bonn"), list(b"Rome"), list(b"Bonn")], dtype=torch.uint8)}
        >>> first, second, third = HashText(columns=("city",))(batch)["city"].tolist()
        >>> first == third, first == second
        (True, False)
        >>> HashText(columns=("city",), skip_empty=True)({"city": Ragged.from_lists([[], [66]], dtype=torch.uint8)})["city"]
        Ragged(2 rows, 1 value of int64: [[], [-577116572233714270]])
    """

    columns: tuple[str, ...] = Field(min_length=1)
    """Columns of uint8, one text or one list of texts in each row."""
    skip_empty: bool = False
    """Leave out empty texts: each column becomes a `Ragged`, and a row without a text has no id, so nothing is looked up or
    trained for it."""

    def __call__(self, batch: Batch) -> Batch:
        """Return the transformed batch. The given one is not changed."""
        hashed = {name: _ids(name, batch, skip_empty=self.skip_empty) for name in self.columns}
        spent = {_lengths(name) for name in self.columns}
        return {**{name: column for name, column in batch.items() if name not in spent}, **hashed}


def _ids(name: str, batch: Batch, *, skip_empty: bool) -> BatchColumn:
    text, lengths = column_of(batch, name), batch.get(_lengths(name))
    if not isinstance(text, Ragged) or text.values.dtype != torch.uint8:
        kind = "rows of one length" if not isinstance(text, Ragged) else f"Ragged of {text.values.dtype}"
        raise InvalidArgumentError(
            f"batch[{name!r}]: expected text, Ragged of uint8, got {kind}; read it as a monolith.data.Column with dtype='bytes'"
        )
    if isinstance(lengths, Ragged):
        ends = np.concatenate([[0], np.cumsum(lengths.values.numpy(), dtype=np.int64)])
        rows = lengths.offsets.numpy()
    else:
        ends, rows = text.offsets.numpy(), np.arange(len(text) + 1)
    ids = _hash(text.values, ends)
    if skip_empty:
        kept = np.diff(ends) > 0
        return Ragged(ids[torch.from_numpy(kept)], np.concatenate([[0], np.cumsum(kept)])[rows])
    return Ragged(ids, rows) if isinstance(lengths, Ragged) else ids


def _hash(text: torch.Tensor, splits: np.ndarray) -> torch.Tensor:
    import pyarrow as pa

    offsets = np.ascontiguousarray(splits, dtype=np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(text.contiguous().numpy())]
    return hash_strings(pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers))


def _lengths(name: str) -> str:
    return f"{name}.lengths"
