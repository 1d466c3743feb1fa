"""Danger: a forged export that reads or writes outside of a tensor, or takes any amount of memory or time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket

from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.serve import program as program_module
from monolith.serve.costs import known_cost, measure, tensors_in
from monolith.serve.export import trace_program
from monolith.serve.operators import ALLOWED, name_of, resolve
from monolith.serve.program import DenseProgram

Step = dict[str, Any]


def forged(*steps: tuple[str, list[Any], dict[str, Any]], weights: dict[str, Tensor] | None = None) -> DenseProgram:
    """A program of `steps`, named "0", "1" and so on, that answers with the last; "x" is its input."""
    written: list[Step] = [
        {"name": str(number), "operator": operator, "args": args, "kwargs": kwargs}
        for number, (operator, args, kwargs) in enumerate(steps)
    ]
    names = list(weights or {})
    text = json.dumps(
        {
            "inputs": {"x": "x"},
            "weights": {name: name for name in names},
            "steps": written,
            "outputs": {"y": {"node": str(len(steps) - 1)}},
        }
    )
    return DenseProgram.from_json(text, weights or {})


def ref(name: str | int) -> dict[str, str]:
    return {"node": str(name)}


def every_operator_of_torch() -> Iterator[str]:
    for namespace in ("aten", "prims", "quantized", "mkldnn", "_c10d_functional", "inductor", "onednn", "sparse"):
        space = getattr(torch.ops, namespace)
        names = {
            schema.split("::")[1]
            for schema in torch._C._dispatch_get_all_op_names()
            if schema.startswith(f"{namespace}::")
        }
        for name in sorted({full.partition(".")[0] for full in names}):
            packet = getattr(space, name, None)
            if isinstance(packet, OpOverloadPacket):
                yield from (f"{namespace}.{name}.{overload}" for overload in packet.overloads())


def test_every_operator_that_is_not_on_the_list_is_refused() -> None:
    unlisted = [name for name in every_operator_of_torch() if name not in ALLOWED]
    assert len(unlisted) > 2000
    assert "aten._sparse_coo_tensor_unsafe.default" in unlisted
    for name in unlisted:
        with pytest.raises(CorruptFileError, match="is not allowed in a dense program"):
            forged((name, [ref("x")], {}))
        assert (
            name_of(getattr(getattr(getattr(torch.ops, name.split(".")[0]), name.split(".")[1]), name.split(".")[2]))
            is None
        )


def test_what_is_on_the_list_exists_and_changes_nothing() -> None:
    for name in sorted(ALLOWED):
        function = resolve(name)
        assert isinstance(function, OpOverload)
        changed = [a.name for a in function._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        assert not changed, name
        # `_unsafe_view` only keeps no record for gradients.
        suspicious = ("unsafe", "empty", "strided", "resize", "set_", "from_file")
        assert name == "aten._unsafe_view.default" or not any(word in name for word in suspicious), name


OUT_OF_RANGE = torch.tensor([10**6])
HUGE = torch.tensor([2**62, 2**62, 2**62, 2**62 + 3])


@pytest.mark.parametrize(
    ("operator", "args", "kwargs", "weights"),
    [
        ("aten.embedding.default", ["a", "i"], {}, {"a": torch.ones(3, 2), "i": OUT_OF_RANGE}),
        ("aten.gather.default", ["a", 0, "i"], {}, {"a": torch.ones(3), "i": OUT_OF_RANGE}),
        ("aten.index.Tensor", ["a", ["i"]], {}, {"a": torch.ones(3), "i": OUT_OF_RANGE}),
        ("aten.index_put.default", ["a", ["i"], "a"], {}, {"a": torch.ones(1), "i": -OUT_OF_RANGE}),
        ("aten.index_select.default", ["a", 0, "i"], {}, {"a": torch.ones(3), "i": OUT_OF_RANGE}),
        ("aten.index_add.default", ["a", 0, "i", "a"], {}, {"a": torch.ones(1), "i": OUT_OF_RANGE}),
        ("aten.index_copy.default", ["a", 0, "i", "a"], {}, {"a": torch.ones(1), "i": OUT_OF_RANGE}),
        ("aten.index_fill.int_Scalar", ["a", 0, "i", 1], {}, {"a": torch.ones(3), "i": OUT_OF_RANGE}),
        ("aten.scatter.src", ["a", 0, "i", "a"], {}, {"a": torch.ones(1), "i": OUT_OF_RANGE}),
        ("aten.scatter_add.default", ["a", 0, "i", "a"], {}, {"a": torch.ones(1), "i": OUT_OF_RANGE}),
        ("aten.scatter_reduce.two", ["a", 0, "i", "a", "sum"], {}, {"a": torch.ones(1), "i": OUT_OF_RANGE}),
        ("aten.take.default", ["a", "i"], {}, {"a": torch.ones(3), "i": OUT_OF_RANGE}),
        ("aten.one_hot.default", ["i", 4], {}, {"i": OUT_OF_RANGE}),
        # Each of these ended the process, or read what was not its own.
        (
            "aten.scaled_dot_product_attention.default",
            ["q", "k", "v"],
            {},
            {"q": torch.ones(1, 1, 4, 8), "k": torch.ones(1, 1, 2, 8), "v": torch.ones(1, 1, 300_000, 8)},
        ),
        ("aten.repeat_interleave.Tensor", ["r"], {"output_size": 3}, {"r": HUGE}),
        ("aten.repeat_interleave.self_Tensor", ["a", "r"], {"output_size": 3}, {"a": torch.ones(4), "r": HUGE}),
        ("aten.repeat_interleave.Tensor", ["r"], {"output_size": 3}, {"r": torch.tensor([-5, 8])}),
        ("aten.repeat_interleave.Tensor", ["r"], {}, {"r": torch.tensor([1])}),
        (
            "aten.lstm.input",
            ["x3", ["h", "h"], ["w", "w", "w", "w"], True, 1, 0.0, False, False, False],
            {},
            {"x3": torch.ones(30, 50, 64), "h": torch.ones(1, 50, 32), "w": torch.ones(4)},
        ),
        (
            "aten._native_batch_norm_legit_no_training.default",
            ["a", "w", "w", "w", "w", 0.1, 1e-5],
            {},
            {"a": torch.ones(4, 100_000), "w": torch.ones(1)},
        ),
        (
            "aten._native_batch_norm_legit.no_stats",
            ["a", "w", "w", True, 0.1, 1e-5],
            {},
            {"a": torch.ones(4, 100_000), "w": torch.ones(1)},
        ),
        (
            "aten._native_batch_norm_legit.no_stats",
            ["a", "w", "w", False, 0.1, 1e-5],
            {},
            {"a": torch.ones(4, 3), "w": torch.ones(3)},
        ),
        ("aten._weight_norm.default", ["a", "w", 0], {}, {"a": torch.ones(100_000, 4), "w": torch.ones(1)}),
        ("aten.index.Tensor", ["a", ["m"]], {}, {"a": torch.ones(3), "m": torch.tensor([True, False, True])}),
        (
            "aten.searchsorted.Tensor",
            ["a", "a"],
            {"sorter": "i"},
            {"a": torch.ones(2), "i": torch.tensor([10**6, 10**6])},
        ),
    ],
)
def test_no_data_leads_outside_of_a_tensor(
    operator: str, args: list[Any], kwargs: dict[str, Any], weights: dict[str, Tensor]
) -> None:
    def written(value: Any) -> Any:  # noqa: ANN401 - JSON
        if isinstance(value, list):
            return [written(item) for item in value]
        return ref(value) if isinstance(value, str) and value in weights else value

    kwargs = {key: written(value) for key, value in kwargs.items()}
    program = forged((operator, written(args), kwargs), weights=weights)
    with pytest.raises(InvalidArgumentError, match=r"^step 0 \(aten\."):
        program({"x": torch.ones(1)})


def test_a_number_is_no_dtype() -> None:
    with pytest.raises(CorruptFileError, match="expected a dtype, got int"):
        forged(("aten.log_softmax.int", [ref("x"), -1, -1], {}))
    with pytest.raises(CorruptFileError, match="expected a dtype, got Ref"):
        forged(
            ("aten.sym_size.int", [ref("x"), 0], {}),
            ("aten.softmax.int", [ref("x"), 0], {"dtype": ref(0)}),
        )
    for dtype in ("complex64", "qint8", "float8_e4m3fn"):
        with pytest.raises(CorruptFileError, match="there is no dtype"):
            forged(("aten.zeros.default", [[1]], {"dtype": {"dtype": dtype}}))
    with pytest.raises(CorruptFileError, match="complex64 is not allowed"):
        forged(("aten.neg.default", [ref("w")], {}), weights={"w": torch.ones(1, dtype=torch.complex64)})


ROW = [ref("x")]


@pytest.mark.parametrize(
    "steps",
    [
        [("aten.zeros.default", [[2**20, 2**20]], {})],
        [("aten.full.default", [[2**30], 1.0], {}), ("aten.add.Tensor", [ref(0), ref(0)], {})],
        [("aten.arange.default", [2**31], {})],
        [("aten.eye.default", [2**20], {})],
        [("aten.linspace.default", [0, 1, 2**31], {})],
        [("aten.expand.default", [ref("x"), [2**31, 1]], {}), ("aten.sum.default", [ref(0)], {})],
        [("aten.repeat.default", [ref("x"), [2**30]], {})],
        [("aten.repeat_interleave.self_int", [ref("x"), 2**30], {})],
        [("aten.constant_pad_nd.default", [ref("x"), [2**30, 0]], {})],
        [("aten.tril_indices.default", [2**20, 2**20], {})],
        [("aten.new_zeros.default", [ref("x"), [2**31]], {})],
        [
            ("aten.arange.default", [2**20], {}),
            ("aten.unsqueeze.default", [ref(0), 1], {}),
            ("aten.mul.Tensor", [ref(0), ref(1)], {}),
        ],
        [
            ("aten.zeros.default", [[2**16]], {}),
            ("aten.einsum.default", ["a,b->ab", [ref(0), ref(0)]], {}),
        ],
        [
            ("aten.sym_size.int", [ref("x"), 0], {}),
            ("operator.mul", [ref(0), 2**31], {}),
            ("aten.zeros.default", [[ref(1)]], {}),
        ],
        [("aten.zeros.default", [[2**14, 2**14]], {}), *[("aten.mm.default", [ref(0), ref(0)], {})] * 3],
        [("aten.zeros.default", [[2**20]], {}), ("aten.unbind.int", [ref(0)], {})],
        [("aten.zeros.default", [[2**27]], {})] * 20 + [("aten.cat.default", [[ref(n) for n in range(20)]], {})],
    ],
)
def test_no_more_memory_or_time_than_the_inputs_justify(steps: list[tuple[str, list[Any], dict[str, Any]]]) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"MB, but the inputs|takes more time|at most 65,536 parts|numbers up to 1,048"
    ):
        forged(*steps)({"x": torch.ones(1)})


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        ("operator.mul", ["a", 2**31]),
        ("operator.mul", [[1], 2**31]),
        ("operator.mod", ["%1000000000d", 5]),
        ("operator.add", [[1], [2]]),
        ("operator.getitem", [{"dtype": "float32"}, 0]),
    ],
)
def test_arithmetic_on_sizes_is_with_numbers_only(operator: str, args: list[Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected (numbers|a list)"):
        forged((operator, args, {}))({"x": torch.ones(1)})


def test_powers_of_sizes_do_not_grow_without_end() -> None:
    power = forged(("operator.pow", [10, 2**31], {}), ("aten.add.Tensor", [ref("x"), ref(0)], {}))
    with pytest.raises(InvalidArgumentError, match=r"operator\.pow"):
        power({"x": torch.ones(1)})
    small = forged(("operator.pow", [10, 3], {}), ("aten.add.Tensor", [ref("x"), ref(0)], {}))
    assert small({"x": torch.ones(1)})["y"].tolist() == [1001.0]


def test_numbers_texts_and_steps_have_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CorruptFileError, match="up to 2"):
        forged(("aten.zeros.default", [[2**40]], {}))
    forged(("aten.slice.Tensor", [ref("x"), 0, 0, sys.maxsize], {}))
    with pytest.raises(CorruptFileError, match="up to 2"):
        forged(("aten.max_pool1d.default", [ref("x"), [sys.maxsize]], {}))
    window = forged(
        ("aten.sym_size.int", [ref("x"), 0], {}),
        ("operator.mul", [ref(0), 2**31], {}),
        ("aten.max_pool1d.default", [ref("x"), [ref(1)], [], [0], [1], True], {}),
    )
    with pytest.raises(InvalidArgumentError, match="expected numbers up to 1,048,576"):
        window({"x": torch.ones(1, 2, 3)})
    with pytest.raises(CorruptFileError, match="a text of at most 256"):
        forged(("aten.einsum.default", ["a" * 1000, [ref("x")]], {}))
    monkeypatch.setattr(program_module, "MAX_STEPS", 3)
    with pytest.raises(CorruptFileError, match="expected at most 3 steps, got 4"):
        forged(*[("aten.neg.default", [ref("x")], {})] * 4)


def test_deep_nesting_is_an_error() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    text = '{"inputs": {}, "weights": {}, "steps": [{"name": "a", "operator": "aten.cat.default", "args": %s}], "outputs": {}}'
    with pytest.raises(CorruptFileError):
        DenseProgram.from_json(text % deep, {})


def test_results_that_nobody_needs_any_more_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monolith.serve.program.FREE_BYTES", 2**22)
    steps = [("aten.neg.default", [ref("x" if number == 0 else number - 1)], {}) for number in range(300)]
    assert forged(*steps)({"x": torch.ones(2**16)})["y"].sum() == 2**16


def test_large_batches_of_ordinary_models_are_within_the_limits() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
            self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.mlp(x)
            seen, _ = self.attention(y.view(-1, 4, 64), y.view(-1, 4, 64), y.view(-1, 4, 64), need_weights=False)
            return y @ y.T, seen

    program = trace_program(Wide().eval(), {"x": torch.randn(8, 64)}, ["scores", "seen"])
    assert program({"x": torch.randn(4096, 64)})["scores"].shape == (4096, 4096)


def test_what_an_operator_consists_of_is_measured_too() -> None:
    _, work = measure(torch.ops.aten.linear.default, [torch.ones(8, 16), torch.ones(32, 16)], {})
    assert work >= 8 * 16 * 32
    with torch.inference_mode():
        assert measure(torch.ops.aten.linear.default, [torch.ones(8, 16), torch.ones(32, 16)], {})[1] == work
    operands = [torch.ones(256), torch.ones(256), torch.ones(256, 256)]
    hidden, _ = measure(torch.ops.aten.einsum.default, ["a,b,ab->", operands], {})
    assert hidden >= 256 * 256 * 4


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("aten.add.Tensor", [torch.ones(300, 1), torch.ones(200)]),
        ("aten.where.self", [torch.ones(5, 1, 1) > 0, torch.ones(7, 1), torch.ones(())]),
        ("aten.lerp.Tensor", [torch.ones(1), torch.ones(5), torch.ones(4, 1)]),
        ("aten.layer_norm.default", [torch.ones(30, 20), [20], torch.ones(20), torch.ones(20)]),
        ("aten.rms_norm.default", [torch.ones(30, 20), [20], torch.ones(20)]),
        ("aten.group_norm.default", [torch.ones(30, 20), 4, torch.ones(20), torch.ones(20)]),
        ("aten.cat.default", [[torch.ones(30, 20), torch.ones(5, 20)]]),
        ("aten.linear.default", [torch.ones(9, 8, 16), torch.ones(32, 16), torch.ones(32)]),
    ],
)
def test_what_is_known_of_an_operator_is_no_less_than_its_result(name: str, args: list[Any]) -> None:
    result = resolve(name)(*args)
    assert isinstance(result, Tensor)
    known = known_cost(name.split(".")[1], list(tensors_in(args)))
    assert known is not None
    assert known[0] >= result.nbytes
    assert known[1] >= result.numel()


def test_export_names_the_module_that_cannot_be_exported() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.ModuleList([nn.EmbeddingBag(10, 3)])

        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (self.bags[0](x),)

    with pytest.raises(
        InvalidArgumentError, match=r"^bags\.0 \(EmbeddingBag\) uses aten\.embedding_bag.*use other torch functions"
    ):
        trace_program(Tower(), {"x": torch.zeros(5, 2, dtype=torch.int64)}, ["y"])


def test_a_batch_is_not_changed_by_a_forward_that_works_in_place() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x.mul_(2).add_(1),)

    program = trace_program(InPlace(), {"x": torch.ones(5)}, ["y"])
    x = torch.ones(3)
    assert program({"x": x})["y"].tolist() == [3.0, 3.0, 3.0]
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_an_empty_dimension_is_not_cut_into_any_number_of_parts() -> None:
    program = forged(("aten.chunk.default", [ref("x"), 2**31], {}))
    with pytest.raises(InvalidArgumentError, match="at most 65,536 parts"):
        program({"x": torch.ones(0)})
