"""Danger: a page of the documentation whose code does not run, or prints something else than the page says.

Blocks of a page are run in order, in one folder and one namespace. `python name` and `yaml name` are files to write; a `text`
block is what the blocks before it printed, up to the numbers in it; lines of `console` that begin with `$ monolith` are run,
and what they print is not compared.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from monolith.cli import main

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def without_numbers(text: str) -> str:
    """The words and signs of a text; lists of numbers of any length look alike, and columns may be wider."""
    marked = re.sub(r"-?\d[\d,]*(\.\d+)?(e-?\d+)?", "#", text)
    return re.sub(r" +", " ", re.sub(r"#(, #)+", "#, ...", marked)).strip()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Layers this small only lose by threads, and a lot where other tests run beside this one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "page",
    [
        "tutorial",
        "guide-checkpoints",
        "guide-cluster",
        "guide-data",
        "guide-data-service",
        "guide-import-export",
        "guide-launch",
        "guide-log",
        "guide-parameter-servers",
        "guide-training",
    ],
)
def test_the_page_does_what_it_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    known = set(sys.modules)
    namespace: dict[str, object] = {"__name__": "__page__"}
    blocks = BLOCK.findall((DOCS / f"{page}.md").read_text())
    assert len(blocks) > 5
    try:
        for language, name, code in blocks:
            if name:
                (tmp_path / name).write_text(code)
            elif language == "python":
                exec(compile(code, f"{page}.md", "exec"), namespace)
            elif language == "console":
                for command in re.findall(r"^\$ monolith (.*)", code, re.MULTILINE):
                    assert main(shlex.split(command)) == 0, capsys.readouterr().err
                capsys.readouterr()
            elif language == "text":
                assert without_numbers(capsys.readouterr().out) == without_numbers(code)
            else:
                raise AssertionError(f"{page}.md: nobody knows how to run a block of {language}")
    finally:
        for module in [name for name in set(sys.modules) - known if (tmp_path / f"{name}.py").exists()]:
            del sys.modules[module]
