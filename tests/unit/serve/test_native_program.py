"""Danger: the loops of the core that replace torch's operators for small requests compute something else for some shape, stride
or value, read a weight that has just been replaced, or trust an index."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layer_catalog import CATALOG, build, inputs
from monolith.errors import InvalidArgumentError
from monolith.serve import lowering
from monolith.serve import program as program_module
from monolith.serve.export import trace_program
from monolith.serve.program import DenseProgram

WITH_TORCH = {"AGRU", "CausalAttention", "DIEN", "DIN", "DMRU2I", "MMoE topk", "MixedEmbedding", "SNR", "SNR aver"}
"""Layers with masks, `topk`, `einsum` or a recurrent cell."""


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run everything by the core that it can run, faster or not."""
    monkeypatch.setattr(lowering, "FIXED_CALLS", -100)


def ref(name: str | int) -> dict[str, str]:
    return {"node": str(name)}


def program_of(
    steps: list[tuple[str, list[Any], dict[str, Any]]], names: list[str], weights: Mapping[str, Tensor] | None = None
) -> DenseProgram:
    """A program of `steps`, named "0", "1" and so on, that answers with the last."""
    weights = weights or {}
    program = {
        "inputs": {name: name for name in names},
        "weights": {name: name for name in weights},
        "steps": [
            {"name": str(number), "operator": f"aten.{operator}", "args": args, "kwargs": kwargs}
            for number, (operator, args, kwargs) in enumerate(steps)
        ],
        "outputs": {"y": ref(len(steps) - 1)},
    }
    return DenseProgram.from_json(json.dumps(program), weights)


