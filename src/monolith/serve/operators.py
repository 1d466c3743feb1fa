"""The operators a dense program may use, by name: ATen operators, and arithmetic on sizes.

The list is closed on purpose. A program is read from a file, and a name in a file must never reach anything but arithmetic
on tensors: no attribute of Python, no operator that opens a file.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable

import torch
from torch._ops import OpOverload

from monolith.errors import CorruptFileError, InvalidArgumentError

__all__ = ["operator_name", "resolve"]

_ARITHMETIC = "add and_ eq floordiv ge getitem gt le lt mod mul ne neg not_ or_ pos pow sub truediv"
_SYMBOLIC = "sym_float sym_int sym_ite sym_max sym_min sym_not"
_ON_SIZES: dict[str, Callable[..., object]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _ARITHMETIC.split()},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "sqrt", "trunc")},
    **{f"torch.{name}": getattr(torch, name) for name in _SYMBOLIC.split()},
}
_NAMES = {function: name for name, function in _ON_SIZES.items()}
_ATEN = re.compile(r"aten\.(\w+)\.(\w+)")


def operator_name(target: object) -> str:
    """The name under which a node's operator is written; refuses what `resolve` would refuse.

    Example:
        >>> operator_name(torch.ops.aten.add.Tensor)
        'aten.add.Tensor'
    """
    if isinstance(target, OpOverload) and target.namespace == "aten" and _is_arithmetic(target):
        return str(target)
    if callable(target) and target in _NAMES:
        return _NAMES[target]
    raise InvalidArgumentError(
        f"the model uses {target}, which cannot be exported: expected operators of torch itself (aten); "
        "rewrite that part of forward with plain torch functions"
    )


def resolve(name: str) -> Callable[..., object]:
    """The operator of that name.

    Example:
        >>> resolve("aten.add.Tensor")(torch.ones(1), 2)
        tensor([3.])
        >>> resolve("aten.from_file.default")
        Traceback (most recent call last):
        monolith.errors.CorruptFileError: operator 'aten.from_file.default' is not allowed in a dense program
    """
    if name in _ON_SIZES:
        return _ON_SIZES[name]
    match = _ATEN.fullmatch(name)
    packet = getattr(torch.ops.aten, match[1], None) if match else None
    overload = getattr(packet, match[2], None) if match else None
    if not isinstance(overload, OpOverload) or not _is_arithmetic(overload):
        raise CorruptFileError(f"operator {name!r} is not allowed in a dense program")
    return overload


def _is_arithmetic(overload: OpOverload) -> bool:
    return all(argument.name != "filename" for argument in overload._schema.arguments)
