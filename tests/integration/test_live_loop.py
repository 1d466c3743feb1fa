"""Danger: the loop that users see first does not run, loses clicks between its parts, or starts over when it is started again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from monolith.cli import main
from monolith.streams import open_stream
from monolith.streams.stream import Stream

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """A copy of the examples, because the loop keeps its state next to its files."""
    return Path(shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("runs", "__pycache__")))


def keys_of(stream: Stream) -> Counter[bytes | None]:
    """How often each key is in a stream."""
    keys: Counter[bytes | None] = Counter()
    with stream.reader() as reader:
        reader.assign(dict.fromkeys(stream.partitions(), "start"))
        ends = reader.ends()
        at = dict.fromkeys(ends, 0)
        while any(at[partition] < end for partition, end in ends.items()):
            for records in reader.poll(10_000, 1.0):
                keys.update(records.keys)
                at[records.partition] = records.next_offset
    return keys


def require_every_impression_once(impressions: Stream, examples: Stream) -> int:
    shown, joined = keys_of(impressions), keys_of(examples)
    assert set(shown.values()) == {1}
    assert joined == shown
    return len(shown)


def demo(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "06_live.py", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )


def test_a_click_changes_answers_no_impression_is_lost_and_the_loop_continues(
    examples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = demo(examples, "--secs", "8", "--rate", "200")
    out, _ = first.communicate(timeout=400)
    assert first.returncode == 0, out
    assert "\x1b" not in out, "plain when it is not a terminal"
    last = out.splitlines()[-2]
    assert re.search(
        r"a click is in the answers after [\d,]+ ms; AUC online 0\.\d+, frozen 0\.\d+, best 0\.\d+", last
    ), out
    report = (examples / "live" / "runs" / "live" / "report.html").read_text()
    assert "A model that learns while it serves" in report

    second = demo(examples, "--stay", "--rate", "200")
    assert second.stdout is not None
    with second.stdout as output:
        assert any("impressions" in line for line in output), "it is live again"
        second.send_signal(signal.SIGINT)
        rest = output.read()
    assert second.wait(60) == 0, rest
    trainer = (examples / "live" / "runs" / "live" / "logs" / "trainer.log").read_text()
    steps = [int(step) for step in re.findall(r"continuing from step (\d+) ", trainer)]
    assert len(steps) == 2
    assert steps[1] > steps[0], "the second loop goes on with what the first has learnt"

    monkeypatch.chdir(examples / "live")
    assert main(["join", "join.yaml", "--until-end"]) == 0  # windows that were open when the loop ended
    assert require_every_impression_once(open_stream("runs/live/impressions"), open_stream("runs/live/examples")) > 1000