def native_answer(program: DenseProgram, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the answers of torch and of the core."""
    first = program(given)["y"]
    program(given)
    assert program._native, "the core does not run it"
    return first, program(given)["y"]


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_other_memory(x: Tensor, how: int) -> Tensor:
    """Return a tensor with the values of `x`: contiguous, with gaps, transposed in memory, or behind something else."""
    if how == 1:
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), torch.nan)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if how == 2 and x.ndim > 1:
        return x.mT.contiguous().mT
    if how == 3:
        return torch.cat([torch.full((3,), torch.nan), x.reshape(-1)])[3:].view(x.shape)
    return x


UNARY = "neg abs relu sigmoid tanh exp erf cos sin square silu gelu leaky_relu"
POSITIVE = "log log1p sqrt rsqrt reciprocal"


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from((UNARY + " " + POSITIVE).split()),
    st.lists(st.integers(0, 5), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_functions(name: str, shape: list[int], how: int) -> None:
    x = random(1, *shape)
    x = x.abs() + 0.1 if name in POSITIVE.split() else 3 * x
    torch.testing.assert_close(
        *native_answer(program_of([(f"{name}.default", [ref("x")], {})], ["x"]), {"x": in_other_memory(x, how)})
    )


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum.default", "minimum.default"]),
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["both", "left", "right"])), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_two_numbers_broadcast(name: str, dims: list[tuple[int, str]], how: int, other: int) -> None:
    x = random(1, *[1 if kept == "right" else size for size, kept in dims])
    y = random(2, *[1 if kept == "left" else size for size, kept in dims]) + 4
    program = program_of([(name, [ref("x"), ref("y")], {})], ["x", "y"])
    torch.testing.assert_close(*native_answer(program, {"x": in_other_memory(x, how), "y": in_other_memory(y, other)}))


NUMBERS: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("add.Tensor", [ref("x"), 2], {"alpha": 0.5}),
    ("sub.Tensor", [ref("x"), ref("x")], {"alpha": 3}),
    ("rsub.Scalar", [ref("x"), 1], {}),
    ("rsub.Scalar", [ref("x"), 1, 2], {}),
    ("mul.Tensor", [ref("x"), 0.3], {}),
    ("div.Tensor", [ref("x"), 3], {}),
    ("clamp.default", [ref("x"), -0.5, 0.5], {}),
    ("clamp.default", [ref("x"), None, 0.5], {}),
    ("clamp_min.default", [ref("x"), 0], {}),
    ("clamp_max.default", [ref("x"), 0.1], {}),
    ("pow.Tensor_Scalar", [ref("x"), 2], {}),
    ("pow.Tensor_Scalar", [ref("x"), 3], {}),
    ("leaky_relu.default", [ref("x"), 0.2], {}),
    ("zeros_like.default", [ref("x")], {}),
    ("clone.default", [ref("x")], {}),
    ("permute.default", [ref("x"), [2, 0, 1]], {}),
    ("slice.Tensor", [ref("x"), 2, 1, 5, 2], {}),
    ("sum.default", [ref("x")], {}),
    ("sum.dim_IntList", [ref("x"), [0, -1]], {}),
    ("mean.dim", [ref("x"), [1], True], {}),
    ("mean.default", [ref("x")], {}),
    ("amax.default", [ref("x"), [-1]], {}),
    ("amin.default", [ref("x"), [0, 1]], {}),
    ("linalg_vector_norm.default", [ref("x"), 2, [2], True], {}),
    ("softmax.int", [ref("x"), 1], {}),
    ("log_softmax.int", [ref("x"), -1], {}),
    ("cat.default", [[ref("x"), ref("x")], -1], {}),
    ("stack.default", [[ref("x"), ref("x")], 1], {}),
    ("index_select.default", [ref("x"), 2, ref("i")], {}),
    ("layer_norm.default", [ref("x"), [6]], {}),
]


@pytest.mark.parametrize("shape", [(3, 4, 6), (1, 1, 6), (2, 20, 6)])
@pytest.mark.parametrize("how", [0, 1, 2])
def test_operators_with_other_arguments(shape: tuple[int, ...], how: int) -> None:
    given = {"x": in_other_memory(random(1, *shape), how), "i": torch.tensor([5, 0, 0])}
    for step in NUMBERS:
        torch.testing.assert_close(*native_answer(program_of([step], ["x", "i"]), given), msg=lambda m: f"{step}: {m}")  # noqa: B023


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(["linear", "mm", "addmm", "bmm", "matmul", "attention"]),
    st.integers(0, 9), st.integers(1, 20), st.integers(1, 20), st.integers(0, 3), st.integers(0, 3),
)  # fmt: skip
def test_products(name: str, m: int, n: int, k: int, how: int, other: int) -> None:
    given: dict[str, Tensor] = {"a": random(1, m, k), "b": random(2, k, n), "c": random(3, n)}
    if name == "linear":
        given["b"] = random(2, n, k)
        steps: list[Any] = [("linear.default", [ref("a"), ref("b"), ref("c")], {})]
    elif name == "addmm":
        steps = [("addmm.default", [ref("c"), ref("a"), ref("b")], {})]
    elif name == "attention":
        given |= {"a": random(1, 2, m + 1, k), "b": random(2, 2, n, k), "c": random(3, 2, n, k)}
        steps = [("scaled_dot_product_attention.default", [ref("a"), ref("b"), ref("c")], {})]
    else:
        if name != "mm":
            given |= {"a": random(1, 3, m, k), "b": random(2, 3, k, n)}
        steps = [(f"{name}.default", [ref("a"), ref("b")], {})]
    given = {"c": given.pop("c"), "a": in_other_memory(given["a"], how), "b": in_other_memory(given["b"], other)}
    torch.testing.assert_close(*native_answer(program_of(steps, list(given)), given), rtol=1e-5, atol=1e-5)


def test_matmul_of_vectors_and_batches() -> None:
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((5,), (5,)), ((5,), (5, 3)), ((4, 5), (5,)), ((2, 4, 5), (5, 3)), ((5,), (2, 5, 3)), ((2, 1, 4, 5), (3, 5, 6)),
    ]  # fmt: skip
    for a, b in shapes:
        program = program_of([("matmul.default", [ref("a"), ref("b")], {})], ["a", "b"])
        torch.testing.assert_close(*native_answer(program, {"a": random(1, *a), "b": random(2, *b)}))


def test_special_numbers() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 1e-40, 3e38])
    for name in ("relu", "sigmoid", "tanh", "exp", "abs", "square"):
        program = program_of([(f"{name}.default", [ref("x")], {})], ["x"])
        torch.testing.assert_close(*native_answer(program, {"x": x}), equal_nan=True)
    for step in [*NUMBERS[6:10], ("amax.default", [ref("x")], {}), ("amin.default", [ref("x")], {})]:
        torch.testing.assert_close(*native_answer(program_of([step], ["x"]), {"x": x}), equal_nan=True)


class Flat(nn.Module):
    """A layer of the catalogue from flat tensors to flat tensors."""

    def __init__(self, name: str) -> None:
        super().__init__()
        _, self._spec = pytree.tree_flatten(inputs(name))
        self.layer = build(name)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(pytree.tree_leaves(self.layer(*pytree.tree_unflatten(list(tensors), self._spec))))


@pytest.mark.parametrize("name", CATALOG)
def test_layers(name: str) -> None:
    model = Flat(name).eval()

    def given(rows: int) -> dict[str, Tensor]:
        return {str(number): tensor for number, tensor in enumerate(pytree.tree_leaves(inputs(name, rows)))}

    outputs = [str(number) for number in range(len(model(*given(4).values())))]
    traced = trace_program(model, given(4), outputs)
    program = DenseProgram.from_json(traced.to_json(), traced.weights)
    for rows in (1, 4, 17):
        first = program(given(rows))
        program(given(rows))
        torch.testing.assert_close(program(given(rows)), first, rtol=1e-5, atol=1e-5)
    assert len(program._native) == (0 if name in WITH_TORCH else 3)


def deep_program() -> DenseProgram:
    steps: list[Any] = [
        ("linear.default", [ref("x"), ref("w"), ref("b")], {}),
        ("relu.default", [ref(0)], {}),
        ("linear.default", [ref(1), ref("v")], {}),
    ]
    return program_of(steps, ["x"], {"w": random(1, 33, 45), "b": random(2, 33), "v": random(3, 1, 33)})


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    program, x = deep_program(), random(4, 9, 45)
    _, together = native_answer(program, {"x": x})
    for row in range(9):
        _, alone = native_answer(program, {"x": x[row : row + 1]})
        assert torch.equal(alone, together[row : row + 1])


def test_weights_are_old_or_new_while_threads_predict() -> None:
    program, x = deep_program(), random(4, 2, 45)
    sides = [dict(program.weights), {name: weight + 1 for name, weight in program.weights.items()}]
    wanted = []
    for side in sides:
        program.set_weights(side)
        wanted.append(native_answer(program, {"x": x})[1])
    assert not torch.equal(*wanted)
    wrong: list[Tensor] = []
    done = threading.Event()

    def predict() -> None:
        while not done.is_set():
            found = program({"x": x})["y"]
            if not any(torch.equal(found, one) for one in wanted):
                wrong.append(found)

    threads = [threading.Thread(target=predict) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(300):
        program.set_weights(sides[turn % 2])
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_index_of_a_later_run_is_checked() -> None:
    steps: list[Any] = [("embedding.default", [ref("w"), ref("x")], {}), ("neg.default", [ref(0)], {})]
    program = program_of(steps, ["x"], {"w": random(1, 3, 2)})
    native_answer(program, {"x": torch.tensor([2, 0])})
    for bad in (3, -1, 2**62):
        with pytest.raises(InvalidArgumentError, match=r"step 0 \(aten\.embedding\.default\)"):
            program({"x": torch.tensor([0, bad])})


def test_inputs_of_another_size_than_the_key_says_are_left_to_torch() -> None:
    program = program_of([("add.Tensor", [ref("a"), ref("b")], {})], ["a", "b"])
    for _ in range(3):
        program.run([torch.ones(4096), torch.ones(4096)], key="rows")
    assert program._native, "the core does not run it"
    assert program.run([torch.ones(2), torch.ones(2)], key="rows")["y"].tolist() == [2.0, 2.0]


def test_answers_own_their_memory() -> None:
    program, x = deep_program(), random(4, 2, 45)
    _, first = native_answer(program, {"x": x})
    kept = first.clone()
    program({"x": -x})
    assert torch.equal(first, kept)
    same = program_of([("view.default", [ref("x"), [90]], {})], ["x"])
    _, answer = native_answer(same, {"x": x})
    assert answer.data_ptr() != x.data_ptr()


def test_inputs_in_one_memory_and_weights_that_are_tied() -> None:
    whole = random(1, 4, 12)
    steps: list[Any] = [
        ("sub.Tensor", [ref("x"), ref("y")], {}),
        ("mul.Tensor", [ref(0), ref("w")], {}),
        ("add.Tensor", [ref(1), ref("v")], {}),
    ]
    program = program_of(steps, ["x", "y"], dict.fromkeys("wv", random(2, 6)))
    given = {"x": whole[:, :6], "y": whole[:, 6:]}
    torch.testing.assert_close(*native_answer(program, given))
    program.set_weights({"w": torch.zeros(6)})
    assert torch.equal(program(given)["y"], program.weights["v"].expand(4, 6))


def test_torch_runs_what_is_large_and_what_the_core_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[object] = []
    original = program_module.lower
    monkeypatch.setattr(program_module, "lower", lambda *args: lowered.append(original(*args)) or lowered[-1])
    deep = deep_program()
    for rows in (1, 20_000):
        for _ in range(3):
            deep({"x": torch.ones(rows, 45)})
    assert [program is None for program in lowered] == [False, True]
    other = program_of([("cumsum.default", [ref("x"), 0], {})], ["x"])
    for rows in (1, 2):
        for _ in range(3):
            assert other({"x": torch.ones(rows)})["y"].tolist() == [1.0, 2.0][:rows]
    # Doubles and integers are not for the core, whatever the operator.
    for dtype in (torch.float64, torch.int64):
        relu = program_of([("relu.default", [ref("x")], {})], ["x"])
        for _ in range(3):
            assert torch.equal(relu({"x": torch.tensor([-1, 2], dtype=dtype)})["y"], torch.tensor([0, 2], dtype=dtype))
        assert not relu._native
