"""Danger: tensors packed on one side are taken apart differently on the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from monolith.features import Ragged
from monolith.original.packing import (
    StaticReshapeNBuilder,
    maybe_squeeze_3d_tensor,
    merge_dicts,
    pack_tensors,
    pack_typed_keyed_tensors,
    split_tensors_with_type,
    static_reshape,
    unpack_packed_tensors,
    unpack_tensors,
)

FLOATS = {"z": torch.arange(6.0).reshape(2, 3), "a": torch.tensor(9.0), "empty": torch.empty(0, 4)}
INTS = {"b": torch.arange(4), "c": torch.tensor([[7], [8]])}


def shapes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_static_reshape_n() -> None:
    inputs = [torch.arange(5), torch.arange(40).reshape(4, 10), torch.arange(12).reshape(3, 2, 2)]
    wanted = [(None, 1), (2, None, 4), (None, 6)]
    outputs, sizes = static_reshape(inputs, wanted)
    assert sizes.tolist() == [5, 40, 12]
    for given, output, shape in zip(inputs, outputs, wanted, strict=True):
        assert all(size in (None, got) for size, got in zip(shape, output.shape, strict=True))
        assert torch.equal(output.flatten(), given.flatten())


def test_nested_reshape_n() -> None:
    builder = StaticReshapeNBuilder()
    nested = {"a": [torch.ones(2, 2), torch.zeros(3)], "b": torch.arange(6).reshape(3, 2)}
    places = {
        "a": [builder.add(tensor, (None,)) for tensor in nested["a"]],
        "b": builder.add(nested["b"], (None,)),
    }
    outputs, sizes = builder.build()
    assert places == {"a": [0, 1], "b": 2}
    assert outputs[places["a"][0]].tolist() == [1, 1, 1, 1]
    assert outputs[places["b"]].tolist() == [0, 1, 2, 3, 4, 5]
    assert sizes.tolist() == [4, 3, 6]


def test_pack_tensors_in_the_order_of_names_and_back() -> None:
    packed, sizes = pack_tensors(FLOATS)
    assert packed.tolist() == [9, 0, 1, 2, 3, 4, 5]
    assert sizes.tolist() == [1, 0, 6]
    assert equal(unpack_tensors(shapes(FLOATS), (packed, sizes)), dict(sorted(FLOATS.items())))
    assert pack_tensors(dict(reversed(FLOATS.items())))[0].tolist() == packed.tolist()


def test_typed_packing_ends_with_all_sizes() -> None:
    groups = [FLOATS, INTS]
    packed = pack_typed_keyed_tensors(groups)
    assert [tensor.dtype for tensor in packed] == [torch.float32, torch.int64, torch.int64]
    assert packed[-1].tolist() == [1, 0, 6, 4, 2]
    again = unpack_packed_tensors([shapes(FLOATS), shapes(INTS)], packed)
    assert [equal(left, right) for left, right in zip(again, groups, strict=True)] == [True, True]


def test_a_size_known_only_when_packed_is_none_in_the_shape() -> None:
    packed = pack_typed_keyed_tensors([{"a": torch.ones(3, 2)}])
    assert unpack_packed_tensors([{"a": (None, 2)}], packed)[0]["a"].shape == (3, 2)
    assert unpack_packed_tensors([], pack_typed_keyed_tensors([])) == []


def test_split_with_type_and_merge() -> None:
    mixed = {**FLOATS, **INTS, "flag": torch.tensor([True])}
    groups = split_tensors_with_type(mixed)
    assert [{str(tensor.dtype) for tensor in group.values()} for group in groups] == [
        {"torch.bool"},
        {"torch.float32"},
        {"torch.int64"},
    ]
    assert equal(dict(sorted(merge_dicts(groups).items())), dict(sorted(mixed.items())))


def test_maybe_squeeze_3d_tensor() -> None:
    flat = Ragged.from_lists([[1, 2], []])
    assert maybe_squeeze_3d_tensor(flat) is flat
    deep = Ragged(torch.tensor([[1, 2], [3, 4]]), [0, 1, 2])
    assert maybe_squeeze_3d_tensor(deep).to_lists() == [[1, 2], [3, 4]]


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "two unknown sizes": (lambda: static_reshape([torch.ones(4)], [(None, None)]), "at most one None"),
    "a shape that does not fit": (lambda: static_reshape([torch.ones(4)], [(3, None)]), r"inputs\[0\]"),
    "a missing shape": (lambda: static_reshape([torch.ones(4)], []), "shapes"),
    "nothing to pack": (lambda: pack_tensors({}), "at least one"),
    "two dtypes in one tensor": (lambda: pack_tensors({**FLOATS, **INTS}), "one dtype"),
    "sizes that do not add up": (lambda: unpack_tensors({"a": (2,)}, (torch.ones(2), torch.tensor([3]))), "add up"),
    "too many shapes": (lambda: unpack_tensors({"a": (1,), "b": (1,)}, (torch.ones(2), torch.tensor([2]))), "2 sizes"),
    "a tensor too few": (lambda: unpack_packed_tensors([{"a": (1,)}], [torch.ones(1)]), "1 tensors and their sizes"),
    "a size too few": (lambda: unpack_packed_tensors([{"a": (1,)}], [torch.ones(1), torch.tensor([])]), "1 sizes"),
    "a name twice": (lambda: merge_dicts([INTS, INTS]), "twice"),
    "squeezing a tensor": (lambda: maybe_squeeze_3d_tensor(torch.ones(1, 1, 1)), "expected a Ragged"),  # type: ignore[arg-type]
    "squeezing rank 4": (lambda: maybe_squeeze_3d_tensor(Ragged(torch.ones(1, 1, 1), [0, 1])), "2 or 3 dimensions"),
    "squeezing two vectors": (lambda: maybe_squeeze_3d_tensor(Ragged(torch.ones(2, 1), [0, 2])), "one vector per row"),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
