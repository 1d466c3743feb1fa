"""Tensors of the Open Inference Protocol: datatypes, and their bytes and JSON to torch and back."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from monolith.errors import InvalidArgumentError
from monolith.features.batch import IdMatrix

__all__ = [
    "DATATYPES",
    "Datatype",
    "MatrixInputs",
    "WireTensor",
    "from_elements",
    "from_raw",
    "ids_of_lists",
    "inputs_of_ids",
    "join_strings",
    "to_raw",
    "torch_datatype",
]


@dataclass(frozen=True, slots=True)
class Datatype:
    """A datatype of the protocol."""

    name: str
    bytes: int
    """Of one element. 0 for BYTES, whose elements have lengths of their own."""
    numpy: np.dtype[Any]
    torch: torch.dtype
    """As which a model gets it. All integers become int64."""


_SIZES = {"BOOL": ("?", torch.bool), "FP16": ("<f2", torch.float16), "FP32": ("<f4", torch.float32)}
_SIZES |= {"FP64": ("<f8", torch.float64), "BF16": ("<i2", torch.bfloat16), "BYTES": ("O", torch.uint8)}
_SIZES |= {
    f"{kind}INT{8 * size}": (f"<{kind.lower() or 'i'}{size}", torch.int64) for kind in ("U",) for size in (1, 2, 4, 8)
}
_SIZES |= {f"INT{8 * size}": (f"<i{size}", torch.int64) for size in (1, 2, 4, 8)}

DATATYPES = {
    name: Datatype(name, 0 if code == "O" else np.dtype(code).itemsize, np.dtype(code), kind)
    for name, (code, kind) in _SIZES.items()
}
"""All datatypes by their names in the protocol."""
_OF_TORCH = {
    torch.bool: "BOOL",
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.uint8: "UINT8",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.float32: "FP32",
    torch.float64: "FP64",
}
_MAX_DIMS = 8


@dataclass(slots=True)  # not frozen, which would double the time to make one
class WireTensor:
    """An input of a request."""

    datatype: str
    shape: tuple[int, ...]
    data: torch.Tensor | list[bytes]
    """A list for BYTES, in row-major order."""


def torch_datatype(dtype: torch.dtype) -> str:
    """Return the name of `dtype` in the protocol.

    Example:
        >>> torch_datatype(torch.float32)
        'FP32'
    """
    return _OF_TORCH[dtype]


def _checked_shape(name: str, datatype: object, shape: object) -> tuple[Datatype, tuple[int, ...], int]:
    """Return the datatype, the shape and the number of elements of the input `name`."""
    kind = DATATYPES.get(datatype) if isinstance(datatype, str) else None
    if kind is None:
        raise InvalidArgumentError(
            f"inputs[{name!r}].datatype: expected one of {', '.join(DATATYPES)}, got {datatype!r:.40}"
        )
    if type(shape) is list and len(shape) == 1 and type(shape[0]) is int and 0 <= shape[0] < 2**40:
        return kind, (shape[0],), shape[0]  # most inputs, in a fraction of the time
    if not isinstance(shape, Sequence) or isinstance(shape, str) or not 1 <= len(shape) <= _MAX_DIMS:
        raise InvalidArgumentError(f"inputs[{name!r}].shape: expected 1 to {_MAX_DIMS} sizes, got {shape!r:.80}")
    count = 1
    for size in shape:
        if type(size) is not int or not 0 <= size < 2**40:
            raise InvalidArgumentError(f"inputs[{name!r}].shape: expected whole numbers >= 0, got {list(shape)!r:.80}")
        count *= size
    return kind, tuple(shape), count


def from_raw(name: str, datatype: object, shape: object, data: bytearray, offset: int, size: int) -> WireTensor:
    """Return the tensor in `size` bytes of `data` from `offset`, little-endian in row-major order.

    Its memory is shared with `data` where that is possible.

    Raises:
        InvalidArgumentError: the bytes do not fit the datatype and shape.

    Example:
        >>> from_raw("user", "INT64", [1], bytearray(b"\\x07" + bytes(7)), 0, 8).data
        tensor([7])
    """
    kind, sizes, count = _checked_shape(name, datatype, shape)
    if kind.name == "BYTES":
        return WireTensor("BYTES", sizes, _split_strings(name, memoryview(data)[offset : offset + size], count))
    if count * kind.bytes != size:
        raise InvalidArgumentError(
            f"inputs[{name!r}]: expected {count * kind.bytes:,} bytes for {kind.name} {list(sizes)}, got {size:,}"
        )
    if not count:
        return WireTensor(kind.name, sizes, torch.empty(sizes, dtype=kind.torch))
    if kind.name in _SHARED and not offset % kind.bytes:
        tensor = torch.frombuffer(data, dtype=kind.torch, count=count, offset=offset)
    else:
        tensor = _as_torch(name, kind, np.frombuffer(data, kind.numpy, count, offset))
    return WireTensor(kind.name, sizes, tensor if len(sizes) == 1 else tensor.view(sizes))


_SHARED = {"INT64", "FP32", "FP64", "FP16", "BF16"}
"""Datatypes whose bytes are those of torch."""


def _as_torch(name: str, kind: Datatype, array: np.ndarray) -> torch.Tensor:
    """Copy an array of the datatype of an input to a tensor."""
    if kind.name == "BF16":
        return torch.from_numpy(array.astype(np.int16)).view(torch.bfloat16)
    if kind.name == "BOOL":
        return torch.from_numpy(array.view(np.uint8) != 0)
    if kind.name == "UINT64" and array.size and array.max() >= 2**63:
        raise InvalidArgumentError(f"inputs[{name!r}]: ids are below 2**63, got {int(array.max())}; send them as INT64")
    return torch.from_numpy(array.astype(np.int64 if kind.torch is torch.int64 else kind.numpy.newbyteorder("=")))


def _split_strings(name: str, data: memoryview, count: int) -> list[bytes]:
    """Split BYTES elements: each a length in 4 bytes, little-endian, and so many bytes."""
    if count * 4 > len(data):
        raise InvalidArgumentError(
            f"inputs[{name!r}]: expected {count:,} elements of BYTES, each after its length in 4 bytes, got {len(data):,} bytes"
        )
    found, at = [], 0
    for number in range(count):
        if at + 4 > len(data) or at + 4 + (length := struct.unpack_from("<I", data, at)[0]) > len(data):
            raise InvalidArgumentError(
                f"inputs[{name!r}]: element {number} of BYTES ends after the {len(data):,} bytes there are"
            )
        found.append(bytes(data[at + 4 : at + 4 + length]))
        at += 4 + length
    if at != len(data):
        raise InvalidArgumentError(
            f"inputs[{name!r}]: {len(data) - at:,} bytes are left after {count:,} elements of BYTES"
        )
    return found


def from_elements(name: str, datatype: object, shape: object, elements: object) -> WireTensor:
    """Return the tensor with `elements`: a list, flat or nested as the shape says, of numbers, booleans or strings.

    Raises:
        InvalidArgumentError: the elements do not fit the datatype and shape.

    Example:
        >>> from_elements("user", "INT64", [2], [7, 8]).data
        tensor([7, 8])
    """
    kind, sizes, count = _checked_shape(name, datatype, shape)
    if not isinstance(elements, Sequence) or isinstance(elements, str | bytes):
        raise InvalidArgumentError(f"inputs[{name!r}].data: expected a list, got {type(elements).__name__}")
    if kind.name == "BYTES":
        return WireTensor("BYTES", sizes, _strings(name, elements, count))
    try:
        array = np.array(elements)
    except (ValueError, OverflowError):
        raise InvalidArgumentError(
            f"inputs[{name!r}].data: expected lists of the same length, as in {list(sizes)}"
        ) from None
    if array.dtype == np.int64 and kind.name == "INT64" and array.shape == sizes and count:
        return WireTensor("INT64", sizes, torch.from_numpy(array))  # most inputs, in a fraction of the time
    if array.size != count or (array.ndim > 1 and array.shape != sizes):
        got = f"{array.size:,} elements" if array.ndim == 1 else f"lists of shape {list(array.shape)}"
        raise InvalidArgumentError(f"inputs[{name!r}].data: expected {count:,} elements for {list(sizes)}, got {got}")
    if not count:
        return WireTensor(kind.name, sizes, torch.empty(sizes, dtype=kind.torch))
    return WireTensor(kind.name, sizes, _numbers(name, kind, array).view(sizes))


def _numbers(name: str, kind: Datatype, array: np.ndarray) -> torch.Tensor:
    accepted = "b" if kind.name == "BOOL" else "iu" if "INT" in kind.name else "iuf"
    if array.dtype.kind not in accepted:
        wanted = {"b": "true or false", "iu": "whole numbers of 64 bits"}.get(accepted, "numbers")
        got = {"b": "true or false", "f": "numbers with a fraction, or too large"}.get(array.dtype.kind, "other values")
        raise InvalidArgumentError(f"inputs[{name!r}].data: expected {wanted} for {kind.name}, got {got}")
    if kind.name == "BF16":
        return torch.from_numpy(array.astype(np.float64)).to(torch.bfloat16)
    if ("INT" in kind.name and kind.bytes < 8) or kind.name == "UINT64":
        limits = np.iinfo(kind.numpy)
        least, most = int(array.min()), int(array.max())
        if least < limits.min or most > limits.max:
            raise InvalidArgumentError(
                f"inputs[{name!r}].data: {kind.name} is from {limits.min} to {limits.max}, got {least} to {most}"
            )
    elif kind.name == "INT64" and array.dtype.kind == "u":
        raise InvalidArgumentError(f"inputs[{name!r}].data: INT64 is below 2**63, got {int(array.max())}")
    elif kind.torch.is_floating_point:
        # NumPy warns of a number that becomes infinite, torch does not. JSON has no infinite numbers.
        found = torch.from_numpy(array.astype(np.float64)).to(kind.torch)
        if np.isfinite(array).all() and not found.isfinite().all():
            raise InvalidArgumentError(f"inputs[{name!r}].data: a number is too large for {kind.name}")
        return found
    return _as_torch(name, kind, array.astype(kind.numpy))


def _strings(name: str, elements: Sequence[Any], count: int) -> list[bytes]:
    flat: list[Any] = list(elements)
    for _ in range(_MAX_DIMS):
        if not any(isinstance(element, list) for element in flat):
            break
        flat = [inner for element in flat for inner in (element if isinstance(element, list) else [element])]
    if not all(isinstance(element, str | bytes) for element in flat):
        raise InvalidArgumentError(f"inputs[{name!r}].data: expected strings for BYTES")
    if len(flat) != count:
        raise InvalidArgumentError(f"inputs[{name!r}].data: expected {count:,} strings, got {len(flat):,}")
    return [element.encode() if isinstance(element, str) else element for element in flat]


class MatrixInputs(Mapping[str, WireTensor]):
    """Inputs of INT64 [rows] that are the rows of one matrix. A tensor for each is only made when somebody asks for it.

    Example:
        >>> from monolith.features.batch import IdMatrix
        >>> MatrixInputs(IdMatrix(("user", "item"), torch.tensor([[7], [1]])))["item"]
        WireTensor(datatype='INT64', shape=(1,), data=tensor([1]))
    """

    __slots__ = ("matrix",)

    def __init__(self, matrix: IdMatrix) -> None:
        self.matrix = matrix

    def __getitem__(self, name: str) -> WireTensor:
        return WireTensor("INT64", (self.matrix.rows,), self.matrix[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.matrix)

    def __len__(self) -> int:
        return len(self.matrix)


def inputs_of_ids(names: Sequence[str], ids: torch.Tensor, sizes: list[int]) -> Mapping[str, WireTensor]:
    """Return inputs of INT64 [n], which share the memory of `ids`: so many elements of each.

    Example:
        >>> {name: one.data.tolist() for name, one in inputs_of_ids(["a", "b"], torch.tensor([7, 8, 9]), [2, 1]).items()}
        {'a': [7, 8], 'b': [9]}
    """
    if sizes.count(sizes[0]) == len(sizes):
        return MatrixInputs(IdMatrix(tuple(names), ids.view(len(sizes), sizes[0])))
    # "Unsafe": torch does not know that they share memory. Nobody changes them in place.
    columns = torch.unsafe_split_with_sizes(ids, sizes)
    return {name: WireTensor("INT64", (len(column),), column) for name, column in zip(names, columns, strict=True)}


def ids_of_lists(lists: Sequence[list[Any]]) -> torch.Tensor | None:
    """Return the elements of several lists of JSON, one after the other. None if some are not whole numbers of 64 bits.

    One conversion of all takes a third of the time of one for each. A boolean among them counts as 0 or 1.

    Example:
        >>> ids_of_lists([[7, 8], [9]])
        tensor([7, 8, 9])
    """
    flat: list[Any] = []
    for elements in lists:
        flat += elements
    try:
        array = np.array(flat)
    except (ValueError, OverflowError):  # lists in lists
        return None
    if array.dtype != np.int64 or array.ndim != 1:
        return None
    return torch.from_numpy(array)


def join_strings(strings: Sequence[bytes]) -> bytes:
    """Return BYTES elements as one run of bytes, each after its length.

    Example:
        >>> join_strings([b"ab"])
        b'\\x02\\x00\\x00\\x00ab'
    """
    return b"".join(struct.pack("<I", len(string)) + string for string in strings)


def to_raw(tensor: torch.Tensor) -> bytes:
    """Return the elements of `tensor`, little-endian in row-major order.

    Example:
        >>> to_raw(torch.tensor([1], dtype=torch.int16))
        b'\\x01\\x00'
    """
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.contiguous().view(torch.int16)
    data: bytes = tensor.numpy().tobytes()
    return data
