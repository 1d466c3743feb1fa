"""Ids on their way into the core: any shape and container in, one contiguous int64 NumPy array out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from monolith.errors import InvalidArgumentError

__all__ = ["Ids", "id_array"]

Ids = torch.Tensor | np.ndarray | Sequence[int]


def id_array(ids: Ids, name: str = "ids") -> np.ndarray:
    """`ids` as a contiguous int64 array of the same shape; shares memory with a contiguous CPU tensor or array.

    Example:
        >>> id_array([[1, 2], [3, 4]]).shape
        (2, 2)
    """
    try:
        tensor = torch.as_tensor(ids)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{name}: expected 64-bit signed integers: {error}") from None
    if tensor.numel() == 0 and not isinstance(ids, torch.Tensor | np.ndarray):
        tensor = tensor.to(torch.int64)
    if tensor.dtype != torch.int64:
        raise InvalidArgumentError(f"{name}: expected int64, got {tensor.dtype}; ids are exact 64-bit integers")
    return tensor.detach().cpu().contiguous().numpy()
