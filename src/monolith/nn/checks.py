"""Argument checks of layers and losses: one wording for every wrong size, choice and shape."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from monolith.errors import InvalidArgumentError

__all__ = ["require_choice", "require_dims", "require_number", "require_positive", "require_shape"]


def require_positive(where: str, value: int) -> None:
    """Require that `value` is an int of at least 1.

    Example:
        >>> require_positive("MLP.in_features", 0)
        Traceback (most recent call last):
        monolith.errors.InvalidArgumentError: MLP.in_features: expected an int >= 1, got 0
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidArgumentError(f"{where}: expected an int >= 1, got {value!r}")


def require_dims(where: str, dims: Sequence[int], *, last: int | None = None) -> None:
    """Require that `dims` is a non-empty sequence of ints of at least 1, whose last is `last` if that is given.

    Example:
        >>> require_dims("DIN.hidden_units", [8, 2], last=1)
        Traceback (most recent call last):
        monolith.errors.InvalidArgumentError: DIN.hidden_units: expected the last to be 1, got [8, 2]
    """
    if not isinstance(dims, Sequence) or not dims:
        raise InvalidArgumentError(f"{where}: expected at least one layer size, as in [64, 1], got {dims!r}")
    for index, dim in enumerate(dims):
        require_positive(f"{where}[{index}]", dim)
    if last is not None and dims[-1] != last:
        raise InvalidArgumentError(f"{where}: expected the last to be {last}, got {list(dims)}")


def require_choice(where: str, value: object, choices: Collection[object]) -> None:
    """Require that `value` is one of `choices`.

    Example:
        >>> require_choice("DCN.dcn_type", "cube", ("vector", "matrix"))
        Traceback (most recent call last):
        monolith.errors.InvalidArgumentError: DCN.dcn_type: expected one of 'vector', 'matrix', got 'cube'
    """
    if value not in choices:
        raise InvalidArgumentError(f"{where}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def require_number(where: str, value: float, expected: str, *, holds: bool) -> None:
    """Require the condition `holds`, which `expected` describes, of `value`.

    Example:
        >>> require_number("temperature", -1.0, "a number > 0", holds=-1.0 > 0)
        Traceback (most recent call last):
        monolith.errors.InvalidArgumentError: temperature: expected a number > 0, got -1.0
    """
    if not holds:
        raise InvalidArgumentError(f"{where}: expected {expected}, got {value!r}")


def require_shape(where: str, x: torch.Tensor, *dims: int | str) -> None:
    """Require that `x` has these dimensions: an int is a size, a name any size, a leading "*" any number of dimensions.

    Only the named sizes are left open, so a traced batch dimension stays dynamic.

    Example:
        >>> require_shape("DIN.keys", torch.zeros(2, 3, 4), "B", "T", 8)
        Traceback (most recent call last):
        monolith.errors.InvalidArgumentError: DIN.keys: expected shape [B, T, 8], got [2, 3, 4]
    """
    if not isinstance(x, torch.Tensor):
        raise InvalidArgumentError(f"{where}: expected a tensor, got {type(x).__name__}")
    sizes = dims[1:] if dims and dims[0] == "*" else dims
    fits = x.ndim >= len(sizes) if len(sizes) < len(dims) else x.ndim == len(sizes)
    offset = x.ndim - len(sizes)
    if not fits or any(isinstance(size, int) and x.shape[offset + i] != size for i, size in enumerate(sizes)):
        expected = ", ".join(map(str, dims))
        raise InvalidArgumentError(f"{where}: expected shape [{expected}], got {list(x.shape)}")
