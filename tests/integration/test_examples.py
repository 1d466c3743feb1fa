"""Danger: examples are the first code a user copies. Each must run, stay short, and show what it says it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_at_most_150_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 150


def test_train_learns_from_arriving_ids_and_reloads_equal(tmp_path: Path) -> None:
    out = run("01_train.py", "--steps", "60", "--folder", str(tmp_path))
    rows = [int(line.split()[1].replace(",", "")) for line in out.splitlines()[1:11]]
    assert rows == sorted(set(rows)), "every report has more ids than the one before"
    found = re.search(r"AUC +(0\.\d+)", out)
    assert found
    assert float(found[1]) > 0.6
    assert "equal, bit for bit" in out
    assert (tmp_path / "clicks.table").exists()


def test_ffm_learns_and_its_export_agrees() -> None:
    out = run("ffm.py", "--steps", "10")
    before, after = map(float, re.findall(r"loss ([\d.]+) before, ([\d.]+) after", out)[0])
    assert after < 0.1 * before
    by_model, by_export = re.findall(r"(0\.\d+) by", out)
    assert by_model == by_export
