"""`NativeProgram`: the steps of a dense program for small inputs of one shape, as one call of the core.

For a few rows an operator of torch takes microseconds to begin and nanoseconds to compute. So torch runs the steps once more,
and what is seen there (which result is a view of what, shapes and strides) becomes a list of loops over flat buffers. A view
costs nothing. A program with an operator that is not here stays with torch as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from monolith._core import DenseExecutor, DenseOp
from monolith.errors import InvalidArgumentError
from monolith.serve.bound import OPERATOR_ERRORS, Ref, SizeNumber, Step
from monolith.serve.operators import fast_form

__all__ = ["NativeProgram", "UnsupportedOperatorError", "lower"]

WORK_PER_CALL, FIXED_CALLS = 2**16, 3
"""Multiplications for each call of torch that is saved, up to which the core is faster, and calls of torch that take as long as
one of the core. Measured, see docs/internals/serving.md."""
MAX_WORK = 2**22
"""Of a whole program."""
_ELEMENT, _FUNCTION, _DOT = 4, 64, 32
"""Multiplications of a matrix product that take as long as an element of another step, an exponential, and the end of a sum."""


class UnsupportedOperatorError(Exception):
    """A step that only torch can run, whatever the shapes are."""


class _UnsuitedError(Exception):
    """Shapes, types or values of arguments that only torch can run, or that it runs faster."""


class NativeProgram:
    """Calls the core for one set of shapes. Immutable, so that several threads may run it."""

    def __init__(
        self,
        executor: DenseExecutor,
        numels: list[int],
        constants: Sequence[Tensor],
        outputs: Mapping[str, torch.Size],
    ) -> None:
        self._executor = executor
        self._numels = numels
        self._constants = constants  # kept, because the core reads them
        self._addresses = [tensor.data_ptr() for tensor in constants]
        self._outputs = list(outputs.items())

    def run(self, weights: list[int], tensors: Sequence[Tensor]) -> dict[str, Tensor] | None:
        """Return the outputs, or None if torch has to say what is wrong with the values.

        Args:
            weights: Addresses of weights that are contiguous and stay there during the call.
            tensors: Inputs of exactly the shapes, strides and types that the program was made for.
        """
        if [tensor.numel() for tensor in tensors] != self._numels:
            return None  # the core would read outside of them
        found = {name: torch.empty(shape) for name, shape in self._outputs}
        addresses = [*weights, *[tensor.data_ptr() for tensor in tensors], *self._addresses]
        addresses += [output.data_ptr() for output in found.values()]
        try:
            self._executor.run(addresses)
        except InvalidArgumentError:
            return None
        return found


def lower(
    steps: Sequence[Step],
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    numbers: Mapping[str, SizeNumber],
    outputs: Mapping[str, str],
) -> NativeProgram | None:
    """Return the program for inputs of these shapes. None if torch is faster, or these inputs are not for the core.

    Args:
        steps: All steps of the program, which torch has run with inputs of these shapes.
        weights: By their name in the program.
        inputs: By their name in the program.
        numbers: Results of the steps that compute with sizes, for these shapes.
        outputs: What each output refers to.

    Raises:
        UnsupportedOperatorError: no inputs are for the core.
    """
    try:
        return _Lowering(weights, inputs).lower(steps, numbers, outputs)
    except (_UnsuitedError, *OPERATOR_ERRORS):
        return None


Operand = tuple[int, int, list[int]]
_Lowered = Callable[..., None]
_Dim = int | Sequence[int] | None


class _Lowering:
    """Runs a program by torch and writes down loops that do the same. Each tensor of torch stands for a part of a buffer."""

    def __init__(self, weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> None:
        self._values: dict[str, object] = {}
        self._given: list[tuple[int, bool]] = []
        self._constants: list[Tensor] = []
        self._scratch: list[int] = []
        # By the address of torch's storage, which is kept: the number of a buffer that is given, or, below zero, of scratch.
        self._buffers: dict[int, int] = {}
        self._fixed: set[int] = set()
        self._kept: list[Tensor] = []
        self._steps: list[tuple[DenseOp, list[int], list[Operand]]] = []
        self._work = 0
        self._numels = [tensor.numel() for tensor in inputs.values()]
        if sum(self._numels) > MAX_WORK:
            raise _UnsuitedError
        if any(tensor.device.type != "cpu" for tensor in [*weights.values(), *inputs.values()]):
            raise _UnsuitedError
        if not all(tensor.is_contiguous() for tensor in weights.values()):
            raise _UnsuitedError  # those that replace them are
        for name, tensor in [*weights.items(), *inputs.items()]:
            self._values[name] = self._add_given(tensor)

    def lower(
        self, steps: Sequence[Step], numbers: Mapping[str, SizeNumber], outputs: Mapping[str, str]
    ) -> NativeProgram | None:
        self._values.update(numbers)
        called = [step for step in steps if step.name not in numbers]
        for step in called:
            self._step(step)
        if self._work > WORK_PER_CALL * (len(called) - FIXED_CALLS):
            return None
        shapes: dict[str, torch.Size] = {}
        for name, ref in outputs.items():
            value = self._values[ref]
            if not isinstance(value, Tensor):
                continue
            shapes[name] = value.shape
            self.emit(DenseOp.COPY, self.new(value.shape), value)
        # The last buffers of scratch are the outputs. Those come first for the core.
        given, scratch, count = len(self._given), len(self._scratch), len(shapes)

        def number_of(buffer: int) -> int:
            place = -1 - buffer
            return (
                buffer
                if buffer >= 0
                else given + (place + count if place < scratch - count else place - scratch + count)
            )

        sizes = self._scratch[scratch - count :] + self._scratch[: scratch - count]
        executor = DenseExecutor(
            [*self._given, *[(size, False) for size in sizes]],
            given,
            count,
            [
                (op, shape, [(number_of(buffer), offset, strides) for buffer, offset, strides in operands])
                for op, shape, operands in self._steps
            ],
        )
        return NativeProgram(executor, self._numels, self._constants, shapes)

    def _step(self, step: Step) -> None:
        args, kwargs = self._bound(step.args), {key: self._bound(value) for key, value in step.kwargs.items()}
        result = fast_form(step.operator)(*args, **kwargs)
        self._values[step.name] = result
        given = _tensors([args, list(kwargs.values())])
        made = _tensors(result)
        packet = step.operator.split(".")[1]
        if packet in _FILLS or all(tensor.untyped_storage()._cdata in self._fixed for tensor in given):
            for tensor in made:
                self._add_constant(tensor)
            return
        # No operator changes its arguments, so a result in the memory of an argument is a view of it.
        if all(tensor.untyped_storage()._cdata in self._buffers for tensor in made):
            self._kept += made
            return
        lowered = _LOWERED.get(step.operator)
        if lowered is None:
            raise UnsupportedOperatorError(step.operator)
        for tensor in made:
            self._add_scratch(tensor)
        lowered(self, result, *args, **kwargs)

    def _bound(self, value: Any) -> Any:  # noqa: ANN401 - arguments of operators
        if isinstance(value, Ref):
            return self._values[value]
        return [self._bound(item) for item in value] if isinstance(value, list) else value

    def _add_given(self, tensor: Tensor) -> Tensor:
        """Return a tensor like it whose storage no other has, and which begins with it."""
        storage = tensor.untyped_storage()._cdata
        if storage in self._buffers or tensor.storage_offset():
            if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
                raise _UnsuitedError
            tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
            storage = tensor.untyped_storage()._cdata
        self._buffers[storage] = len(self._given)
        # Of another type it may be there, but not be used. Nothing is outside of a buffer without numbers.
        is_known = tensor.dtype in (torch.float32, torch.int64)
        self._given.append((_extent(tensor) if is_known else 0, tensor.dtype == torch.int64))
        self._kept.append(tensor)
        return tensor

    def _add_constant(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()._cdata
        if storage not in self._buffers:
            tensor = self._add_given(tensor)
            self._constants.append(tensor)
        self._fixed.add(storage)
        self._kept.append(tensor)
        return tensor

    def _add_scratch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.dtype != torch.float32:
            raise _UnsuitedError
        if storage._cdata not in self._buffers:
            self._scratch.append(storage.nbytes() // 4)
            self._buffers[storage._cdata] = -len(self._scratch)
        self._kept.append(tensor)

    def new(self, shape: Sequence[int]) -> Tensor:
        """Return scratch memory."""
        tensor = torch.empty(shape)
        self._add_scratch(tensor)
        return tensor

    def number(self, value: object) -> Tensor:
        """Return a constant."""
        if isinstance(value, Tensor):
            return value
        if not isinstance(value, int | float):
            raise _UnsuitedError
        return self._add_constant(torch.tensor(float(value), dtype=torch.float32))

    def operand(self, tensor: Tensor) -> Operand:
        """Return where a tensor is."""
        return self._buffers[tensor.untyped_storage()._cdata], int(tensor.storage_offset()), list(tensor.stride())

    def emit(self, op: DenseOp, out: Tensor, *args: Tensor, work: int = _ELEMENT) -> None:
        """Add a step over the shape of `out`, to which the arguments are broadcast."""
        if any(tensor.dtype != torch.float32 for tensor in (out, *args)):
            raise _UnsuitedError
        self.add(
            op, out.shape, work, [self.operand(tensor) for tensor in (out, *[arg.expand(out.shape) for arg in args])]
        )

    def add(self, op: DenseOp, shape: Sequence[int], work: int, operands: list[Operand]) -> None:
        """Add a step."""
        elements = math.prod(shape)
        if elements == 0:
            return
        self._work += elements * work
        if self._work > MAX_WORK:
            raise _UnsuitedError
        self._steps.append((op, list(shape), operands))

    def made(self, op: DenseOp, *args: object, work: int = _ELEMENT) -> Tensor:
        """Add a step with a result of its own."""
        tensors = [self.number(arg) for arg in args]
        out = self.new(torch.ops.aten.broadcast_tensors(tensors)[0].shape)
        self.emit(op, out, *tensors, work=work)
        return out

    def reduced(self, op: DenseOp, x: Tensor, dims: Sequence[int], out: Tensor | None = None) -> Tensor:
        """Add a reduction that keeps its dimensions."""
        shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
        out = self.new(shape) if out is None else out.view(shape)
        if x.numel() == 0 and out.numel():
            raise _UnsuitedError
        # Where a dimension is reduced, the result does not move.
        strides = [0 if dim in dims else stride for dim, stride in enumerate(out.stride())]
        self.add(op, x.shape, _ELEMENT, [(*self.operand(out)[:2], strides), self._float(x)])
        return out

    def _float(self, tensor: Tensor) -> Operand:
        if tensor.dtype != torch.float32:
            raise _UnsuitedError
        return self.operand(tensor)

    def product(self, out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
        """Add out = a @ b + bias, as `torch.matmul` broadcasts them."""
        bias = None if bias is None else bias.expand(out.shape)
        if a.ndim == 1:
            a, out, bias = (
                a.unsqueeze(0),
                out.unsqueeze(-2 if b.ndim > 1 else 0),
                None if bias is None else bias.unsqueeze(-2),
            )
        if b.ndim == 1:
            b, out, bias = b.unsqueeze(1), out.unsqueeze(-1), None if bias is None else bias.unsqueeze(-1)
        *batch, m, n = out.shape
        k = a.shape[-1]
        if k == 0 and out.numel():
            raise _UnsuitedError
        shape = [*batch, m, n, k]
        whole = [out.unsqueeze(-1), a.expand(*batch, m, k).unsqueeze(-2), b.mT.expand(*batch, n, k).unsqueeze(-3)]
        if bias is not None:
            whole.append(bias.unsqueeze(-1))
        self._work += out.numel() * _DOT
        self.add(DenseOp.PRODUCT, shape, 1, [self._float(tensor.expand(shape)) for tensor in whole])

    def selection(self, out: Tensor, source: Tensor, dim: int, index: Tensor) -> None:
        """Add out[..., j, ...] = source[..., index[j], ...], where `index` may have several dimensions."""
        size = source.shape[dim]
        if index.dtype != torch.int64:
            raise _UnsuitedError
        if out.numel() == 0:
            return
        before, after = dim, source.ndim - dim - 1
        strides = list(source.stride())
        source_strides = [*strides[:dim], *[0] * index.ndim, *strides[dim + 1 :], strides[dim]]
        index_strides = [*[0] * before, *index.stride(), *[0] * after, 0]
        operands: list[Operand] = [
            (*self._float(out)[:2], [*out.stride(), 0]),
            (*self._float(source)[:2], source_strides),
            (*self.operand(index)[:2], index_strides),
        ]
        # One loop over the elements of the result: the last dimension is no work.
        self._work += out.numel() * _ELEMENT
        self._steps.append((DenseOp.SELECT, [*out.shape, size], operands))


def _extent(tensor: Tensor) -> int:
    """Return how many numbers there are from the first to the last of a tensor."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


