"""Danger: a stack of features that is not what they are one by one: other order, other rows, gradients of a neighbour."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from monolith import ConfigError
from monolith.features import Batch, Feature, Ragged
from monolith.nn import EmbeddingBagCollection
from monolith.serve import export_model, load
from monolith.table import Adagrad
from monolith.train import Head

OPTIMIZER = Adagrad(learning_rate=0.3)
SINGLE: Batch = {name: torch.tensor(ids) for name, ids in (("a", [1, 2, 1]), ("b", [1, 1, 3]), ("c", [2, 1, 2]))}
RAGGED: Batch = {
    "a": torch.tensor([1, 2, 1]),
    "b": Ragged.from_lists([[1, 2], [], [3]]),
    "c": Ragged.from_lists([[], [2, 2, 4], [1, 2]]),
}


def features(stack: str | None, fields: dict[str, dict[str, Any]]) -> list[Feature]:
    said = {} if stack is None else {"stack": stack}
    return [Feature(name=name, **{"optimizer": OPTIMIZER, "dim": 4, **own}, **said) for name, own in fields.items()]  # type: ignore[arg-type]


CASES = {
    "one table": {"a": {"slot": 1}, "b": {"slot": 2}, "c": {"slot": 3}},
    "one table with a bias": {name: {"slot": slot, "bias": True} for slot, name in enumerate("abc")},
    "pooled differently": {"a": {"slot": 1}, "b": {"slot": 2, "pooling": "mean"}, "c": {"slot": 3, "pooling": "sqrtn"}},
    "pooled alike": {name: {"slot": slot, "pooling": "mean"} for slot, name in enumerate("abc")},
    "tables of their own": {"a": {}, "b": {"bias": False}, "c": {}},
    "tables of their own with a bias": {name: {"bias": True} for name in "abc"},
    "two tables": {"a": {"slot": 1}, "b": {}, "c": {"slot": 3}},
}


@pytest.mark.parametrize("batch", [SINGLE, RAGGED], ids=["single ids", "ragged"])
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_a_stack_is_its_features_one_beside_the_other(fields: dict[str, dict[str, Any]], batch: Batch) -> None:
    apart, together = EmbeddingBagCollection(features(None, fields)), EmbeddingBagCollection(features("fields", fields))
    weight = torch.linspace(-1, 1, 3 * 3 * 4).reshape(3, 3, 4)
    endings = ["", ".bias"] if "bias" in fields["a"] and fields["a"]["bias"] else [""]
    for _ in range(2):
        one, all_ = apart(batch), together(batch)
        assert list(all_) == [f"fields{ending}" for ending in endings]
        for ending in endings:
            expected = torch.stack([one[name + ending] for name in "abc"], dim=1)  # type: ignore[arg-type]
            assert torch.equal(all_[f"fields{ending}"], expected)  # type: ignore[arg-type]
            (expected * weight[..., : expected.shape[2]]).sum().backward(retain_graph=True)
            (all_[f"fields{ending}"] * weight[..., : expected.shape[2]]).sum().backward(retain_graph=True)  # type: ignore[operator]
        apart.step()
        together.step()


def test_a_stack_in_one_table_is_a_view_of_the_lookup() -> None:
    out = EmbeddingBagCollection(features("fields", CASES["one table"]))(SINGLE)["fields"]
    assert isinstance(out, torch.Tensor)
    assert out.shape == (3, 3, 4)
    assert out.flatten(1).data_ptr() == out.data_ptr()


def test_a_stack_beside_other_features_and_of_one() -> None:
    both = [*features("fields", CASES["one table"]), Feature(name="d", dim=2), Feature(name="e", dim=2, stack="alone")]
    outputs = EmbeddingBagCollection(both)({**SINGLE, "d": SINGLE["a"], "e": SINGLE["a"]})
    assert {name: list(out.shape) for name, out in outputs.items()} == {  # type: ignore[union-attr]
        "fields": [3, 3, 4],
        "d": [3, 2],
        "alone": [3, 1, 2],
    }


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            [Feature(name="a", dim=4, stack="s"), Feature(name="b", dim=5, stack="s")],
            r"features\[1\] 'b': its dim \(5\) is not that of features\[0\] 'a' \(4\)",
        ),
        (
            [Feature(name="a", dim=4, stack="s"), Feature(name="b", dim=4, stack="s", bias=True)],
            r"features\[1\] 'b'.* give all a bias or none",
        ),
        (
            [Feature(name="a", dim=4, stack="s"), Feature(name="s", dim=4)],
            r"features\[1\]: the output 's' is already that of features\[0\]",
        ),
        ([Feature(name="a", dim=4, stack="a")], "stack: expected a name of its own, not that of the feature"),
    ],
)
def test_stacks_that_cannot_be(wrong: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match=message):
        EmbeddingBagCollection(wrong)


def test_sequences_are_not_stacked() -> None:
    with pytest.raises(ConfigError, match="stack: expected a pooled feature, not pooling 'none'"):
        Feature(name="a", dim=4, pooling="none", stack="s")


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(features("fields", CASES["one table with a bias"]))
        self.top = nn.Linear(12, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        outputs = self.embeddings(batch)
        top: torch.Tensor = self.top(outputs["fields"].flatten(1))  # type: ignore[union-attr]
        return top + outputs["fields.bias"].sum(dim=1)  # type: ignore[union-attr]


def test_an_exported_model_still_gets_its_stack(tmp_path: Path) -> None:
    model = Deep()
    folder = export_model(model, SINGLE, tmp_path, heads=[Head(name="ctr", kind="regression")])
    expected = model.eval()(SINGLE).detach().squeeze(1)
    torch.testing.assert_close(load(folder).predict(SINGLE)["ctr"].reshape(-1), expected)
