"""Danger: a README whose example does not run, whose commands do not exist, or whose links lead nowhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from monolith.cli import main

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (ROOT, ROOT / "docs", ROOT / "docs" / "internals", ROOT / "benchmarks")
    for path in folder.glob("*.md")
)
VERBS_WITH_VERBS = {"control", "log", "rollout", "stream"}


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_examples_run_one_after_the_other(tmp_path: Path) -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(examples) == 3
    check = "assert loss.item() < 0.5 * 2048, f'{loss.item() / 2048}: the plain loop does not train'"
    saved = "assert ModelCheckpoints('runs/loop', model, adam, source=stream).restore() == 50"
    script = "\n".join(["import torch", "torch.manual_seed(0)", examples[0], check, examples[1], saved, examples[2]])
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # layers this small only lose by more
    command = [sys.executable, "-W", "error", "-c", script]
    run = subprocess.run(command, cwd=tmp_path, env=one_thread, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    printed = re.fullmatch(
        r"step 120: AUC (0\.\d+) on 61,440 later impressions\n"
        r"predicted (0\.\d+) clicks per impression, seen (0\.\d+)\n",
        run.stdout,
    )
    assert printed, run.stdout
    auc, predicted, seen = map(float, printed.groups())
    assert auc > 0.6, "popularity and tastes can be learned: guessing gives 0.5"
    assert 0.5 < predicted / seen < 2


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_named_in_a_page_exists(page: str) -> None:
    named = set(re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)", " ".join(code_of((ROOT / page).read_text()))))
    assert named <= targets()


@pytest.mark.parametrize("page", PAGES)
def test_every_command_named_in_a_page_exists(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # help for narrow terminals cuts long names
    commands = re.findall(r"^(?:    |\$ )monolith (.*)", (ROOT / page).read_text(), re.MULTILINE)
    for verb, *words in map(str.split, commands):
        command = [verb, words[0]] if verb in VERBS_WITH_VERBS else [verb]
        assert main([*command, "--help"]) == 0, f"monolith {' '.join(command)}"
        options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        assert {word for word in words if word.startswith("--") and word != "--"} <= options, (
            f"monolith {' '.join(command)}"
        )


@pytest.mark.parametrize("page", PAGES)
def test_every_link_to_a_file_leads_to_one(page: str) -> None:
    links = re.findall(r"\]\((?!\w+:)([^)#]+)(?:#([^)]+))?", (ROOT / page).read_text())
    led_to = [((ROOT / page).parent / link, section) for link, section in links]
    assert [str(path) for path, _ in led_to if not path.exists()] == []
    assert [(str(path), section) for path, section in led_to if section and section not in sections(path)] == []


def sections(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them of its headings."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_of(markdown: str) -> list[str]:
    """What the page shows as code: fenced, indented or between backticks."""
    return re.findall(r"```.*?```|^    [^\n]*|`[^`\n]+`", markdown, re.DOTALL | re.MULTILINE)
