"""Danger: a README whose example does not run, whose commands do not exist, or whose links lead nowhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from monolith.cli import main

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (ROOT, ROOT / "docs", ROOT / "docs" / "internals", ROOT / "benchmarks")
    for path in folder.glob("*.md")
)
README = (ROOT / "README.md").read_text()
VERBS_WITH_VERBS = {"control", "log", "rollout", "stream"}


def targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the README's script is."""
    made = tmp_path_factory.mktemp("readme")
    (script,) = re.findall(r"```python train\.py\n(.*?)```", README, re.DOTALL)
    (made / "train.py").write_text(script)
    return made


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """The folder after `python train.py`, whose output was what it should be."""
    assert "    python train.py\n" in README
    printed = output_of([sys.executable, "-W", "error", "train.py"], folder)
    found = re.fullmatch(r"step 120: AUC (0\.\d+)\n(runs/clicks/exported_models/\d+)\n", printed)
    assert found, printed
    assert float(found[1]) > 0.65, "popularity and tastes can be learned: guessing gives 0.5"
    assert (folder / found[2]).is_dir()
    return folder


def output_of(command: list[str], folder: Path) -> str:
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # layers this small only lose by more
    run = subprocess.run(command, cwd=folder, env=one_thread, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_the_script_continues_where_it_was(trained: Path) -> None:
    again = output_of([sys.executable, "-W", "error", "train.py"], trained)
    assert again.startswith("step 120: AUC 0."), "120 steps were made already"


@pytest.mark.parametrize("command", re.findall(r"^    monolith launch (.*?) *(?:#.*)?$", README, re.MULTILINE))
def test_the_same_script_runs_on_a_cluster_after_that(command: str, trained: Path) -> None:
    words = shlex.split(command)
    printed = output_of([sys.executable, "-m", "monolith.cli", "launch", *words], trained)
    steps = {"--workers": 120, "--ranks": 60}[next(word for word in words if word in ("--workers", "--ranks"))]
    assert len(re.findall(rf"\d \| step {steps}: AUC 0\.\d+", printed)) == 2, printed
    (run,) = [words[at + 1] for at, word in enumerate(words) if word == "--model-dir"]
    assert len(list((trained / run / "exported_models").glob("[0-9]*"))) == 1, "one process exports"


def test_the_request_is_answered_with_what_was_learnt(trained: Path) -> None:
    assert "    monolith serve --run runs/clicks\n" in README
    (request,) = re.findall(r"^\$ curl -s localhost:8000(\S+) -d '(.*?)'$", README, re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-m", "monolith.cli", "serve", "--run", "runs/clicks", "--http-port", "0", "--json"]
    with subprocess.Popen([*command, "--grpc-port", "0"], cwd=trained, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            address = re.search(r"127\.0\.0\.1:\d+", line)
            assert address, line
            asked = urllib.request.Request(f"http://{address[0]}{request[0]}", request[1].encode())
            with urllib.request.urlopen(asked, timeout=60) as answer:
                (output,) = json.load(answer)["outputs"]
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
    assert output["shape"][0] == 2
    assert all(0 < value < 1 for value in output["data"])


@pytest.mark.parametrize("program", ["collisions.py", "run.py"])
def test_the_commands_of_the_numbers_have_their_options(program: str) -> None:
    (command,) = re.findall(rf"^    python benchmarks/{program} ((?:.*\\\n)*[^#\n]*)", README, re.MULTILINE)
    asked = [sys.executable, str(ROOT / "benchmarks" / program), "--help"]
    shown = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    options = re.findall(r"--[a-z-]+", command)
    assert options
    assert [option for option in options if option not in shown] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_named_in_a_page_exists(page: str) -> None:
    named = set(re.findall(r"\bmake ([a-z]+(?:-[a-z0-9]+)*)", " ".join(code_of((ROOT / page).read_text()))))
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
