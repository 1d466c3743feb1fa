"""What transforms ask of a column: one number per row, labels as a matrix, rows that have a value."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from monolith.errors import InvalidArgumentError
from monolith.features import Batch, Column, Ragged
from monolith.features.batch import column_of

__all__ = [
    "any_in_rows",
    "is_in",
    "label_matrix",
    "labels_shape",
    "labels_up_to",
    "list_tensor",
    "matrix_of",
    "numbers_of",
    "rows_with",
]

Number = int | float


def is_in(values: torch.Tensor, listed: Sequence[Number] | torch.Tensor, *, invert: bool = False) -> torch.Tensor:
    """Whether each value is one of `listed`: bool, shape of `values`.

    Example:
        >>> is_in(torch.tensor([0, 1, 2]), (0.5, 2)).tolist()
        [False, False, True]
    """
    wanted = listed if isinstance(listed, torch.Tensor) else list_tensor(listed)
    # In the type that holds both: 0.5 in the list is not a 0 in a column of integers.
    dtype = wanted.dtype if wanted.is_floating_point() and not values.is_floating_point() else values.dtype
    return torch.isin(values.to(dtype), wanted.to(dtype), invert=invert)


def list_tensor(listed: Sequence[Number]) -> torch.Tensor:
    """Numbers to look for: int64, or float64 if one of them is a float, which is exact for ids up to 2**53.

    Example:
        >>> list_tensor((1, 2.5)).dtype, list_tensor(()).dtype
        (torch.float64, torch.int64)
    """
    dtype = torch.float64 if any(isinstance(number, float) for number in listed) else torch.int64
    return torch.tensor(listed, dtype=dtype)


def matrix_of(column: torch.Tensor) -> torch.Tensor:
    """A column [rows, ...] as [rows, numbers]; one number of each row if it is [rows].

    Example:
        >>> matrix_of(torch.zeros(0)).shape, matrix_of(torch.zeros(3, 2, 2)).shape
        (torch.Size([0, 1]), torch.Size([3, 4]))
    """
    return column.unsqueeze(1) if column.ndim == 1 else column.flatten(1)


def any_in_rows(column: Column, hits: torch.Tensor) -> torch.Tensor:
    """Whether any value of a row is a hit: bool of each value -> bool [rows].

    Example:
        >>> any_in_rows(Ragged.from_lists([[1], [2, 3], []]), torch.tensor([False, True, False])).tolist()
        [False, True, False]
    """
    if not isinstance(column, Ragged):
        return matrix_of(hits).any(dim=1)
    found = torch.zeros(len(column), dtype=torch.bool)
    found[column.value_rowids()[matrix_of(hits).any(dim=1)]] = True
    return found


def rows_with(column: Column, values: tuple[int, ...]) -> torch.Tensor:
    """Whether a row has one of `values`: bool [rows].

    Example:
        >>> rows_with(torch.tensor([1, 2, 3]), (2, 3)).tolist()
        [False, True, True]
    """
    all_values = column.values if isinstance(column, Ragged) else column
    return any_in_rows(column, is_in(all_values, values))


def numbers_of(batch: Batch, name: str) -> torch.Tensor:
    """The column `name` if it has one number per row: [rows].

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
    """The column `name` as [rows, labels], if every row has a label at `index`.

    Example:
        >>> labels_up_to({"label": torch.tensor([0, 1])}, "label", 0).tolist()
        [[0], [1]]
    """
    column = column_of(batch, name)
    if isinstance(column, Ragged) or matrix_of(column).shape[1] <= index:
        raise InvalidArgumentError(f"batch[{name!r}]: expected a label at index {index} of every row")
    return matrix_of(column)


def label_matrix(batch: Batch, name: str) -> torch.Tensor:
    """The column `name`, [rows] or [rows, labels], as float32 [rows, labels].

    Example:
        >>> label_matrix({"label": torch.tensor([0, 1])}, "label").tolist()
        [[0.0], [1.0]]
    """
    column = column_of(batch, name)
    if isinstance(column, Ragged) or column.ndim > 2:
        raise InvalidArgumentError(f"batch[{name!r}]: expected labels [rows] or [rows, labels]")
    return matrix_of(column).float()


def labels_shape(batch: Batch, name: str) -> torch.Size:
    """The shape that a changed `label_matrix` goes back to.

    Example:
        >>> list(labels_shape({"label": torch.tensor([0, 1])}, "label"))
        [2]
    """
    column = column_of(batch, name)
    assert isinstance(column, torch.Tensor)
    return column.shape
