"""Danger: saved state is restored as something else, or saved bytes run code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.state_bytes import pack_state, unpack_state
from monolith.testing import truncations

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
TENSORS = st.lists(st.integers(-5, 5), max_size=3).map(torch.tensor)
STATES = st.recursive(
    PLAIN | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
    ),
    max_leaves=10,
)


def same(left: Any, right: Any) -> bool:  # noqa: ANN401 - any state
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def packed_and_unpacked(state: object) -> object:
    packed = pack_state(state)
    return unpack_state(packed.structure, packed.tensor_bytes())


@given(STATES)
def test_any_state_comes_back_equal(state: object) -> None:
    assert same(packed_and_unpacked(state), state)


def test_the_state_of_an_optimizer_comes_back() -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    adam = torch.optim.Adam([parameter])
    parameter.square().sum().backward()
    adam.step()
    assert same(packed_and_unpacked(adam.state_dict()), adam.state_dict())


def test_tensors_that_share_memory_and_strange_dtypes_come_back() -> None:
    whole = torch.arange(6).reshape(2, 3)
    state = [whole, whole.T, whole[:, 1], torch.ones(2, dtype=torch.bfloat16), torch.tensor(True), torch.empty(0, 3)]
    assert same(packed_and_unpacked(state), state)


@pytest.mark.parametrize("bad", [{"f": print}, {1.5: 1}, [{"x": object()}], {"s": {1, 2}}])
def test_what_cannot_be_saved_is_named(bad: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^s"):
        pack_state(bad, "s")


def test_damaged_bytes_are_refused() -> None:
    packed = pack_state({"a": torch.ones(3), "b": [1, "two"]})
    tensors = packed.tensor_bytes()
    for _, damaged in truncations(packed.structure):
        with pytest.raises(CorruptFileError, match=r"^model.ckpt-1/state: "):
            unpack_state(damaged, tensors, "model.ckpt-1/state")
    for _, damaged in truncations(tensors):
        with pytest.raises(CorruptFileError):
            unpack_state(packed.structure, damaged)


@pytest.mark.parametrize("text", ["[1]", '{"pickle": "x"}', '{"tensor": "9"}', '{"dict": 3}', '{"a": 1, "b": 2}', "{}"])
def test_a_structure_of_another_shape_is_refused(text: str) -> None:
    with pytest.raises(CorruptFileError):
        unpack_state(text.encode(), pack_state({}).tensor_bytes())


def test_nesting_without_end_is_refused() -> None:
    for text in ("[" * 100_000, '{"list":[' * 100_000):
        with pytest.raises(CorruptFileError):
            unpack_state(text.encode(), pack_state({}).tensor_bytes())


def test_a_packed_state_does_not_follow_its_tensors() -> None:
    weight = torch.ones(2)
    packed = pack_state({"weight": weight})
    weight.zero_()
    assert same(unpack_state(packed.structure, packed.tensor_bytes()), {"weight": torch.ones(2)})
