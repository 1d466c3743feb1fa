"""Danger: a restored value that is not the one that was saved, or a restore that stops halfway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from monolith.errors import CheckpointMismatchError, InvalidArgumentError
from monolith.original import PartialRecoverySaver


class KeyValue:
    """A custom object that saves itself."""

    def __init__(self, **values: float) -> None:
        self.values = dict(values)

    def state_dict(self) -> dict[str, Any]:
        return {"values": dict(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state["values"])


def saved(tmp_path: Path, variables: Any, **options: Any) -> str:  # noqa: ANN401
    path = PartialRecoverySaver(variables, **options).save(tmp_path / "ckpt")
    assert path is not None
    return path


def test_tensors_and_custom_objects_come_back(tmp_path: Path) -> None:
    v0, v1, v2 = torch.tensor(10.0), nn.Parameter(torch.tensor(20.0)), KeyValue(k1=30.0)
    path = saved(tmp_path, {"v0": v0, "v1": v1, "v2": v2})
    n0, n1, n2 = torch.zeros(()), nn.Parameter(torch.tensor(-1.0)), KeyValue()
    PartialRecoverySaver({"v0": n0, "v1": n1, "v2": n2}).restore(path)
    assert (n0.item(), n1.item(), n2.values) == (10.0, 20.0, {"k1": 30.0})
    # In place: who holds the tensor sees the value, and it is still a leaf.
    assert n1.is_leaf
    assert n1.requires_grad


def test_what_is_saved_is_what_was_there_at_the_call(tmp_path: Path) -> None:
    v0 = torch.tensor([1.0])
    saver = PartialRecoverySaver({"v0": v0})
    first, second = saver.save(tmp_path / "s1"), None
    v0.fill_(2.0)
    second = saver.save(tmp_path / "s2")
    for path, value in ((first, 1.0), (second, 2.0), (first, 1.0)):  # a later read is a new read
        assert path is not None
        saver.restore(path)
        assert v0.item() == value


def test_whole_modules_and_optimizers(tmp_path: Path) -> None:
    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 1)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    model, adam = parts()
    model(torch.ones(1, 2)).sum().backward()
    adam.step()
    path = saved(tmp_path, {"model": model, "adam": adam})
    other, other_adam = parts()
    PartialRecoverySaver({"model": other, "adam": other_adam}).restore(path)
    for m, a in ((model, adam), (other, other_adam)):
        m.zero_grad()
        m(torch.ones(1, 2)).sum().backward()
        a.step()
    assert torch.equal(model.weight, other.weight)  # type: ignore[arg-type]


def test_a_list_of_names_and_variables(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    path = saved(tmp_path, model.named_parameters())
    other = nn.Linear(3, 2)
    PartialRecoverySaver(dict(other.named_parameters())).restore(path)
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(15, dtype=torch.int64),
        torch.tensor([2**62 + 1, -(2**63)]),
        torch.tensor([1.5, -2.5], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.tensor(3.0, dtype=torch.float64),
    ],
    ids=["int64", "large int64", "bfloat16", "bool", "empty", "scalar"],
)
def test_every_dtype_and_shape(tmp_path: Path, value: Tensor) -> None:
    path = saved(tmp_path, {"v": value})
    other = torch.empty_like(value)
    PartialRecoverySaver({"v": other}).restore(path)
    assert torch.equal(other, value)


def test_large_tensors_beside_small_ones(tmp_path: Path) -> None:
    large = {f"large{i}": torch.full((3200, 1000), float(i)) for i in range(3)}
    small = {f"small{i}": torch.full((10,), float(i)) for i in range(5)}
    path = saved(tmp_path, {**large, **small})
    others = {name: torch.zeros_like(value) for name, value in {**large, **small}.items()}
    PartialRecoverySaver(others).restore(path)
    assert all(torch.equal(others[name], value) for name, value in {**large, **small}.items())


def test_names_may_differ_from_those_in_the_model(tmp_path: Path) -> None:
    v0, v1 = torch.tensor([10.0]), torch.tensor([20.0])
    path = saved(tmp_path, {"save_prefix/v0": v0, "save_prefix/v1": v1})
    w0, w1 = torch.zeros(1), torch.zeros(1)
    with pytest.raises(CheckpointMismatchError, match=r"'v0' was not found in the checkpoint"):
        PartialRecoverySaver({"v0": w0, "v1": w1}).restore(path)
    PartialRecoverySaver({"save_prefix/v0": w0, "save_prefix/v1": w1}).restore(path)
    assert (w0.item(), w1.item()) == (10.0, 20.0)
    # Some of them are enough.
    only = torch.zeros(1)
    PartialRecoverySaver({"save_prefix/v1": only}).restore(path)
    assert only.item() == 20.0


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"v0": torch.zeros(1)})
    with pytest.raises(CheckpointMismatchError, match=r"torch\.int32, but its original dtype is torch\.float32"):
        PartialRecoverySaver({"v0": torch.zeros(1, dtype=torch.int32)}).restore(path)


def test_reshape_only_when_enabled(tmp_path: Path) -> None:
    path = saved(tmp_path, {"v0": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])})
    other = torch.zeros(3, 2)
    with pytest.raises(CheckpointMismatchError, match=r"shape \[3, 2\], but was saved with \[2, 3\]; reshape=True"):
        PartialRecoverySaver({"v0": other}).restore(path)
    PartialRecoverySaver({"v0": other}, reshape=True).restore(path)
    assert other.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    with pytest.raises(CheckpointMismatchError, match=r"shape \[4\]"):
        PartialRecoverySaver({"v0": torch.zeros(4)}, reshape=True).restore(path)


def test_a_restore_that_does_not_fit_changes_nothing_and_names_everything(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.ones(1), "b": KeyValue(x=1.0), "m": nn.Linear(1, 2)})
    a, b, m = torch.zeros(1), KeyValue(), nn.Linear(1, 3)
    with pytest.raises(CheckpointMismatchError, match=r"'m\.weight' has shape.*'m\.bias' has shape.*'c' was not found"):
        PartialRecoverySaver({"a": a, "b": b, "m": m, "c": torch.zeros(1)}).restore(path)
    assert (a.item(), b.values) == (0.0, {})
    with pytest.raises(CheckpointMismatchError, match="'a' was saved as a Tensor, and is a KeyValue here"):
        PartialRecoverySaver({"a": b}).restore(path)
    with pytest.raises(CheckpointMismatchError, match="'b' was saved as a state, and is a tensor here"):
        PartialRecoverySaver({"b": a}).restore(path)


def test_one_name_twice_and_one_variable_twice_are_refused() -> None:
    v0, v1 = torch.zeros(1), torch.zeros(1)
    with pytest.raises(InvalidArgumentError, match="same name: 'v1'"):
        PartialRecoverySaver([("v0", v0), ("v1", v1), ("v1", torch.zeros(1))])
    with pytest.raises(InvalidArgumentError, match="two names: 'v0' and 'v0too'"):
        PartialRecoverySaver({"v0": v0, "v0too": v0})
    custom = KeyValue()
    with pytest.raises(InvalidArgumentError, match="two names: 'v2' and 'v2too'"):
        PartialRecoverySaver({"v2": custom, "v2too": custom})
    PartialRecoverySaver({"v0": v0, "v1": v1, "v2": custom})


@pytest.mark.parametrize(
    "wrong",
    [{"v": 3}, {"": torch.zeros(1)}, {3: torch.zeros(1)}, {"v": object()}],
    ids=["number", "no name", "name is a number", "no state"],
)
def test_what_cannot_be_saved_is_refused_when_the_saver_is_built(wrong: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidArgumentError, match="variables"):
        PartialRecoverySaver(wrong)


def test_a_saver_without_variables(tmp_path: Path) -> None:
    for nothing in ({}, [], None):
        with pytest.raises(InvalidArgumentError, match="allow_empty"):
            PartialRecoverySaver(nothing)
    empty = PartialRecoverySaver(allow_empty=True)
    assert empty.save(tmp_path / "ckpt") is None
    empty.restore(tmp_path / "ckpt")


def test_variables_can_be_named_later(tmp_path: Path) -> None:
    v0 = torch.tensor([1.0])
    with pytest.raises(InvalidArgumentError, match="defer_build"):
        PartialRecoverySaver({"v0": v0}, defer_build=True)
    saver = PartialRecoverySaver(defer_build=True)
    for call in (saver.save, saver.restore):
        with pytest.raises(InvalidArgumentError, match=r"call build\(\) first"):
            call(tmp_path / "ckpt")
    saver.build({"v0": v0})
    path = saver.save(tmp_path / "ckpt")
    assert path is not None
    v0.zero_()
    saver.restore(path)
    assert v0.item() == 1.0
    with pytest.raises(InvalidArgumentError, match="already"):
        saver.build({"v0": v0})


def test_nothing_is_written_when_saving_is_skipped(tmp_path: Path) -> None:
    assert PartialRecoverySaver({"v0": torch.zeros(1)}, skip_save=True).save(tmp_path / "ckpt") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tensor_on_a_gpu(tmp_path: Path) -> None:
    path = saved(tmp_path, {"v0": torch.ones(2, device="cuda")})
    other = torch.zeros(2, device="cuda")
    PartialRecoverySaver({"v0": other}).restore(path)
    assert other.tolist() == [1.0, 1.0]
