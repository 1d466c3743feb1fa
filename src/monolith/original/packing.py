"""Packing many tensors into one, in the order of their names, with their sizes, for a single transfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from monolith.errors import InvalidArgumentError
from monolith.features import Ragged

__all__ = [
    "StaticReshapeNBuilder",
    "maybe_squeeze_3d_tensor",
    "merge_dicts",
    "pack_tensors",
    "pack_typed_keyed_tensors",
    "split_tensors_with_type",
    "static_reshape",
    "unpack_packed_tensors",
    "unpack_tensors",
]

ReshapeTo = Sequence[int | None]
"""Sizes of the dimensions. One may be None, to be inferred."""
Tensors = Mapping[str, torch.Tensor]


def static_reshape(
    inputs: Sequence[torch.Tensor], shapes: Sequence[ReshapeTo]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return each input in its shape, as a view where possible, and the number of elements of each, int64 [n].

    Example:
        >>> outputs, sizes = static_reshape([torch.zeros(5), torch.zeros(4, 10)], [(None, 1), (2, 5, None)])
        >>> [tuple(output.shape) for output in outputs], sizes.tolist()
        ([(5, 1), (2, 5, 4)], [5, 40])
    """
    if len(inputs) != len(shapes):
        raise InvalidArgumentError(f"shapes: expected one for each of {len(inputs)} inputs, got {len(shapes)}")
    outputs = [_reshape(f"inputs[{place}]", *pair) for place, pair in enumerate(zip(inputs, shapes, strict=True))]
    return outputs, torch.tensor([output.numel() for output in outputs], dtype=torch.int64)


def _reshape(name: str, tensor: torch.Tensor, shape: ReshapeTo) -> torch.Tensor:
    if sum(size is None for size in shape) > 1:
        raise InvalidArgumentError(f"{name}: expected at most one None in its shape, got {tuple(shape)}")
    try:
        return tensor.reshape([-1 if size is None else size for size in shape])
    except RuntimeError:
        raise InvalidArgumentError(f"{name}: {list(tensor.shape)} does not fit into shape {tuple(shape)}") from None


