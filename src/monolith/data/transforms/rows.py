"""Rows of batches: select, repeat, reorder and join them, and read a column as numbers, labels or row masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from monolith.errors import InvalidArgumentError
from monolith.features import Batch, BatchColumn, Ragged, num_rows
from monolith.features.batch import column_of

__all__ = [
    "any_in_rows",
    "column_state",
    "concat_rows",
    "is_in",
    "label_matrix",
    "labels_shape",
    "labels_up_to",
    "list_tensor",
    "load_column",
    "matrix_of",
    "numbers_of",
    "repeat",
    "rows_with",
    "select_rows",
]


def select_rows(batch: Mapping[str, BatchColumn], rows: torch.Tensor) -> Batch:
    """Return the rows of all columns where `rows` (bool [n]) is true, or in the order of `rows` (int64 [m]), repeats allowed.

    Example:
        >>> batch = {"label": torch.tensor([0.0, 1.0, 1.0]), "ids": Ragged.from_lists([[7], [], [8, 9]])}
        >>> picked = select_rows(batch, torch.tensor([True, False, True]))
        >>> picked["label"].tolist(), picked["ids"].to_lists()
        ([0.0, 1.0], [[7], [8, 9]])
        >>> select_rows(batch, torch.tensor([2, 2]))["ids"].to_lists()
        [[8, 9], [8, 9]]
    """
    size = num_rows(batch)
    if rows.dtype == torch.bool:
        if rows.shape != (size,):
            raise InvalidArgumentError(f"rows: expected a bool for each of {size} rows, got shape {list(rows.shape)}")
        rows = torch.nonzero(rows).squeeze(1)
    return {name: _select(column, rows) for name, column in batch.items()}


def _select(column: BatchColumn, rows: torch.Tensor) -> BatchColumn:
    if isinstance(column, torch.Tensor):
        return column.index_select(0, rows)
    starts, lengths = column.offsets[:-1][rows], column.row_lengths()[rows]
    splits = torch.cat([lengths.new_zeros(1), torch.cumsum(lengths, 0)])
    places = repeat(starts - splits[:-1], lengths) + torch.arange(int(splits[-1]))
    return Ragged(column.values.index_select(0, places.to(column.values.device)), splits)


def repeat(values: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """Repeat value i `times[i]` times.

    Example:
        >>> repeat(torch.tensor([7, 8]), torch.tensor([0, 2])).tolist()
        [8, 8]
    """
    # torch.repeat_interleave wakes all threads for any size, which costs milliseconds on a busy machine.
    return torch.from_numpy(np.repeat(values.numpy(), times.numpy()))


def concat_rows(batches: Sequence[Mapping[str, BatchColumn]]) -> Batch:
    """Return the rows of all batches, one batch after the other. All must have the same columns.

    Example:
        >>> joined = concat_rows([{"ids": Ragged.from_lists([[7], []])}, {"ids": Ragged.from_lists([[8, 9]])}])
        >>> joined["ids"].to_lists()
        [[7], [], [8, 9]]
    """
    if not batches:
        raise InvalidArgumentError("batches: expected at least one, got none; without one the columns are unknown")
    for position, batch in enumerate(batches):
        if batch.keys() != batches[0].keys():
            raise InvalidArgumentError(
                f"batches[{position}]: expected the columns of batches[0]: {sorted(batches[0])}, got {sorted(batch)}"
            )
    return {name: _concat(name, [batch[name] for batch in batches]) for name in batches[0]}


def _concat(name: str, columns: Sequence[BatchColumn]) -> BatchColumn:
    tensors = [column for column in columns if isinstance(column, torch.Tensor)]
    if len(tensors) == len(columns):
        return torch.cat(tensors)
    ragged = [column for column in columns if isinstance(column, Ragged)]
    if len(ragged) != len(columns):
        raise InvalidArgumentError(
            f"batches: column {name!r} is Ragged in some and a tensor in others; make it one kind"
        )
    splits, offset = [torch.zeros(1, dtype=torch.int64)], 0
    for column in ragged:
        splits.append(column.offsets[1:] + offset)
        offset += len(column.values)
    return Ragged(torch.cat([column.values for column in ragged]), torch.cat(splits))


def column_state(column: BatchColumn) -> torch.Tensor | dict[str, torch.Tensor]:
    """Return a column as tensors, for a `state_dict`.

    Example:
        >>> column_state(Ragged.from_lists([[7], []]))
        {'values': tensor([7]), 'row_splits': tensor([0, 1, 1])}
    """
    return {"values": column.values, "row_splits": column.offsets} if isinstance(column, Ragged) else column


def load_column(state: torch.Tensor | Mapping[str, torch.Tensor]) -> BatchColumn:
    """Return the column that `column_state` described.

    Example:
        >>> load_column({"values": torch.tensor([7]), "row_splits": torch.tensor([0, 1, 1])}).to_lists()
        [[7], []]
    """
    return state if isinstance(state, torch.Tensor) else Ragged(state["values"], state["row_splits"])


Number = int | float


def is_in(values: torch.Tensor, listed: Sequence[Number] | torch.Tensor, *, invert: bool = False) -> torch.Tensor:
    """Return whether each value is one of `listed`: bool, shape of `values`.

    Example:
        >>> is_in(torch.tensor([0, 1, 2]), (0.5, 2)).tolist()
        [False, False, True]
    """
    wanted = listed if isinstance(listed, torch.Tensor) else list_tensor(listed)
    # In the type that holds both: 0.5 in the list is not a 0 in a column of integers.
    dtype = wanted.dtype if wanted.is_floating_point() and not values.is_floating_point() else values.dtype
    return torch.isin(values.to(dtype), wanted.to(dtype), invert=invert)


def list_tensor(listed: Sequence[Number]) -> torch.Tensor:
    """Return numbers as int64, or as float64 if one of them is a float, which is exact for ids up to 2**53.

    Example:
        >>> list_tensor((1, 2.5)).dtype, list_tensor(()).dtype
        (torch.float64, torch.int64)
    """
    dtype = torch.float64 if any(isinstance(number, float) for number in listed) else torch.int64
    return torch.tensor(listed, dtype=dtype)


def matrix_of(column: torch.Tensor) -> torch.Tensor:
    """Return a column [rows, ...] as [rows, numbers], with one number per row if it is [rows].

    Example:
        >>> matrix_of(torch.zeros(0)).shape, matrix_of(torch.zeros(3, 2, 2)).shape
        (torch.Size([0, 1]), torch.Size([3, 4]))
    """
    return column.unsqueeze(1) if column.ndim == 1 else column.flatten(1)


def any_in_rows(column: BatchColumn, hits: torch.Tensor) -> torch.Tensor:
    """Return whether any value of a row is a hit: bool of each value -> bool [rows].

    Example:
        >>> any_in_rows(Ragged.from_lists([[1], [2, 3], []]), torch.tensor([False, True, False])).tolist()
        [False, True, False]
    """
    if not isinstance(column, Ragged):
        return matrix_of(hits).any(dim=1)
    found = torch.zeros(len(column), dtype=torch.bool)
    found[column.value_rowids()[matrix_of(hits).any(dim=1)]] = True
    return found


def rows_with(column: BatchColumn, values: tuple[int, ...]) -> torch.Tensor:
    """Return whether a row has one of `values`: bool [rows].

    Example:
        >>> rows_with(torch.tensor([1, 2, 3]), (2, 3)).tolist()
        [False, True, True]
    """
    all_values = column.values if isinstance(column, Ragged) else column
    return any_in_rows(column, is_in(all_values, values))


def numbers_of(batch: Batch, name: str) -> torch.Tensor:
    """Return the column `name` if it has one number per row: [rows].

    Example:
        >>> numbers_of({"rank": torch.tensor([[3], [4]])}, "rank").tolist()
        [3, 4]
    """
    column = column_of(batch, name)
    if isinstance(column, Ragged) or column.numel() != len(column):
        shape = "a Ragged" if isinstance(column, Ragged) else f"shape {list(column.shape)}"
        raise InvalidArgumentError(f"batch[{name!r}]: expected one number per row, got {shape}")
    return column.reshape(len(column))


def labels_up_to(batch: Batch, name: str, index: int) -> torch.Tensor:
    """Return the column `name` as [rows, labels], if every row has a label at `index`.

    Example:
        >>> labels_up_to({"label": torch.tensor([0, 1])}, "label", 0).tolist()
        [[0], [1]]
    """
    column = column_of(batch, name)
    if isinstance(column, Ragged) or matrix_of(column).shape[1] <= index:
        raise InvalidArgumentError(f"batch[{name!r}]: expected a label at index {index} of every row")
    return matrix_of(column)


def label_matrix(batch: Batch, name: str) -> torch.Tensor:
    """Return the column `name`, [rows] or [rows, labels], as float32 [rows, labels].

    Example:
        >>> label_matrix({"label": torch.tensor([0, 1])}, "label").tolist()
        [[0.0], [1.0]]
    """
    column = column_of(batch, name)
    if isinstance(column, Ragged) or column.ndim > 2:
        raise InvalidArgumentError(f"batch[{name!r}]: expected labels [rows] or [rows, labels]")
    return matrix_of(column).float()


def labels_shape(batch: Batch, name: str) -> torch.Size:
    """Return the shape of the labels, to which a changed `label_matrix` is reshaped.

    Example:
        >>> list(labels_shape({"label": torch.tensor([0, 1])}, "label"))
        [2]
    """
    column = column_of(batch, name)
    assert isinstance(column, torch.Tensor)
    return column.shape