def _dims(x: Tensor, dims: int | Sequence[int] | None) -> list[int]:
    """Return the dimensions that are reduced, counted from 0. None or no dimension stands for all."""
    dims = [dims] if isinstance(dims, int) else dims
    return [dim % max(1, x.ndim) for dim in dims] if dims else list(range(x.ndim))


def _unary(op: DenseOp, work: int) -> _Lowered:
    return lambda to, out, x: to.emit(op, out, x, work=work)


def _binary(op: DenseOp, work: int = _ELEMENT) -> _Lowered:
    def lowered(to: _Lowering, out: Tensor, a: object, b: object, *, alpha: float = 1) -> None:
        b = b if alpha == 1 else to.made(DenseOp.MUL, b, alpha)
        to.emit(op, out, to.number(a), to.number(b), work=work)

    return lowered


def _rsub(to: _Lowering, out: Tensor, a: Tensor, b: object, alpha: float = 1) -> None:
    to.emit(DenseOp.SUB, out, to.number(b), a if alpha == 1 else to.made(DenseOp.MUL, a, alpha))


def _pow(to: _Lowering, out: Tensor, x: Tensor, exponent: object) -> None:
    if exponent == 2:
        to.emit(DenseOp.SQUARE, out, x)
    else:
        to.emit(DenseOp.POW, out, x, to.number(exponent), work=2 * _FUNCTION)


