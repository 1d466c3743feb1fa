"""What an operator of a dense program costs in memory and work, found from shapes alone, before it runs.

A few steps of a forged program could ask for any amount: `zeros(2**40)`, or a tensor multiplied with itself across a new
dimension, again and again. So each operator is first run on torch's device "meta", and `program.Budget` refuses it if it costs
more than the inputs and weights of the program justify.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from monolith.serve.operators import POINTWISE

__all__ = ["Cost", "known_cost", "measure", "tensors_in"]

Cost = tuple[int, int]
"""Bytes of everything that an operator allocates, and its work."""

_LIKE_THE_FIRST = {
    *("_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "group_norm", "instance_norm", "layer_norm"),
    *("native_layer_norm", "rms_norm", "prelu"),
}
_JOINED = {"cat", "concat", "concatenate", "stack", "hstack"}
_PRODUCTS = {"addbmm", "addmm", "addmv", "baddbmm", "bmm", "convolution", "dot", "mm", "mv", "vdot", "_cdist_forward"}


def known_cost(name: str, tensors: Sequence[Tensor]) -> Cost | None:
    """Bound the cost of the most frequent operators without running them on "meta". None for all others.

    Example:
        >>> known_cost("linear", [torch.ones(8, 16), torch.ones(32, 16)])
        (2048, 4096)
    """
    if name in POINTWISE:
        elements = _broadcast([tensor.shape for tensor in tensors])
        return 8 * elements, elements * len(tensors)
    if name in _LIKE_THE_FIRST:
        elements = tensors[0].numel()
        return 24 * elements, 16 * elements
    if name in _JOINED:
        elements = sum(tensor.numel() for tensor in tensors)
        return 8 * elements, elements
    if name == "linear" and tensors[1].ndim == 2 and tensors[0].ndim:
        outputs = tensors[1].shape[0]
        return 8 * outputs * (tensors[0].numel() // max(1, tensors[0].shape[-1])), outputs * tensors[0].numel()
    return None


def _broadcast(shapes: Sequence[Sequence[int]]) -> int:
    """Bound the number of elements that tensors of these shapes broadcast to."""
    elements = 1
    for place in range(1, 1 + max(map(len, shapes))):
        elements *= max(shape[-place] for shape in shapes if len(shape) >= place)
    return elements


def measure(function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> Cost:
    """Find out from shapes alone what calling `function` would cost.

    Example:
        >>> measure(torch.ops.aten.zeros.default, [[2**20, 2**10]], {})
        (4294967296, 1073741824)
    """
    # In inference mode an operator would not show which others it consists of.
    with torch.inference_mode(False), torch.no_grad(), _Measured() as measured:
        function(*_without_data(list(args)), **_without_data(_on_meta(function, kwargs)))
    return measured.bytes, measured.work


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield all tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


class _Measured(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch does not type it
    """Adds up the costs of all operators that one operator consists of."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.work = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Called by torch for each operator."""
        result = function(*args, **(kwargs or {}))
        given = [tensor.numel() for tensor in tensors_in(list(args))]
        made = list(tensors_in(result))
        elements = sum(tensor.numel() for tensor in made)
        largest = max(given, default=0)
        # A view that is no larger than its base takes no memory.
        if not (function.is_view and elements <= largest):
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in made)
        if function._schema.name.removeprefix("aten::") in _PRODUCTS:
            # Of [m, k] and [k, n]: m * k * n.
            self.work += math.isqrt(math.prod(sorted(given)[-2:]) * elements)
        self.work += elements + (0 if function.is_view else largest)
        return result


def _on_meta(function: Callable[..., object], kwargs: Mapping[str, object]) -> dict[str, object]:
    schema = getattr(function, "_schema", None)
    takes_device = schema is not None and any(argument.name == "device" for argument in schema.arguments)
    return {**kwargs, "device": torch.device("meta")} if takes_device else dict(kwargs)


def _without_data(value: Any) -> Any:  # noqa: ANN401 - arguments of operators
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple):
        return type(value)(_without_data(item) for item in value)
    if isinstance(value, dict):
        return {key: _without_data(item) for key, item in value.items()}
    return value
