"""Danger: a prediction with some old and some new weights, or with weights that silently do not follow the model."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from monolith.errors import InvalidArgumentError
from monolith.features import Batch, Feature
from monolith.nn import EmbeddingBagCollection
from monolith.nn.heads import Head
from monolith.serve import Predictor, export_model, load
from monolith.serve.export import trace_program


class Deep(nn.Module):
    """A submodule named as the wrapper that exports a model, a buffer, a tied weight and one that is not used to predict."""

    heads = (Head(name="out", kind="regression"),)

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection([Feature(name="item", dim=4)])
        self.model = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.model.weight
        self.auxiliary = nn.Linear(4, 1)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        return self.last(self.norm(self.model(self.embeddings(batch)["item"]))).sum(1) + torch.tensor(0.25)


BATCH: Batch = {"item": torch.arange(5)}


@pytest.fixture
def model() -> Deep:
    torch.manual_seed(0)
    model = Deep().eval()
    model.embeddings.store.assign("item", torch.arange(5), torch.randn(5, 4))
    return model


@pytest.fixture
def predictor(model: Deep, tmp_path: Path) -> Predictor:
    return load(export_model(model, BATCH, tmp_path, heads=model.heads))


def changed(model: Deep) -> dict[str, Tensor]:
    with torch.no_grad():
        for tensor in (*model.parameters(), model.norm.running_mean, model.norm.running_var):
            assert tensor is not None
            tensor.mul_(0.7).add_(0.1)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:state_dict")
def test_the_state_dict_of_the_model_is_what_it_takes(model: Deep, predictor: Predictor) -> None:
    for _ in range(3):
        with torch.no_grad():
            expected = model(BATCH)
        assert torch.equal(predictor.predict(BATCH)["out"], expected)
        state = changed(model)
        with pytest.raises(InvalidArgumentError, match="has no such weight"):
            predictor.set_weights(state)
        assert torch.equal(predictor.predict(BATCH)["out"], expected)  # nothing was replaced
        predictor.set_weights(state, ignore_unknown=True)
    assert {name for name in predictor.weights if name not in state} == {"constant/model.lifted_tensor_0"}


def test_values_are_copied_and_those_left_out_stay(predictor: Predictor) -> None:
    bias = torch.zeros(4)
    before = {name: tensor.clone() for name, tensor in predictor.weights.items()}
    predictor.set_weights({"last.bias": bias})
    answer = predictor.predict(BATCH)["out"]
    bias.fill_(9.0)
    assert torch.equal(predictor.predict(BATCH)["out"], answer)
    for name, tensor in predictor.weights.items():
        assert torch.equal(tensor, torch.zeros(4) if name == "last.bias" else before[name])


def test_weights_that_do_not_fit_are_refused(predictor: Predictor) -> None:
    before = predictor.predict(BATCH)["out"]
    wrong: list[tuple[dict[str, Tensor], str]] = [
        ({"last.bais": torch.zeros(4)}, r"weights\['last.bais'\]: .* did you mean 'last.bias'\?"),
        ({"last.bias": torch.zeros(5)}, r"expected torch.float32 \[4\], got torch.float32 \[5\]"),
        ({"last.bias": torch.zeros(4, dtype=torch.float64)}, r"got torch.float64 \[4\]"),
    ]
    for weights, message in wrong:
        with pytest.raises(InvalidArgumentError, match=message):
            predictor.set_weights({"norm.running_mean": torch.ones(4), **weights})
    assert torch.equal(predictor.predict(BATCH)["out"], before)


def test_weights_made_in_inference_mode_serve_elsewhere(predictor: Predictor) -> None:
    with torch.inference_mode():
        predictor.set_weights({"last.bias": torch.ones(4)})
    assert not predictor.weights["last.bias"].is_inference()
    predictor.predict(BATCH)


def test_a_prediction_has_only_old_or_only_new_weights() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(20)])

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return (torch.stack([x + weight for weight in self.weights]),)

    program = trace_program(Many(), {"x": torch.zeros(3)}, ["y"])
    names = [f"weights.{number}" for number in range(20)]
    done = threading.Event()

    def predict() -> set[int]:
        seen: set[int] = set()
        while not done.is_set():
            distinct = program({"x": torch.zeros(3)})["y"].unique()
            assert len(distinct) == 1
            seen.add(int(distinct))
        return seen

    with ThreadPoolExecutor(3) as pool:
        threads = [pool.submit(predict) for _ in range(3)]
        try:
            for version in range(1, 300):
                program.set_weights({name: torch.tensor(float(version)) for name in names})
        finally:
            done.set()
        seen = set.union(*(thread.result() for thread in threads))
    assert seen <= set(range(300))
    assert program({"x": torch.zeros(3)})["y"].unique().tolist() == [299.0]


class Cached(nn.Module):
    """Keeps a value that is derived from its weight: torch.export makes it a constant of the program."""

    def __init__(self, *, in_list: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))
        doubled = (self.weight * 2).detach()
        self.kept: Any = [doubled] if in_list else doubled
        self.positions = torch.arange(4)  # integers are not derived from weights

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        kept = self.kept[0] if isinstance(self.kept, list) else self.kept
        return (x * self.weight + kept + self.positions + torch.tensor([0.0, 0.5, 1.0, 1.5]),)


@pytest.mark.parametrize("in_list", [False, True])
def test_a_tensor_outside_of_the_state_dict_cannot_follow(in_list: bool) -> None:
    program = trace_program(Cached(in_list=in_list), {"x": torch.rand(3, 4)}, ["y"])
    assert len(program.unfollowed) == 1
    with pytest.raises(InvalidArgumentError, match=r"not in its state_dict.*cannot follow training"):
        program.set_weights({"weight": torch.ones(4)})
    read = type(program).from_json(program.to_json(), program.weights)
    assert read.unfollowed == program.unfollowed


class Values(nn.Module):
    """Needs a value of its weight while it is traced."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.how = how

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        match self.how:
            case "float":
                return (x * float(self.weight),)
            case "tolist":
                return (x * torch.tensor([self.weight.tolist()]),)
            case "numpy":
                return (x * torch.from_numpy(self.weight.detach().numpy()),)
            case _:
                return (x * self.weight.data,)


@pytest.mark.parametrize("how", ["float", "tolist", "numpy", "data"])
def test_no_value_of_a_weight_is_folded_into_a_program(how: str) -> None:
    with pytest.raises(InvalidArgumentError):
        trace_program(Values(how), {"x": torch.rand(3)}, ["y"])


def test_a_value_computed_in_forward_follows() -> None:
    class Lazy(nn.Module):
        """Keeps a norm between calls: while tracing it is computed, because there is none yet."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(4, 1))
            self.register_buffer("mask", torch.ones(4), persistent=False)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return (self.linear(x * self.mask),)

    module = Lazy().eval()
    program = trace_program(module, {"x": torch.rand(3, 4)}, ["y"])
    assert program.unfollowed == ()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
        program.set_weights(module.state_dict())
        x = torch.rand(2, 4)
        assert torch.equal(program({"x": x})["y"], module(x)[0])
