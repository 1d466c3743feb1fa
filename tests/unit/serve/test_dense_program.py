"""Danger: a program that computes something else than the model, or a program file that can do more than arithmetic."""

from __future__ import annotations

import json
import math
import operator
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.serve.export import trace_program
from monolith.serve.operators import name_of, resolve
from monolith.serve.program import DenseProgram


class Everything(nn.Module):
    """Layers, buffers, constants, sizes, non-finite numbers, dtypes, lists, several outputs."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 4))
        self.register_buffer("offset", torch.tensor([0.5, -0.5, 1.0, 2.0]))
        self.plain = torch.arange(4.0)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            scale = x.abs().mean()
        y = self.mlp(x) * scale + self.offset + self.plain
        seen, _ = self.attention(y[:, None], x[:, None], x[:, None], need_weights=False)
        padded = torch.cat([y, x.new_zeros(x.shape[0], 2)], dim=1).reshape(x.shape[0] * 2, 3)
        hidden = y.masked_fill(ids[:, None] == 1, -math.inf).softmax(1)
        parts = torch.split(seen[:, 0], [1, 3], dim=1)
        return padded.view(-1, 6).sum(1), hidden, torch.einsum("bi,bj->b", *parts) + ids.to(torch.float64)


@pytest.fixture(scope="module")
def traced() -> tuple[Everything, DenseProgram]:
    model = Everything().eval()
    example = {"x": torch.randn(5, 4), "ids": torch.zeros(5, dtype=torch.int64)}
    return model, trace_program(model, example, ["a", "b", "c"])


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
def test_any_number_of_rows_gives_what_the_model_gives(traced: tuple[Everything, DenseProgram], rows: int) -> None:
    model, program = traced
    inputs = {"x": torch.randn(rows, 4), "ids": torch.randint(0, 1, (rows,))}
    loaded = DenseProgram.from_json(program.to_json(), program.weights)
    for run in (program, loaded):
        outputs = run(inputs)
        for name, expected in zip("abc", model(**inputs), strict=True):
            torch.testing.assert_close(outputs[name], expected, rtol=0, atol=1e-6)
            assert not outputs[name].requires_grad


def test_later_training_does_not_change_a_program(traced: tuple[Everything, DenseProgram]) -> None:
    model, program = traced
    inputs = {"x": torch.randn(3, 4), "ids": torch.zeros(3, dtype=torch.int64)}
    before = program(inputs)["a"]
    with torch.no_grad():
        model.offset.add_(1.0)
    assert torch.equal(program(inputs)["a"], before)
    with torch.no_grad():
        model.offset.sub_(1.0)


def test_inputs_that_are_not_read_are_not_asked_for() -> None:
    class First(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
            return (x + 1,)

    program = trace_program(First(), {"x": torch.ones(5), "y": torch.ones(5)}, ["out"])
    assert list(program.inputs) == ["x"]
    assert program({"x": torch.zeros(2)})["out"].tolist() == [1.0, 1.0]


def test_a_forward_that_fixes_the_rows_is_refused() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x.reshape(5, 1) + 1,)

    with pytest.raises(InvalidArgumentError, match="cannot be traced"):
        trace_program(Fixed(), {"x": torch.ones(5)}, ["out"])


def test_a_forward_that_changes_the_model_is_refused() -> None:
    class Counting(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> tuple[Tensor]:
            self.count.add_(1)
            return (x + self.count,)

    with pytest.raises(InvalidArgumentError, match="count"):
        trace_program(Counting(), {"x": torch.ones(5)}, ["out"])


def test_operators_of_others_are_refused_when_exporting() -> None:
    @torch.library.custom_op("monolith_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    @twice.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    class Custom(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (twice(x),)

    with pytest.raises(InvalidArgumentError, match="monolith_test"):
        trace_program(Custom(), {"x": torch.ones(5)}, ["out"])


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "operator.attrgetter",
        "operator.methodcaller",
        "torch.load",
        "torch.hub.load",
        "builtins.eval",
        "aten.from_file.default",
        "aten.from_file.out",
        "aten.add.__class__",
        "aten.__class__.__bases__",
        "aten.add",
        "aten.add.Tensor.extra",
        "aten.nothing.default",
        "prims.add.default",
        "",
    ],
)
def test_a_file_can_name_nothing_but_arithmetic(name: str) -> None:
    with pytest.raises(CorruptFileError, match="not allowed"):
        resolve(name)


def test_names_lead_back_to_their_operators() -> None:
    for name in ("aten.add.Tensor", "aten._softmax.default"):
        assert name_of(resolve(name)) == name
    for function, name in (
        (operator.mul, "operator.mul"),
        (math.ceil, "math.ceil"),
        (torch.sym_max, "torch.sym_max"),
        (operator.pow, "operator.pow"),
        (operator.getitem, "operator.getitem"),
    ):
        assert name_of(function) == name
    assert resolve("operator.mul")(3, 4) == 12


@pytest.mark.parametrize(
    "change",
    [
        lambda program: program.pop("steps"),
        lambda program: program["steps"].reverse(),
        lambda program: program["steps"][0].pop("args"),
        lambda program: program["steps"][0].update(operator="posix.system"),
        lambda program: program["weights"].update({"w": "not.there"}),
        lambda program: program["outputs"].update(a={"node": "nowhere"}),
        lambda program: program["steps"][0].update(args=[{"dtype": "load"}]),
        lambda program: program["steps"][0].update(args=[{"eval": "1"}]),
        lambda program: program["steps"][0].update(args=[{"node": "a", "float": "1"}]),
    ],
)
def test_a_changed_program_is_refused(traced: tuple[Everything, DenseProgram], change: object) -> None:
    program = json.loads(traced[1].to_json())
    change(program)  # type: ignore[operator]
    with pytest.raises(CorruptFileError):
        DenseProgram.from_json(json.dumps(program), traced[1].weights)


def test_there_is_no_pickle_and_no_eval_on_the_way_in() -> None:
    folder = Path(__file__).parents[3] / "src" / "monolith"
    sources = {path: path.read_text() for part in ("serve", "train") for path in (folder / part).rglob("*.py")}
    found = [
        f"{path.name}: {word}"
        for path, text in sources.items()
        for word in ("import pickle", r"torch\.load\(", r"(?<![\w.`])(eval|exec)\(", r"export\.(load|save)\(")
        if re.search(word, text)
    ]
    assert found == []
