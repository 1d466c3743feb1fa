"""Arguments of the core: any container in, one contiguous NumPy array out."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch

from monolith.errors import InvalidArgumentError
from monolith.urls import local_path

__all__ = ["Ids", "Values", "contiguous", "file_name", "id_array", "id_vector", "row_matrix", "time_vector"]

Ids = torch.Tensor | np.ndarray | Sequence[int]
Values = torch.Tensor | np.ndarray


def contiguous(values: Ids | Values, name: str) -> np.ndarray:
    """Returns `values` as a contiguous array on the CPU, without a copy where it already is one."""
    if isinstance(values, np.ndarray):
        return np.ascontiguousarray(values)
    try:
        return torch.as_tensor(values).detach().cpu().contiguous().numpy()
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{name}: expected an array or a sequence of numbers: {error}") from None


def id_array(ids: Ids, name: str = "ids") -> np.ndarray:
    """`ids` as a contiguous int64 array of the same shape.

    Example:
        >>> id_array([[1, 2], [3, 4]]).shape
        (2, 2)
    """
    array = contiguous(ids, name)
    if array.size == 0 and not isinstance(ids, torch.Tensor | np.ndarray):
        array = array.astype(np.int64)
    if array.dtype != np.int64:
        raise InvalidArgumentError(f"{name}: expected int64, got {array.dtype}; ids are exact 64-bit integers")
    return array


def id_vector(ids: Ids, name: str = "ids") -> np.ndarray:
    """`ids` as a contiguous int64 array of one dimension."""
    array = id_array(ids, name)
    if array.ndim != 1:
        raise InvalidArgumentError(f"{name}: expected one dimension, got shape {list(array.shape)}")
    return array


def time_vector(times: Ids, name: str = "times") -> np.ndarray:
    """`times` as a contiguous uint32 array of one dimension.

    Example:
        >>> time_vector([1_700_000_000, 0]).dtype
        dtype('uint32')
    """
    array = contiguous(times, name)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgumentError(
            f"{name}: expected whole seconds in one dimension, got {array.dtype} {list(array.shape)}"
        )
    if array.dtype != np.uint32 and array.size and not (array.min() >= 0 and array.max() < 2**32):
        raise InvalidArgumentError(f"{name}: expected seconds since 1970 in [0, 2**32)")
    return array.astype(np.uint32, copy=False)


def row_matrix(rows: Values, row_bytes: int, name: str = "rows") -> np.ndarray:
    """`rows` as a contiguous uint8 array [n, row_bytes]."""
    array = contiguous(rows, name)
    if array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != row_bytes:
        raise InvalidArgumentError(
            f"{name}: expected uint8 [n, {row_bytes}], raw rows of the table's layout, got {array.dtype} {list(array.shape)}"
        )
    return array


def file_name(path: str | os.PathLike[str]) -> str:
    """`path` as text that names a file on a local disk."""
    text = local_path(path, "path")
    if "\0" in text:
        raise InvalidArgumentError(f"path: expected a file name without a null character, got {text!r}")
    return text
