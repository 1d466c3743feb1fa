"""The operators that a dense program may use: an allow-list of functional ATen operators, and arithmetic on sizes.

A program is read from a file that may be forged, and many operators of torch trust their arguments: they read or write outside of
a tensor, return memory that nobody has written to, open files, or change their arguments. So an operator is allowed only if it is
listed here, with its overloads. To be listed, an operator must

- change none of its arguments and return no uninitialised memory (no `empty`, no `as_strided`, no `out=`, nothing in place),
- check shapes and indices on the CPU before it reads or writes (tests/fault/test_hostile_operators.py tries to break this), or
  have a guard in `GUARDS` that checks them first,
- have results whose shape does not depend on the values of a tensor (no `nonzero`, no `bincount`), so that `costs.py` can bound
  them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from monolith.errors import CorruptFileError

__all__ = ["ALLOWED", "DIRECT", "GUARDS", "POINTWISE", "fast_form", "is_on_sizes", "name_of", "resolve"]

# A name stands for the overload `default`; others follow a colon.
_POINTWISE = """
abs acos acosh asin asinh atan atanh atan2 bitwise_and:Tensor,Scalar bitwise_not bitwise_or:Tensor,Scalar
bitwise_xor:Tensor,Scalar ceil clamp:default,Tensor clamp_max:default,Tensor clamp_min:default,Tensor clip:default,Tensor cos
cosh deg2rad digamma add:Tensor,Scalar addcdiv addcmul div:Tensor,Scalar,Tensor_mode,Scalar_mode
divide:Tensor,Scalar,Tensor_mode eq:Tensor,Scalar erf erfc exp exp2 expm1 floor floor_divide:default,Scalar fmax fmin
fmod:Tensor,Scalar frac ge:Tensor,Scalar gt:Tensor,Scalar hypot isfinite isinf isnan le:Tensor,Scalar lerp:Scalar,Tensor
lgamma log log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor logit lt:Tensor,Scalar maximum minimum
mul:Tensor,Scalar multiply:Tensor,Scalar nan_to_num ne:Tensor,Scalar neg negative positive
pow:Scalar,Tensor_Scalar,Tensor_Tensor rad2deg reciprocal remainder:Tensor,Scalar,Scalar_Tensor round:default,decimals rsqrt
rsub:Tensor,Scalar sgn sigmoid sign signbit sin sinc sinh sqrt square sub:Tensor,Scalar subtract:Tensor,Scalar tan tanh
true_divide:Tensor,Scalar trunc where:self,Scalar,ScalarOther,ScalarSelf xlogy:Tensor,Scalar_Other,Scalar_Self
__and__:Tensor,Scalar __or__:Tensor,Scalar __xor__:Tensor,Scalar __lshift__:Tensor,Scalar __rshift__:Tensor,Scalar
bitwise_left_shift:Tensor,Tensor_Scalar bitwise_right_shift:Tensor,Tensor_Scalar isclose masked_fill:Scalar,Tensor
"""
_ACTIVATIONS = """
celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid log_softmax:int _log_softmax mish prelu
relu relu6 selu silu softmax:int _softmax softplus softshrink threshold
"""
_LINEAR_ALGEBRA = """
addbmm addmm addmv baddbmm bilinear bmm cdist cosine_similarity dist dot einsum inner linalg_vector_norm linear matmul mm mv
outer pairwise_distance tensordot vdot norm:Scalar,ScalarOpt_dim _weight_norm
"""
_LAYERS = """
_native_batch_norm_legit:no_stats _native_batch_norm_legit_no_training group_norm instance_norm layer_norm native_layer_norm
rms_norm conv1d:default,padding conv2d:default,padding avg_pool1d avg_pool2d max_pool1d max_pool2d adaptive_avg_pool1d
adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d embedding scaled_dot_product_attention channel_shuffle
pixel_shuffle pixel_unshuffle gru:input lstm:input rnn_relu:input rnn_tanh:input gru_cell lstm_cell rnn_relu_cell
rnn_tanh_cell
"""
_LOSSES = """
binary_cross_entropy binary_cross_entropy_with_logits cross_entropy_loss huber_loss kl_div l1_loss mse_loss nll_loss_nd
smooth_l1_loss soft_margin_loss
"""
_REDUCTIONS = """
all:default,dim,dims amax amin any:default,dim,dims argmax argmin count_nonzero:default,dim_IntList cummax cummin cumprod
cumsum kthvalue logcumsumexp logsumexp max:default,dim,other mean:default,dim median:default,dim min:default,dim,other nanmean
nanmedian:default,dim nansum prod:default,dim_int quantile:default,scalar std:default,dim,correction
std_mean:default,dim,correction sum:default,dim_IntList trace var:default,dim,correction var_mean:default,dim,correction
aminmax
"""
_SHAPES = """
_reshape_copy _to_copy _unsafe_view alias alias_copy atleast_1d atleast_2d atleast_3d broadcast_tensors broadcast_to cat chunk
clone concat concatenate contiguous copy detach diag_embed diagonal diff expand expand_as expand_copy flatten:using_ints flip
fliplr flipud hstack lift_fresh_copy mT matrix_H meshgrid:default,indexing moveaxis:int movedim:int,intlist narrow numpy_T pad
constant_pad_nd permute permute_copy ravel repeat repeat_interleave:self_int,self_Tensor,Tensor reshape roll rot90 select:int
slice:Tensor split:Tensor split_with_sizes squeeze:default,dim,dims squeeze_copy:dim stack swapaxes swapdims sym_numel
sym_size:int t tile to:dtype transpose:int type_as unbind:int unflatten:int unfold unsqueeze unsqueeze_copy view view_as
view_copy vstack column_stack dstack reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
"""
_INDEXING = """
bucketize:Tensor,Scalar gather index:Tensor index_add index_copy index_fill:int_Scalar,int_Tensor index_put index_select
isin:Tensor_Tensor isin:Tensor_Scalar one_hot scatter:src,value scatter_add scatter_reduce:two searchsorted:Tensor,Scalar
select_scatter slice_scatter diagonal_scatter sort:default,stable argsort:default,stable take take_along_dim topk tril triu
"""
_CREATION = """
arange:default,start,start_step eye:default,m fill:Scalar,Tensor full full_like linspace new_full new_ones new_zeros ones
ones_like scalar_tensor tril_indices triu_indices zeros zeros_like
"""
_ATEN = (_POINTWISE, _ACTIVATIONS, _LINEAR_ALGEBRA, _LAYERS, _LOSSES, _REDUCTIONS, _SHAPES, _INDEXING, _CREATION)


def _overloads() -> Iterator[str]:
    for entry in " ".join(_ATEN).split():
        name, _, overloads = entry.partition(":")
        for overload in (overloads or "default").split(","):
            yield f"aten.{name}.{overload}"


POINTWISE: frozenset[str] = frozenset(entry.partition(":")[0] for entry in _POINTWISE.split())
"""Operators, by name without overload, whose result has the shape that their tensors broadcast to."""
ALLOWED: frozenset[str] = frozenset(_overloads())
"""The ATen operators that a program may use, as "aten.add.Tensor"."""

_LARGEST = 2**40
_Number = int | float


def _numbers(function: Callable[..., object]) -> Callable[..., object]:
    """Let a function of Python compute with numbers only: with texts, lists and large integers it could take any memory."""

    def checked(*numbers: object) -> object:
        for number in numbers:
            if not isinstance(number, int | float) or not abs(number) <= _LARGEST:
                raise ValueError(f"expected numbers up to 2**40, got {type(number).__name__}")
        return function(*numbers)

    return checked


def _power(base: _Number, exponent: _Number) -> _Number:
    result = math.pow(base, exponent)
    is_whole = isinstance(base, int) and isinstance(exponent, int) and exponent >= 0 and abs(result) <= _LARGEST
    return int(base) ** int(exponent) if is_whole else result


def _item(values: object, place: object) -> object:
    if not isinstance(values, list | tuple) or not isinstance(place, int):
        raise ValueError(f"expected a list and an index, got {type(values).__name__} and {type(place).__name__}")
    return values[place]


_ARITHMETIC = "add and_ eq floordiv ge gt le lt mod mul ne neg not_ or_ pos sub truediv"
_SYMBOLIC = "sym_float sym_int sym_ite sym_max sym_min sym_not"
_PYTHON: dict[str, Callable[..., object]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _ARITHMETIC.split()},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "sqrt", "trunc")},
    **{f"torch.{name}": getattr(torch, name) for name in _SYMBOLIC.split()},
}
_ON_SIZES = {
    **{name: _numbers(function) for name, function in _PYTHON.items()},
    "operator.pow": _numbers(_power),
    "operator.getitem": _item,
}
_NAMES: dict[object, str] = {
    **{function: name for name, function in _PYTHON.items()},
    operator.pow: "operator.pow",
    operator.getitem: "operator.getitem",
}


def name_of(target: object) -> str | None:
    """Return the name under which a traced operator is written, None if a program may not use it.

    Example:
        >>> name_of(torch.ops.aten.add.Tensor)
        'aten.add.Tensor'
        >>> name_of(torch.ops.aten.as_strided.default) is None
        True
    """
    if isinstance(target, OpOverload):
        return str(target) if str(target) in ALLOWED else None
    return _NAMES.get(target)


def is_on_sizes(name: str) -> bool:
    """Return whether an operator computes with numbers, not with tensors."""
    return name in _ON_SIZES


def resolve(name: str) -> Callable[..., object]:
    """Return the operator of that name.

    Example:
        >>> resolve("aten.add.Tensor")(torch.ones(1), 2)
        tensor([3.])
        >>> resolve("aten.from_file.default")
        Traceback (most recent call last):
        monolith.errors.CorruptFileError: operator 'aten.from_file.default' is not allowed in a dense program
    """
    if isinstance(name, str) and name in _ON_SIZES:
        return _ON_SIZES[name]
    if not isinstance(name, str) or name not in ALLOWED:
        raise CorruptFileError(f"operator {name!r} is not allowed in a dense program")
    _, packet, overload = name.split(".")
    function: OpOverload = getattr(getattr(torch.ops.aten, packet), overload)
    return function


# Guards. Without them a forged program reads or writes outside of a tensor. A guard has the parameters of its operator, raises
# ValueError if it must not run, and returns how many elements the operator allocates besides its results.

MAX_PARTS = 65536
"""Tensors that one operator may return."""
MAX_WINDOW = 2**20
"""Sizes of windows, strides, dilations, paddings and groups."""

Guard = Callable[..., int]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    # The kernel takes the length of the keys from the values.
    _require(key.shape[:-1] == value.shape[:-1], "expected keys and values of the same length", key, value)
    _require(query.shape[-1:] == key.shape[-1:], "expected queries and keys of the same size", query, key)
    return 2 * query.numel() // max(1, query.shape[-1]) * key.shape[-2]


def _repeated(self: Tensor, repeats: Tensor, dim: int | None = None, *, output_size: int | None = None) -> int:
    return _repeats(repeats, output_size=output_size)


def _repeats(repeats: Tensor, *, output_size: int | None = None) -> int:
    # Counts that overflow their sum are written past the end of the result.
    if output_size is None:
        raise ValueError("repeat_interleave: expected output_size; give it in forward")
    if repeats.numel() and not 0 <= int(repeats.min()) <= int(repeats.max()) <= output_size:
        raise ValueError(f"repeat_interleave: expected counts from 0 to {output_size}")
    return 0


def _recurrent(gates: int) -> Guard:
    def check(
        input: Tensor,  # noqa: A002
        hx: Tensor | Sequence[Tensor],
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> int:
        # The kernel of an LSTM reads as many weights as the hidden state implies, however many there are.
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        directions, size = 2 if bidirectional else 1, states[0].shape[-1]
        batch = input.shape[0 if batch_first else 1]
        for state in states:
            _require(tuple(state.shape) == (num_layers * directions, batch, size), "unexpected hidden state", state)
        expected: list[tuple[int, ...]] = []
        for layer in range(num_layers):
            incoming = input.shape[-1] if layer == 0 else directions * size
            weights = [(gates * size, incoming), (gates * size, size)]
            biases = [(gates * size,), (gates * size,)] if has_biases else []
            expected += [*weights, *biases] * directions
        _require([tuple(weight.shape) for weight in params] == expected, "unexpected weights", *params)
        return 4 * gates * num_layers * directions * input.shape[0] * input.shape[1] * size

    return check


def _batch_norm(
    input: Tensor,  # noqa: A002
    weight: Tensor | None,
    bias: Tensor | None,
    *others: Tensor | bool | float,
) -> int:
    # The kernel reads a number of its own dtype for each channel.
    _require(input.ndim >= 2 and input.dtype.is_floating_point, "expected rows of floats", input)
    for tensor in (weight, bias, *others):
        if isinstance(tensor, Tensor):
            _require(tuple(tensor.shape) == (input.shape[1],), "expected one number for each channel", tensor)
            _require(tensor.dtype == input.dtype, f"expected {input.dtype} for each channel", tensor)
    # Without statistics it must take those of the batch: it would read them through a null pointer.
    _require(isinstance(others[0], Tensor) or others[0] is True, "expected statistics", input)
    return 0


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> int:
    # The kernel reads as many norms as the weight has slices.
    _require(v.ndim > 0 and dim in (0, v.ndim - 1) and v.dtype == g.dtype, "unexpected weight", v)
    expected = [size if place == dim else 1 for place, size in enumerate(v.shape)]
    _require(list(g.shape) == expected, "expected one norm for each slice of the weight", v, g)
    return 0


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> int:
    return input1.numel() * weight.shape[2]


def _index(self: Tensor, indices: Sequence[Tensor | None]) -> int:
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            raise ValueError(
                "a mask as an index gives a shape that depends on the data; use torch.where or masked_fill"
            )
    return 0


def _one_hot(self: Tensor, num_classes: int = -1) -> int:
    if num_classes < 0:
        raise ValueError("one_hot: expected num_classes")
    return 0


def _searchsorted(sorted_sequence: Tensor, self: object, **options: object) -> int:
    if options.get("sorter") is not None:
        raise ValueError("searchsorted: expected no sorter")
    return 0


def _parts(self: Tensor, size: object = None, dim: int = 0) -> int:
    """Of `split` and `split_with_sizes`: none has more parts than its dimension is long, or than `size` has entries."""
    if not isinstance(size, list) and self.ndim and self.shape[dim] > MAX_PARTS:
        raise ValueError(f"expected at most {MAX_PARTS:,} parts")
    return 0


def _chunk(self: Tensor, chunks: int, dim: int = 0) -> int:
    # An empty dimension is cut into as many parts as are asked for.
    if chunks > MAX_PARTS:
        raise ValueError(f"expected at most {MAX_PARTS:,} parts")
    return _parts(self, dim=dim)


def _unbind(self: Tensor, dim: int = 0) -> int:
    return _parts(self, dim=dim)


def _windows(*args: object, **kwargs: object) -> int:
    """Of operators with windows and paddings: large ones overflow the sizes that the kernels compute from them."""
    for value in _flat([args, list(kwargs.values())]):
        if isinstance(value, int) and abs(value) > MAX_WINDOW:
            raise ValueError(f"expected numbers up to {MAX_WINDOW:,}, got {value}")
    return 0


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _require(is_right: bool, complaint: str, *tensors: Tensor) -> None:
    if not is_right:
        raise ValueError(f"{complaint}, got {', '.join(str(list(tensor.shape)) for tensor in tensors)}")


GUARDS: dict[str, Guard] = {
    "aten._native_batch_norm_legit.no_stats": _batch_norm,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm,
    "aten._weight_norm.default": _weight_norm,
    "aten.bilinear.default": _bilinear,
    "aten.chunk.default": _chunk,
    "aten.gru.input": _recurrent(3),
    "aten.index.Tensor": _index,
    "aten.lstm.input": _recurrent(4),
    "aten.one_hot.default": _one_hot,
    "aten.repeat_interleave.Tensor": _repeats,
    "aten.repeat_interleave.self_Tensor": _repeated,
    "aten.rnn_relu.input": _recurrent(1),
    "aten.rnn_tanh.input": _recurrent(1),
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.searchsorted.Scalar": _searchsorted,
    "aten.searchsorted.Tensor": _searchsorted,
    "aten.split.Tensor": _parts,
    "aten.split_with_sizes.default": _parts,
    "aten.unbind.int": _unbind,
}
"""The guard of an operator, by its name."""
_WINDOWS = """
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool1d adaptive_max_pool2d avg_pool1d avg_pool2d channel_shuffle
constant_pad_nd conv1d conv2d max_pool1d max_pool2d pad pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d
replication_pad1d replication_pad2d unfold
"""
GUARDS |= {f"aten.{name}.{overload}": _windows for name in _WINDOWS.split() for overload in ("default", "padding")}

_READS_VALUES = frozenset({"aten.repeat_interleave.Tensor", "aten.repeat_interleave.self_Tensor"})
"""Operators whose guards look at the values of a tensor, not only at shapes and types."""

DIRECT: dict[str, Callable[..., object]] = {
    "aten.add.Tensor": torch.add,
    "aten.bmm.default": torch.bmm,
    "aten.cat.default": torch.cat,
    "aten.div.Tensor": torch.div,
    "aten.exp.default": torch.exp,
    "aten.expand.default": Tensor.expand,
    "aten.gelu.default": torch.nn.functional.gelu,
    "aten.index_select.default": torch.index_select,
    "aten.layer_norm.default": torch.layer_norm,
    "aten.linear.default": torch.nn.functional.linear,
    "aten.matmul.default": torch.matmul,
    "aten.mean.dim": torch.mean,
    "aten.mm.default": torch.mm,
    "aten.mul.Tensor": torch.mul,
    "aten.neg.default": torch.neg,
    "aten.permute.default": torch.permute,
    "aten.pow.Tensor_Scalar": torch.pow,
    "aten.relu.default": torch.relu,
    "aten.select.int": torch.select,
    "aten.sigmoid.default": torch.sigmoid,
    "aten.softmax.int": torch.softmax,
    "aten.split_with_sizes.default": torch.split_with_sizes,
    "aten.sqrt.default": torch.sqrt,
    "aten.square.default": torch.square,
    "aten.squeeze.dim": torch.squeeze,
    "aten.stack.default": torch.stack,
    "aten.sub.Tensor": torch.sub,
    "aten.sum.dim_IntList": torch.sum,
    "aten.tanh.default": torch.tanh,
    "aten.transpose.int": torch.transpose,
    "aten.unsqueeze.default": torch.unsqueeze,
    "aten.view.default": Tensor.view,
}
"""Functions of torch that reach the same kernels with less work in between than `torch.ops` has. For arguments that the operator
itself has accepted: they may accept others."""


def fast_form(name: str) -> Callable[..., object]:
    """Return the quickest function for an operator, for arguments of shapes and types that `resolve(name)` has accepted.

    A guard that looks at values stays in place, because those of the next call are others.

    Example:
        >>> fast_form("aten.add.Tensor")(torch.ones(1), 2)
        tensor([3.])
    """
    function = DIRECT.get(name) or resolve(name)
    if name not in _READS_VALUES:
        return function
    guard = GUARDS[name]

    def guarded(*args: object, **kwargs: object) -> object:
        guard(*args, **kwargs)
        return function(*args, **kwargs)

    return guarded
