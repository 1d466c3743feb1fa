"""Rows of batches: pick, repeat, reorder, join; every column alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from monolith.errors import InvalidArgumentError
from monolith.features import Batch, Column, Ragged, num_rows

__all__ = ["column_state", "concat_rows", "load_column", "repeat", "select_rows"]


def select_rows(batch: Mapping[str, Column], rows: torch.Tensor) -> Batch:
    """The rows of all columns where `rows` (bool [n]) is true, or in the order of `rows` (int64 [m]), repeats allowed.

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


def _select(column: Column, rows: torch.Tensor) -> Column:
    if isinstance(column, torch.Tensor):
        return column.index_select(0, rows)
    starts, lengths = column.offsets[:-1][rows], column.row_lengths()[rows]
    splits = torch.cat([lengths.new_zeros(1), torch.cumsum(lengths, 0)])
    places = repeat(starts - splits[:-1], lengths) + torch.arange(int(splits[-1]))
    return Ragged(column.values.index_select(0, places.to(column.values.device)), splits)


def repeat(values: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """Value i `times[i]` times.

    Example:
        >>> repeat(torch.tensor([7, 8]), torch.tensor([0, 2])).tolist()
        [8, 8]
    """
    # torch.repeat_interleave wakes all threads for any size; on a busy machine that costs milliseconds.
    return torch.from_numpy(np.repeat(values.numpy(), times.numpy()))


def concat_rows(batches: Sequence[Mapping[str, Column]]) -> Batch:
    """The rows of all batches, one batch after the other; all must have the same columns.

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


def _concat(name: str, columns: Sequence[Column]) -> Column:
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


def column_state(column: Column) -> torch.Tensor | dict[str, torch.Tensor]:
    """A column as tensors, for a `state_dict`.

    Example:
        >>> column_state(Ragged.from_lists([[7], []]))
        {'values': tensor([7]), 'row_splits': tensor([0, 1, 1])}
    """
    return {"values": column.values, "row_splits": column.offsets} if isinstance(column, Ragged) else column


def load_column(state: torch.Tensor | Mapping[str, torch.Tensor]) -> Column:
    """The column that `column_state` described.

    Example:
        >>> load_column({"values": torch.tensor([7]), "row_splits": torch.tensor([0, 1, 1])}).to_lists()
        [[7], []]
    """
    return state if isinstance(state, torch.Tensor) else Ragged(state["values"], state["row_splits"])
