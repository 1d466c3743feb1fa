"""Danger: help that cuts the names of options, so that nobody can type them, or that lists options without effect."""

from __future__ import annotations

import itertools
import re

import pytest

from monolith.cli import _VERBS, main
from monolith.cli.job import RESTORE_FIELDS
from monolith.train import RunConfig

PAGES = [
    [],
    *([verb] for verb in _VERBS),
    *(["checkpoint", verb] for verb in ("list", "keep", "remove")),
    *(["log", verb] for verb in ("list", "follow", "history")),
    *(["stream", verb] for verb in ("create", "add-partitions", "list", "info", "read", "write")),
    *(["control", verb] for verb in ("status", "stop", "resume", "save", "end", "variables", "rows")),
]


def page(verb: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*verb, "--help"]) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("verb", PAGES, ids=" ".join)
def test_help_fits_80_columns_and_cuts_nothing(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = page(verb, capsys)
    usage, _, rest = text.partition("\n")
    assert usage.startswith(" ".join(["Usage: monolith", *verb]))
    assert "..." not in rest.replace("ARGUMENTS...", "")
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert "<bool>" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert re.findall(r"{[a-z]\w*}", usage) == []  # arguments are in capitals, as the text refers to them


def test_paragraphs_are_wrapped_for_the_terminal_and_not_as_they_are_in_the_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = page(["ps"], capsys).splitlines()
    start = next(i for i, line in enumerate(lines) if "holds tables" in line)
    paragraph = lines[start : lines.index("", start)]
    assert len(paragraph) > 2
    # Each line is full: the first word of the next one would not have fitted.
    assert all(len(a) + 1 + len(b.split()[0]) > 78 for a, b in itertools.pairwise(paragraph))


def options(text: str) -> set[str]:
    return set(re.findall(r"^  --([a-z-]+)", text, flags=re.MULTILINE))


@pytest.mark.parametrize("verb", ["evaluate", "predict", "export"])
def test_verbs_on_a_trained_model_list_what_they_use(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = options(page([verb], capsys))
    assert {field.replace("_", "-") for field in RESTORE_FIELDS} <= found
    assert found.isdisjoint({"save-checkpoints-secs", "epochs", "clip-norm", "resume-data", "log-flush-secs"})


def test_every_field_of_a_run_is_a_flag_of_training(capsys: pytest.CaptureFixture[str]) -> None:
    found = options(page(["train"], capsys))
    missing = [name for name in RunConfig.model_fields if name.replace("_", "-") not in found]
    assert missing == ["reload_alias_map", "table_alias_map"]  # maps are for files and --set


def test_an_option_of_training_is_unknown_to_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "cli_job:Model", "--epochs", "2"]) == 2
    assert "No such option" in capsys.readouterr().err