def _clamp(to: _Lowering, out: Tensor, x: Tensor, low: object = None, high: object = None) -> None:
    if low is not None:
        x = to.made(DenseOp.MAX, x, low)
    to.emit(DenseOp.COPY, out, x if high is None else to.made(DenseOp.MIN, x, high))


def _copy(to: _Lowering, out: Tensor, x: Tensor, *_: object, **__: object) -> None:
    """Of operators that give the elements of their argument, in its order, if need be in other memory."""
    if out.numel() != x.numel():
        raise _UnsuitedError
    to.emit(DenseOp.COPY, out if out.shape == x.shape else out.view(x.shape), x)


def _cat(to: _Lowering, out: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> None:
    begin = 0
    for tensor in tensors:
        if tensor.ndim != out.ndim:
            continue  # an empty vector may be anywhere
        to.emit(DenseOp.COPY, out.narrow(dim, begin, tensor.shape[dim]), tensor)
        begin += tensor.shape[dim]


def _stack(to: _Lowering, out: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> None:
    for position, tensor in enumerate(tensors):
        to.emit(DenseOp.COPY, out.select(dim, position), tensor)


def _sum(
    to: _Lowering, out: Tensor, x: Tensor, dim: _Dim = None, keepdim: bool = False, *, dtype: object = None
) -> None:
    to.reduced(DenseOp.SUM, x, _dims(x, dim), out)


def _mean(
    to: _Lowering, out: Tensor, x: Tensor, dim: _Dim = None, keepdim: bool = False, *, dtype: object = None
) -> None:
    dims = _dims(x, dim)
    to.emit(DenseOp.DIV, out, _mean_of(to, x, dims, sums_only=True).view(out.shape), to.number(_count(x, dims)))


def _count(x: Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[dim] for dim in dims)


def _mean_of(to: _Lowering, x: Tensor, dims: Sequence[int], *, sums_only: bool = False) -> Tensor:
    total = to.reduced(DenseOp.SUM, x, dims)
    return total if sums_only else to.made(DenseOp.DIV, total, _count(x, dims))


def _extreme(op: DenseOp) -> _Lowered:
    def lowered(to: _Lowering, out: Tensor, x: Tensor, dim: _Dim = (), keepdim: bool = False) -> None:
        to.reduced(op, x, _dims(x, dim), out)

    return lowered


def _norm(
    to: _Lowering,
    out: Tensor,
    x: Tensor,
    order: object = 2,
    dim: _Dim = None,
    keepdim: bool = False,
    *,
    dtype: object = None,
) -> None:
    if order != 2:
        raise _UnsuitedError
    total = to.reduced(DenseOp.SUM, to.made(DenseOp.SQUARE, x), _dims(x, dim))
    to.emit(DenseOp.SQRT, out, total.view(out.shape))


def _exponentials(to: _Lowering, x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x minus its largest number, the exponentials of that, and their sum."""
    dims = _dims(x, dim)
    less = to.made(DenseOp.SUB, x, to.reduced(DenseOp.AMAX, x, dims))
    powers = to.made(DenseOp.EXP, less, work=_FUNCTION)
    return less, powers, to.reduced(DenseOp.SUM, powers, dims)


def _softmax(to: _Lowering, out: Tensor, x: Tensor, dim: int, _: object = None, *, dtype: object = None) -> None:
    if x.numel():
        _, powers, total = _exponentials(to, x, dim)
        to.emit(DenseOp.DIV, out, powers, total)


def _log_softmax(to: _Lowering, out: Tensor, x: Tensor, dim: int, _: object = None, *, dtype: object = None) -> None:
    if x.numel():
        less, _, total = _exponentials(to, x, dim)
        to.emit(DenseOp.SUB, out, less, to.made(DenseOp.LOG, total, work=_FUNCTION))


def _product(to: _Lowering, out: Tensor, a: Tensor, b: Tensor) -> None:
    to.product(out, a, b)


def _added_product(
    to: _Lowering, out: Tensor, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> None:
    if beta != 1 or alpha != 1:
        raise _UnsuitedError
    to.product(out, a, b, bias)


def _linear(to: _Lowering, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    if weight.ndim != 2:
        raise _UnsuitedError
    to.product(out, x, weight.t(), bias)


def _attention(
    to: _Lowering, out: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: object = None, dropout: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> None:  # fmt: skip
    if mask is not None or is_causal or enable_gqa or dropout or not out.numel():
        raise _UnsuitedError
    scores = to.new((*out.shape[:-1], k.shape[-2]))
    to.product(scores, q, k.mT)
    scaled = to.made(DenseOp.MUL, scores, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    _, powers, total = _exponentials(to, scaled, -1)
    to.product(out, to.made(DenseOp.DIV, powers, total), v)


def _layer_norm(
    to: _Lowering, out: Tensor, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, _: object = True,
) -> None:  # fmt: skip
    dims = list(range(x.ndim - len(shape), x.ndim))
    centred = to.made(DenseOp.SUB, x, _mean_of(to, x, dims))
    variance = _mean_of(to, to.made(DenseOp.SQUARE, centred), dims)
    _affine(to, out, centred, to.made(DenseOp.ADD, variance, eps), weight, bias)


def _batch_norm(
    to: _Lowering, out: Sequence[Tensor], x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor,
    _: float, eps: float,
) -> None:  # fmt: skip
    shape = [1, -1, *[1] * (x.ndim - 2)]
    weight, bias = (None if tensor is None else tensor.view(shape) for tensor in (weight, bias))
    centred = to.made(DenseOp.SUB, x, mean.view(shape))
    _affine(to, out[0], centred, to.made(DenseOp.ADD, var.view(shape), eps), weight, bias)


def _affine(
    to: _Lowering, out: Tensor, x: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    x = to.made(DenseOp.MUL, x, to.made(DenseOp.RSQRT, variance))
    x = x if weight is None else to.made(DenseOp.MUL, x, weight)
    to.emit(DenseOp.COPY, out, x if bias is None else to.made(DenseOp.ADD, x, bias))


def _silu(to: _Lowering, out: Tensor, x: Tensor) -> None:
    to.emit(DenseOp.MUL, out, x, to.made(DenseOp.SIGMOID, x, work=_FUNCTION))


def _gelu(to: _Lowering, out: Tensor, x: Tensor, *, approximate: str = "none") -> None:
    if approximate != "none":
        raise _UnsuitedError
    erf = to.made(DenseOp.ERF, to.made(DenseOp.MUL, x, math.sqrt(0.5)), work=_FUNCTION)
    to.emit(DenseOp.MUL, out, to.made(DenseOp.MUL, x, 0.5), to.made(DenseOp.ADD, erf, 1))


def _leaky_relu(to: _Lowering, out: Tensor, x: Tensor, slope: float = 0.01) -> None:
    below = to.made(DenseOp.MUL, to.made(DenseOp.MIN, x, 0), slope)
    to.emit(DenseOp.ADD, out, to.made(DenseOp.MAX, x, 0), below)


def _index_select(to: _Lowering, out: Tensor, x: Tensor, dim: int, index: Tensor) -> None:
    to.selection(out, x, dim % max(1, x.ndim), index)


def _embedding(to: _Lowering, out: Tensor, weight: Tensor, indices: Tensor, *_: object) -> None:
    to.selection(out, weight, 0, indices)


_FILLS = frozenset(["zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"])
"""Operators that look at the shape of their argument only."""
_FAST = "neg abs relu sqrt rsqrt reciprocal square"
_SLOW = "sigmoid tanh exp log log1p erf cos sin"
_COPIES = """
_reshape_copy _to_copy.default _unsafe_view alias_copy clone contiguous flatten.using_ints ravel reshape
squeeze_copy.dim unflatten.int unsqueeze_copy view_copy
"""


def _named(names: str) -> list[str]:
    return [f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names.split()]


_LOWERED: dict[str, _Lowered] = {
    **{f"aten.{name}.default": _unary(getattr(DenseOp, name.upper()), _ELEMENT) for name in _FAST.split()},
    **{f"aten.{name}.default": _unary(getattr(DenseOp, name.upper()), _FUNCTION) for name in _SLOW.split()},
    **dict.fromkeys(_named(_COPIES), _copy),
    **dict.fromkeys(("aten.add.Tensor", "aten.add.Scalar"), _binary(DenseOp.ADD)),
    **dict.fromkeys(("aten.sub.Tensor", "aten.sub.Scalar", "aten.subtract.Tensor"), _binary(DenseOp.SUB)),
    **dict.fromkeys(("aten.mul.Tensor", "aten.mul.Scalar", "aten.multiply.Tensor"), _binary(DenseOp.MUL)),
    **dict.fromkeys(("aten.div.Tensor", "aten.div.Scalar", "aten.divide.Tensor"), _binary(DenseOp.DIV)),
    "aten.rsub.Scalar": _rsub,
    "aten.rsub.Tensor": _rsub,
    "aten.maximum.default": _binary(DenseOp.MAX),
    "aten.minimum.default": _binary(DenseOp.MIN),
    "aten.clamp_min.default": _binary(DenseOp.MAX),
    "aten.clamp_max.default": _binary(DenseOp.MIN),
    "aten.clamp.default": _clamp,
    "aten.pow.Tensor_Scalar": _pow,
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.sum.default": _sum,
    "aten.sum.dim_IntList": _sum,
    "aten.mean.default": _mean,
    "aten.mean.dim": _mean,
    "aten.amax.default": _extreme(DenseOp.AMAX),
    "aten.amin.default": _extreme(DenseOp.AMIN),
    "aten.linalg_vector_norm.default": _norm,
    "aten.softmax.int": _softmax,
    "aten._softmax.default": _softmax,
    "aten.log_softmax.int": _log_softmax,
    "aten._log_softmax.default": _log_softmax,
    **dict.fromkeys(_named("mm bmm matmul"), _product),
    **dict.fromkeys(_named("addmm baddbmm"), _added_product),
    "aten.linear.default": _linear,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.layer_norm.default": _layer_norm,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm,
    "aten.silu.default": _silu,
    "aten.gelu.default": _gelu,
    "aten.leaky_relu.default": _leaky_relu,
    "aten.index_select.default": _index_select,
    "aten.embedding.default": _embedding,
}
"""The operators that the core can run. A view is none of them: it is seen from the memory of its result."""
