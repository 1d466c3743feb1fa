"""Danger: an expression in a config file runs code, or is evaluated wrongly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batch_rows import random_batch, to_rows
from monolith.data.transforms import FilterByExpression
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features import Batch, Ragged


@pytest.fixture(params=[0, 1, 300])
def batch(request: pytest.FixtureRequest) -> Batch:
    return random_batch(np.random.default_rng(19), request.param)


SAME_IN_PYTHON = [
    "label > 0",
    "label > 0 and req_time < 50",
    "label > 0 or req_time < 50 and chnid != 2",
    "not (label > 0 or req_time < 50)",
    "10 <= req_time < 50",
    "10 <= req_time < 50 != chnid",
    "chnid in [1, 3]",
    "chnid not in (1, 3)",
    "chnid in [0.5, 1]",
    "label in []",
    "req_time % 7 == 3",
    "(req_time + chnid * 2 - 1) / 4 > 10.5",
    "-label >= abs(chnid - 2)",
    "len(actions) >= 2",
    "len(actions) + len(ids) == chnid",
    "1e1 > req_time",
]


@pytest.mark.parametrize("text", SAME_IN_PYTHON)
def test_it_means_what_python_means(batch: Batch, text: str) -> None:
    # The oracle may use eval: these texts are written above.
    expected = [row for row in to_rows(batch) if eval(text, {"abs": abs, "len": len}, row)]
    assert to_rows(FilterByExpression(expression=text)(batch)) == expected


RAGGED = {
    "any(actions == 3)": lambda row: any(action == 3 for action in row["actions"]),
    "all(actions != 3)": lambda row: all(action != 3 for action in row["actions"]),
    "any(actions in [1, 2])": lambda row: any(action in (1, 2) for action in row["actions"]),
    "not any(1 <= ids < 3)": lambda row: not any(1 <= i < 3 for i in row["ids"]),
    "any(abs(ids - 3) == 2) and label >= 0": lambda row: any(abs(i - 3) == 2 for i in row["ids"]) and row["label"] >= 0,
    "any(-ids * 2 > -3)": lambda row: any(-i * 2 > -3 for i in row["ids"]),
}


@pytest.mark.parametrize("text", RAGGED)
def test_values_of_ragged_columns(batch: Batch, text: str) -> None:
    expected = [row for row in to_rows(batch) if RAGGED[text](row)]
    assert to_rows(FilterByExpression(expression=text)(batch)) == expected


NOT_IN_THE_LANGUAGE = [
    "__import__('os').system('true')",
    "label.__class__",
    "label[0] > 1",
    "(lambda: 1)()",
    "[x for x in label]",
    "label > 0 if chnid else chnid",
    "exec('1')",
    "print(label)",
    "any(actions, 3)",
    "any(actions, key=3)",
    "any(*actions)",
    "label == 'text'",
    "label == None",
    "label == True",
    "f'{label}'",
    "label ** 2 > 1",
    "label << 3 > 1",
    "label is 1",
    "label in chnid",
    "label > [1]",
    "(x := 3) > 1",
    "label; chnid",
    "label >",
    "",
    "label > 1j",
    "~label",
    "\x00",
    "(" * 500 + "label" + ")" * 500 + " > " + "-" * 500 + "1",
    "not " * 60 + "label > 0",
    "+".join(["1"] * 3000) + " > 1",
    "1 > " + "9" * 20_000,
]


@pytest.mark.parametrize("text", NOT_IN_THE_LANGUAGE, ids=range(len(NOT_IN_THE_LANGUAGE)))
def test_everything_else_is_refused_when_it_is_written(text: str) -> None:
    with pytest.raises(ConfigError, match="FilterByExpression"):
        FilterByExpression(expression=text)


NOT_OF_THIS_BATCH = {
    "labell > 0": "did you mean 'label'",
    "label": "a condition on each row",
    "label + 1": "a condition on each row",
    "label and chnid": "a condition on each row",
    "not label": "a condition on each row",
    "1 > 0": "a condition on each row",
    "any(label > 0)": "any is for Ragged",
    "len(label) > 0": "len is for Ragged",
    "actions > 0": "a condition on each row",
    "any(actions)": "a condition on each row",
    "any(actions == label)": "numbers only",
    "any(actions == ids)": "numbers only",
}


@pytest.mark.parametrize("text", NOT_OF_THIS_BATCH)
def test_what_does_not_fit_the_batch_says_so(text: str) -> None:
    batch = {
        "label": torch.ones(2),
        "chnid": torch.tensor([1, 2]),
        "actions": Ragged.from_lists([[1], []]),
        "ids": Ragged.from_lists([[1], [2]]),
    }
    with pytest.raises(InvalidArgumentError, match=NOT_OF_THIS_BATCH[text]):
        FilterByExpression(expression=text)(batch)
