"""Danger: a command that needs no model, or the help, makes a person wait for torch. It takes seconds on a small machine."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module

import pytest
import typer

from monolith.cli import _VERBS

VERBS = "launch ps probe rebalance dispatcher data-worker join stream serve serve-shard env"
WITHOUT_TORCH = [["--help"], ["--version"], ["trian"], *([verb, "--help"] for verb in VERBS.split())]
"""The verbs that are left out read tables, checkpoints or models."""

PROBE = """
import sys
from monolith.cli import main
main({arguments!r})
heavy = [name for name in ("torch", "pyarrow", "numpy", "pydantic") if name in sys.modules]
sys.exit(f"imported {{', '.join(heavy)}}" if "torch" in heavy or ({arguments!r}[0].startswith("--") and heavy) else 0)
"""


@pytest.mark.parametrize("arguments", WITHOUT_TORCH, ids=" ".join)
def test_what_needs_no_model_does_not_import_torch(arguments: list[str]) -> None:
    script = PROBE.format(arguments=arguments)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-500:]


@pytest.mark.parametrize("name", _VERBS)
def test_the_list_of_verbs_says_what_the_help_of_each_begins_with(name: str) -> None:
    place, summary = _VERBS[name]
    module, _, function = place.partition(":")
    verb = getattr(import_module(f"monolith.cli.{module}"), function or name.replace("-", "_"))
    text = verb.info.help if isinstance(verb, typer.Typer) else inspect.getdoc(verb)
    assert isinstance(text, str)
    assert " ".join(text.split()).startswith(summary)
