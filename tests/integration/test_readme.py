"""Danger: a README whose example does not run, whose commands do not exist, or whose links lead nowhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (ROOT, ROOT / "docs", ROOT / "benchmarks")
    for path in folder.glob("*.md")
)


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    run = subprocess.run([sys.executable, "-W", "error", "-c", example], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    loss = re.fullmatch(r"loss (0\.\d+) with 4,096 rows\n", run.stdout)
    assert loss, run.stdout
    assert float(loss[1]) < 0.3, "it trains: ln 2 = 0.693 is what guessing gives"


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_named_in_a_page_exists(page: str) -> None:
    named = set(re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)", " ".join(code_of((ROOT / page).read_text()))))
    assert named <= targets()


@pytest.mark.parametrize("page", PAGES)
def test_every_link_to_a_file_leads_to_one(page: str) -> None:
    links = re.findall(r"\]\((?!\w+:)([^)#]+)", (ROOT / page).read_text())
    missing = [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    assert not missing


def code_of(markdown: str) -> list[str]:
    """What the page shows as code: fenced, indented or between backticks."""
    return re.findall(r"```.*?```|^    [^\n]*|`[^`\n]+`", markdown, re.DOTALL | re.MULTILINE)
