"""Danger: what a program remembers about a shape lets a later run skip a check that depends on more than the shape."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.serve import program as program_module
from monolith.serve.bound import BoundProgram
from monolith.serve.operators import ALLOWED, DIRECT, fast_form, resolve
from monolith.serve.program import DenseProgram

Steps = list[tuple[str, list[Any], dict[str, Any]]]


def program_of(
    steps: Steps, weights: dict[str, Tensor] | None = None, inputs: tuple[str, ...] = ("x",), output: int | None = None
) -> DenseProgram:
    """A program of `steps`, named "0", "1" and so on, that answers with the last."""
    named = [
        {"name": str(number), "operator": operator, "args": args, "kwargs": kwargs}
        for number, (operator, args, kwargs) in enumerate(steps)
    ]
    last = len(steps) - 1 if output is None else output
    program = {
        "inputs": {name: name for name in inputs},
        "weights": {name: name for name in weights or {}},
        "steps": named,
        "outputs": {"y": {"node": str(last)}},
    }
    return DenseProgram.from_json(json.dumps(program), weights or {})


def ref(name: str | int) -> dict[str, str]:
    return {"node": str(name)}


def test_a_larger_input_is_measured_again() -> None:
    grows = program_of(
        [
            ("aten.sym_size.int", [ref("x"), 0], {}),
            ("operator.mul", [ref(0), 2**24], {}),
            ("aten.zeros.default", [[ref(1)]], {}),
            ("aten.sum.default", [ref(2)], {}),
        ]
    )
    for _ in range(3):
        assert grows({"x": torch.ones(1)})["y"] == 0
        with pytest.raises(InvalidArgumentError, match="MB, but the inputs"):
            grows({"x": torch.ones(1000)})


def test_other_strides_and_types_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[object] = []
    original = DenseProgram._measured

    def counted(self: DenseProgram, tensors: list[Tensor], key: object) -> dict[str, Tensor]:
        measured.append(key)
        return original(self, tensors, key)

    monkeypatch.setattr(DenseProgram, "_measured", counted)
    program = program_of([("aten.add.Tensor", [ref("x"), ref("x")], {})])
    inputs = [torch.ones(4, 4), torch.ones(4, 8)[:, ::2], torch.ones(4, 4, dtype=torch.int64), torch.ones(4)]
    for _ in range(3):
        for x in inputs:
            assert torch.equal(program({"x": x})["y"], x + x)
    assert len(measured) == len(inputs)


def test_counts_are_checked_in_every_run() -> None:
    # Counts that overflow their sum would be written past the end of the result.
    repeat = program_of([("aten.repeat_interleave.Tensor", [ref("x")], {"output_size": 3})])
    assert repeat({"x": torch.tensor([1, 2])})["y"].tolist() == [0, 1, 1]
    for counts in ([2**62, 2**62], [-5, 8], [0, 4]):
        with pytest.raises(InvalidArgumentError, match=r"step 0 \(aten\.repeat_interleave"):
            repeat({"x": torch.tensor(counts)})
    assert repeat({"x": torch.tensor([3, 0])})["y"].tolist() == [0, 0, 0]


def test_an_index_out_of_range_is_a_typed_error_in_every_run() -> None:
    table = torch.arange(6.0).view(3, 2)
    embedding = program_of(
        [("aten.embedding.default", [ref("w"), ref("x")], {}), ("aten.neg.default", [ref(0)], {})], {"w": table}
    )
    for _ in range(2):
        assert torch.equal(embedding({"x": torch.tensor([2, 0])})["y"], -table[[2, 0]])
        with pytest.raises(InvalidArgumentError, match=r"step 0 \(aten\.embedding\.default\)"):
            embedding({"x": torch.tensor([2, 7])})


def test_arguments_by_keyword_in_lists_and_of_sizes() -> None:
    steps: Steps = [
        ("aten.sym_size.int", [ref("x"), 0], {}),
        ("operator.mul", [ref(0), 2], {}),
        ("aten.neg.default", [ref("x")], {}),
        ("aten.cat.default", [[ref("x"), ref(2)], 0], {}),
        ("aten.view.default", [ref(3), [ref(1), 1]], {}),
        ("aten.max.dim", [ref(4), 1], {}),
        ("operator.getitem", [ref(5), 0], {}),
        ("aten.add.Tensor", [ref(6), ref("w")], {"alpha": ref(0)}),
        ("aten.clamp.Tensor", [ref(7)], {"min": ref("w"), "max": ref(6)}),
        ("aten.arange.default", [ref(1)], {"dtype": {"dtype": "float32"}, "device": {"device": "cpu"}}),
        ("aten.add.Tensor", [ref(8), ref(9)], {}),
    ]
    program = program_of(steps, {"w": torch.tensor(0.5)})
    for rows in (3, 5):
        x = torch.rand(rows)
        first = program({"x": x})["y"]
        joined = torch.cat([x, -x])
        expected = torch.clamp(joined + 0.5 * rows, min=torch.tensor(0.5), max=joined) + torch.arange(2.0 * rows)
        assert torch.equal(first, expected)
        assert torch.equal(program({"x": x})["y"], first)


def test_values_are_let_go_after_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    made: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def spied(x: Tensor) -> Tensor:
        gc.collect()
        alive.append(len(made))
        result = torch.neg(x)
        made.add(result)
        return result

    monkeypatch.setitem(DIRECT, "aten.neg.default", spied)
    monkeypatch.setattr(program_module, "lower", lambda *_: None)  # so that torch runs it
    steps: Steps = [("aten.neg.default", [ref("x" if number == 0 else number - 1)], {}) for number in range(8)]
    # A result that nothing reads, one that only its size is read of, and one in a list.
    steps += [
        ("aten.neg.default", [ref("x")], {}),
        ("aten.neg.default", [ref("x")], {}),
        ("aten.sym_size.int", [ref(9), 0], {}),
        ("aten.cat.default", [[ref(7), ref(7)]], {}),
        ("aten.neg.default", [ref("x")], {}),
        ("aten.add.Tensor", [ref(12), ref(10)], {}),
    ]
    program = program_of(steps)
    program({"x": torch.ones(2)})
    program({"x": torch.ones(2)})
    # Of the last run: the argument is alive while the next one is made, and nothing else.
    assert alive == [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]


def test_one_node_for_two_inputs_is_refused() -> None:
    with pytest.raises(CorruptFileError, match="a node of its own"):
        program_of([("aten.neg.default", [ref("x")], {})], weights={"x": torch.ones(1)})


def test_few_shapes_of_a_long_program_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_module, "MAX_STEPS", 12)
    program = program_of([("aten.neg.default", [ref("x")], {})] * 4)
    for rows in range(1, 10):
        program({"x": torch.ones(rows)})
    assert len(program._bound) <= 3
    assert all(isinstance(bound, BoundProgram) for bound in program._bound.values())


def test_only_sizes_give_numbers() -> None:
    """A number that depended on values would be remembered with the shape."""
    numbers = {
        name
        for name in ALLOWED
        if any("Tensor" not in str(result.type) for result in resolve(name)._schema.returns)  # type: ignore[attr-defined]
    }
    assert numbers == {"aten.sym_size.int", "aten.sym_numel.default"}


X, Y = torch.linspace(-2, 3, 12).view(3, 4), torch.linspace(1, 2, 12).view(3, 4)
ARGUMENTS: dict[str, list[Any]] = {
    "aten.add.Tensor": [X, 0.5],
    "aten.bmm.default": [X[None], Y.T[None]],
    "aten.cat.default": [[X, Y], 1],
    "aten.div.Tensor": [X, Y],
    "aten.expand.default": [X[:, :1], [3, 5]],
    "aten.gelu.default": [X],
    "aten.index_select.default": [X, 0, torch.tensor([2, 2, 0])],
    "aten.layer_norm.default": [X, [4], Y[0], Y[1], 1e-5],
    "aten.linear.default": [X, Y, Y[:, 0]],
    "aten.matmul.default": [X, Y.T],
    "aten.mean.dim": [X, [1], True],
    "aten.mm.default": [X, Y.T],
    "aten.mul.Tensor": [X, 3],
    "aten.permute.default": [X, [1, 0]],
    "aten.pow.Tensor_Scalar": [X, 2],
    "aten.select.int": [X, 1, -1],
    "aten.softmax.int": [X, 1],
    "aten.split_with_sizes.default": [X, [1, 3], 1],
    "aten.sqrt.default": [Y],
    "aten.squeeze.dim": [X[:, :1], 1],
    "aten.stack.default": [[X, Y], 1],
    "aten.sub.Tensor": [X, Y],
    "aten.sum.dim_IntList": [X, [0, 1]],
    "aten.transpose.int": [X, 0, 1],
    "aten.unsqueeze.default": [X, 1],
    "aten.view.default": [X, [2, 6]],
}


@pytest.mark.parametrize("name", sorted(DIRECT))
def test_the_quick_form_of_an_operator_is_the_operator(name: str) -> None:
    arguments = ARGUMENTS.get(name, [X])
    with torch.inference_mode():
        quick, slow = fast_form(name)(*arguments), resolve(name)(*arguments)
    pairs = [(quick, slow)] if isinstance(quick, Tensor) else list(zip(quick, slow, strict=True))  # type: ignore[call-overload]
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
