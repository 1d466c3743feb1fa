"""Danger: a page of the documentation whose code does not run, or prints something else than the page says.

Blocks of a page are run in order, in one folder and one namespace. `python name` and `yaml name` are files to write. A `text`
block is what the blocks before it printed: words and whole numbers exactly, other numbers to a few percent, since they depend
on the order of additions. Of a `text varies` block only the words are compared. Lines of `console` that begin with
`$ monolith` are run, and what they print is not compared.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from monolith.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


NUMBER = re.compile(r"-?\d(?:[\d,]*\d)?(?:\.\d+)?(?:e-?\d+)?")


def without_numbers(text: str) -> str:
    """The words and signs of a text; lists of numbers of any length look alike, and columns may be wider."""
    return re.sub(r" +", " ", re.sub(r"#(, #)+", "#, ...", NUMBER.sub("#", text))).strip()


def require_same_numbers(printed: str, page: str) -> None:
    """Whole numbers are equal, others agree to 3 percent or, near zero, to 0.003."""
    found, expected = (NUMBER.findall(text) for text in (printed, page))
    assert len(found) == len(expected), printed
    for one, other in zip(found, expected, strict=True):
        if "." in one or "e" in one:
            close = pytest.approx(float(other.replace(",", "")), rel=0.03, abs=0.003)
            assert float(one.replace(",", "")) == close, f"printed {one}, the page says {other}:\n{printed}"
        else:
            assert one == other, f"printed {one}, the page says {other}:\n{printed}"


@pytest.mark.parametrize(
    "page",
    [
        "tutorial",
        "from-monolith-tf",
        "from-nn-embedding",
        "from-tfra",
        "from-torchrec",
        "guide-accelerators",
        "guide-checkpoints",
        "guide-cluster",
        "guide-control",
        "guide-data",
        "guide-data-service",
        "guide-import-export",
        "guide-joiner",
        "guide-launch",
        "guide-log",
        "guide-models",
        "guide-parameter-servers",
        "guide-ranks",
        "guide-rollout",
        "guide-stream-source",
        "guide-streams",
        "guide-training",
        "operations-sizing",
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
    assert len(blocks) > 1
    try:
        for language, name, code in blocks:
            if language == "text":
                printed = capsys.readouterr().out
                assert without_numbers(printed) == without_numbers(code)
                if name != "varies":
                    require_same_numbers(printed, code)
            elif name:
                (tmp_path / name).write_text(code)
            elif language == "python":
                exec(compile(code, f"{page}.md", "exec"), namespace)
            elif language == "console":
                for command in re.findall(r"^\$ monolith (.*)", code, re.MULTILINE):
                    assert main(shlex.split(command)) == 0, capsys.readouterr().err
                capsys.readouterr()
            else:
                raise AssertionError(f"{page}.md: nobody knows how to run a block of {language}")
    finally:
        for module in [name for name in set(sys.modules) - known if (tmp_path / f"{name}.py").exists()]:
            del sys.modules[module]
