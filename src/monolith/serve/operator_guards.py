"""Checks of arguments for operators that trust theirs: without them a forged program reads or writes outside of a tensor.

A guard has the parameters of its operator, raises ValueError if it must not run, and returns how many elements the operator needs
for results that nobody sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["GUARDS"]

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
    # Counts that overflow their sum are written behind the end of the result.
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
        # The kernel of an LSTM reads as many weights as the hidden state asks for, however many there are.
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
    """Of `split`, `split_with_sizes`, `chunk`: none has more parts than its dimension is long, or than `size` has entries."""
    if not isinstance(size, list) and self.ndim and self.shape[dim] > MAX_PARTS:
        raise ValueError(f"expected at most {MAX_PARTS:,} parts")
    return 0


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
    "aten.chunk.default": _parts,
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
