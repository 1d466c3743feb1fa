"""Arrays on their way into the core: any container in, one contiguous NumPy array out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from monolith.errors import InvalidArgumentError

__all__ = ["Ids", "Values", "contiguous", "id_array", "id_vector"]

Ids = torch.Tensor | np.ndarray | Sequence[int]
Values = torch.Tensor | np.ndarray


def contiguous(values: Ids | Values, name: str) -> np.ndarray:
    """`values` as a contiguous array on the CPU; shares memory where it already is one."""
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
