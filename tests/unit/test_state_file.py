"""Danger: saved state that comes back as something else, or a state file that can run code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monolith.checkpoint.state_file import load_state, save_state
from monolith.errors import CorruptFileError, InvalidArgumentError, StorageError
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


@given(STATES)
def test_any_state_comes_back_equal(tmp_path_factory: pytest.TempPathFactory, state: object) -> None:
    folder = tmp_path_factory.mktemp("state")
    save_state(state, folder, "s")
    assert same(load_state(folder, "s"), state)


def test_the_state_of_an_optimizer_comes_back(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    adam = torch.optim.Adam([parameter])
    parameter.square().sum().backward()
    adam.step()
    save_state(adam.state_dict(), tmp_path, "adam")
    assert same(load_state(tmp_path, "adam"), adam.state_dict())


def test_tensors_that_share_memory_and_strange_dtypes_come_back(tmp_path: Path) -> None:
    whole = torch.arange(6).reshape(2, 3)
    state = [whole, whole.T, whole[:, 1], torch.ones(2, dtype=torch.bfloat16), torch.tensor(True), torch.empty(0, 3)]
    save_state(state, tmp_path, "s")
    assert same(load_state(tmp_path, "s"), state)


@pytest.mark.parametrize("bad", [{"f": print}, {1.5: 1}, [{"x": object()}], {"s": {1, 2}}])
def test_what_cannot_be_saved_is_named(tmp_path: Path, bad: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^s"):
        save_state(bad, tmp_path, "s")


@pytest.mark.parametrize("ending", ["json", "safetensors"])
def test_a_damaged_file_is_refused(tmp_path: Path, ending: str) -> None:
    save_state({"a": torch.ones(3), "b": [1, "two"]}, tmp_path, "s")
    path = tmp_path / f"s.{ending}"
    for _, data in truncations(path.read_bytes()):
        path.write_bytes(data)
        with pytest.raises(CorruptFileError):
            load_state(tmp_path, "s")


@pytest.mark.parametrize("text", ["[1]", '{"pickle": "x"}', '{"tensor": "9"}', '{"dict": 3}', '{"a": 1, "b": 2}', "{}"])
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str) -> None:
    save_state({}, tmp_path, "s")
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(CorruptFileError):
        load_state(tmp_path, "s")


def test_a_missing_file_is_an_error_of_storage(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        load_state(tmp_path, "s")


def test_nesting_without_end_is_refused(tmp_path: Path) -> None:
    save_state({}, tmp_path, "s")
    for text in ("[" * 100_000, '{"list":[' * 100_000):
        (tmp_path / "s.json").write_text(text)
        with pytest.raises(CorruptFileError):
            load_state(tmp_path, "s")


def test_a_packed_state_does_not_follow_its_tensors() -> None:
    weight = torch.ones(2)
    packed = pack_state({"weight": weight})
    weight.zero_()
    assert same(unpack_state(packed.structure, packed.tensor_bytes()), {"weight": torch.ones(2)})