class StaticReshapeNBuilder:
    """Collects tensors and shapes, then reshapes them all.

    Example:
        >>> builder = StaticReshapeNBuilder()
        >>> builder.add(torch.zeros(2, 3), (None,)), builder.add(torch.zeros(4), (2, 2))
        (0, 1)
        >>> outputs, sizes = builder.build()
        >>> tuple(outputs[1].shape), sizes.tolist()
        ((2, 2), [6, 4])
    """

    def __init__(self) -> None:
        self._inputs: list[torch.Tensor] = []
        self._shapes: list[ReshapeTo] = []

    def add(self, input: torch.Tensor, shape: ReshapeTo) -> int:  # noqa: A002 - the original's name
        """Add one tensor. Returns its index in the outputs."""
        self._inputs.append(input)
        self._shapes.append(tuple(shape))
        return len(self._inputs) - 1

    def build(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return `static_reshape` of all tensors that were added."""
        return static_reshape(self._inputs, self._shapes)


def pack_tensors(keyed_tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all elements in one tensor [total], in the order of the sorted names, and the size of each, int64 [names].

    Example:
        >>> pack_tensors({"b": torch.tensor([[3, 4]]), "a": torch.tensor([1, 2])})
        (tensor([1, 2, 3, 4]), tensor([2, 2]))
    """
    if not keyed_tensors:
        raise InvalidArgumentError("keyed_tensors: expected at least one tensor, got none; its dtype would be unknown")
    dtypes = sorted({str(tensor.dtype) for tensor in keyed_tensors.values()})
    if len(dtypes) > 1:
        raise InvalidArgumentError(
            f"keyed_tensors: expected one dtype, got {', '.join(dtypes)}; use split_tensors_with_type"
        )
    builder = StaticReshapeNBuilder()
    for key in sorted(keyed_tensors):
        builder.add(keyed_tensors[key], (None,))
    flat, sizes = builder.build()
    return torch.cat(flat), sizes


def unpack_tensors(
    keyed_shape: Mapping[str, ReshapeTo], packed: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return what `pack_tensors` packed, by name, in the given shapes, as views of the packed tensor.

    Example:
        >>> unpack_tensors({"a": (2,), "b": (None, 2)}, (torch.tensor([1, 2, 3, 4]), torch.tensor([2, 2])))
        {'a': tensor([1, 2]), 'b': tensor([[3, 4]])}
    """
    tensor, sizes = packed
    if len(sizes) != len(keyed_shape) or int(sizes.sum()) != len(tensor):
        raise InvalidArgumentError(
            f"packed: expected {len(keyed_shape)} sizes that add up to {len(tensor)} elements, got {sizes.tolist()}"
        )
    parts = torch.split(tensor, sizes.tolist())
    return {key: _reshape(key, part, keyed_shape[key]) for key, part in zip(sorted(keyed_shape), parts, strict=True)}


def pack_typed_keyed_tensors(keyed_tensors_list: Sequence[Tensors]) -> list[torch.Tensor]:
    """Return one packed tensor per dict, each dict of one dtype, and at the end the sizes of all, int64.

    Example:
        >>> pack_typed_keyed_tensors([{"a": torch.tensor([1.0])}, {"b": torch.tensor([2, 3])}])
        [tensor([1.]), tensor([2, 3]), tensor([1, 2])]
    """
    packed = [pack_tensors(keyed_tensors) for keyed_tensors in keyed_tensors_list]
    return [
        *(tensor for tensor, _ in packed),
        torch.cat([torch.empty(0, dtype=torch.int64), *(size for _, size in packed)]),
    ]


def unpack_packed_tensors(
    keyed_shape_list: Sequence[Mapping[str, ReshapeTo]], packed: Sequence[torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """Return the dicts that `pack_typed_keyed_tensors` packed.

    Example:
        >>> unpack_packed_tensors([{"a": (1,)}, {"b": (2,)}], [torch.tensor([1.0]), torch.tensor([2, 3]), torch.tensor([1, 2])])
        [{'a': tensor([1.])}, {'b': tensor([2, 3])}]
    """
    if len(packed) != len(keyed_shape_list) + 1:
        raise InvalidArgumentError(
            f"packed: expected {len(keyed_shape_list)} tensors and their sizes, got {len(packed)} tensors"
        )
    *tensors, sizes = packed
    counts = [len(keyed_shape) for keyed_shape in keyed_shape_list]
    if sum(counts) != len(sizes):
        raise InvalidArgumentError(f"packed: expected {sum(counts)} sizes, one per shape, got {len(sizes)}")
    parts = torch.split(sizes, counts)
    return [unpack_tensors(*group) for group in zip(keyed_shape_list, zip(tensors, parts, strict=True), strict=True)]


def split_tensors_with_type(keyed_tensors: Tensors) -> list[dict[str, torch.Tensor]]:
    """Return one dict per dtype, in the order of the dtypes' names, so that all processes agree on it.

    Example:
        >>> split_tensors_with_type({"a": torch.tensor(1), "b": torch.tensor(2.0), "c": torch.tensor(3)})
        [{'b': tensor(2.)}, {'a': tensor(1), 'c': tensor(3)}]
    """
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in keyed_tensors.items():
        groups.setdefault(str(tensor.dtype), {})[key] = tensor
    return [groups[dtype] for dtype in sorted(groups)]


def merge_dicts(dicts: Sequence[Tensors]) -> dict[str, torch.Tensor]:
    """Return one dict of all entries, the inverse of `split_tensors_with_type`. A name in two of them is an error.

    Example:
        >>> merge_dicts([{"a": torch.tensor(1)}, {"b": torch.tensor(2.0)}])
        {'a': tensor(1), 'b': tensor(2.)}
    """
    merged: dict[str, torch.Tensor] = {}
    for entries in dicts:
        twice = merged.keys() & entries.keys()
        if twice:
            raise InvalidArgumentError(f"dicts: expected every name once, got {sorted(twice)} twice")
        merged.update(entries)
    return merged


def maybe_squeeze_3d_tensor(x: Ragged) -> Ragged:
    """Return a `Ragged` [rows, 1, k] as [rows, k], and one of numbers, [rows, (n)], unchanged.

    Example:
        >>> maybe_squeeze_3d_tensor(Ragged(torch.tensor([[1, 2], [3, 4]]), [0, 1, 2])).to_lists()
        [[1, 2], [3, 4]]
    """
    if not isinstance(x, Ragged):
        raise InvalidArgumentError(f"x: expected a Ragged, got {type(x).__name__}")
    if x.values.ndim == 1:
        return x
    if x.values.ndim != 2:
        raise InvalidArgumentError(f"x: expected a Ragged of 2 or 3 dimensions, got {x.values.ndim + 1}")
    if not bool((x.row_lengths() == 1).all()):
        raise InvalidArgumentError(f"x: expected one vector per row to squeeze, got {x.row_lengths().tolist()}")
    rows, width = x.values.shape
    return Ragged(x.values.reshape(-1), torch.arange(rows + 1) * width)
