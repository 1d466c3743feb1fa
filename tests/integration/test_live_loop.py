"""Danger: the loop that users see first does not run, loses clicks between its parts, or starts over when it is started again."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from launched_job import Launch
from monolith.cli import main
from monolith.streams import open_stream
from monolith.streams.stream import Stream
from monolith.testing.mock_kafka import MockKafka
from monolith.testing.servers import free_ports

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """A copy of the examples, because the loop keeps its state next to its files."""
    return Path(shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("runs", "__pycache__")))


def test_the_files_for_kafka_fit_the_compose_file_and_those_without_a_broker() -> None:
    live = EXAMPLES / "live"
    compose, kafka, folders = (
        yaml.safe_load((live / name).read_text()) for name in ("kafka/compose.yaml", "kafka/online.yaml", "online.yaml")
    )
    ((host, published, inside),) = (port.split(":") for port in compose["services"]["kafka"]["ports"])
    # 9092 is what the image listens on, and localhost what it tells clients to connect to.
    assert (host, inside) == ("127.0.0.1", "9092")
    assert kafka["env"].pop("BROKERS") == f"localhost:{published}"
    assert kafka["env"] == folders["env"]
    assert kafka["folder"] == folders["folder"]
    made = [shlex.split(step["run"])[3:] for step in kafka["prepare"] if "stream create" in step["run"]]
    topics = [(url.removeprefix("kafka://${BROKERS}/"), options) for url, *options in made]
    there = [shlex.split(step["run"])[3:] for step in folders["prepare"] if "stream create" in step["run"]]
    assert topics == [(url.removeprefix("runs/live/"), options) for url, *options in there]
    join = yaml.safe_load((live / "join.yaml").read_text())
    for name, part in folders["parts"].items():
        other = kafka["parts"][name]
        # With the folder in place of the broker, each part runs the same command. The streams of the joiner are in its file.
        words = shlex.split(other["run"].replace("--then kafka://", "--then stream:kafka://"))
        words = [word.replace("kafka://${BROKERS}", "runs/live") for word in words]
        if name == "joiner":
            assert set(words[4::2]) == {
                f"{side}.stream={join[side]['stream']}" for side in ("impressions", "actions", "output")
            }
            words = words[:3]
        elif name == "site":
            at = words.index("--streams")
            assert words[at + 1] == "runs/live"
            del words[at : at + 2]
        assert words == shlex.split(part["run"])
        assert other.get("ends") == part.get("ends")


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


def world_secs(folder: Path) -> float:
    """Seconds that have passed in the made-up world."""
    return float(json.loads((folder / "world.json").read_text())["open_secs"])


def test_a_click_changes_answers_no_impression_is_lost_and_the_loop_continues(
    examples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = demo(examples, "--secs", "8", "--rate", "200")
    out, _ = first.communicate(timeout=400)
    assert first.returncode == 0, out
    assert "\x1b" not in out, "plain when it is not a terminal"
    *_, last = (line for line in out.splitlines() if "impressions" in line)
    assert re.search(
        r"a click is in the answers after [\d,]+ ms; AUC online 0\.\d+, frozen 0\.\d+, best 0\.\d+", last
    ), out
    assert out.count(last) == 1
    assert re.search(r"^page +http://127\.0\.0\.1:\d+/", out, re.MULTILINE), out
    folder = examples / "live" / "runs" / "live"
    report = (folder / "report.html").read_text()
    assert "A model that learns while it serves" in report

    passed = world_secs(folder)
    second = demo(examples, "--stay", "--rate", "200")
    assert second.stdout is not None
    with second.stdout as output:
        assert any("impressions" in line for line in output), "it is live again"
        second.send_signal(signal.SIGINT)
        rest = output.read()
    assert second.wait(60) == 0, rest
    assert "ending the parts: joiner, trainer, replica, site ..." in rest
    assert world_secs(folder) > passed > 0, "the made-up world goes on where it was"
    trainer = (folder / "logs" / "trainer.log").read_text()
    steps = [int(step) for step in re.findall(r"continuing from step (\d+) ", trainer)]
    assert len(steps) == 2
    assert steps[1] > steps[0], "the second loop goes on with what the first has learnt"
    exports = sorted((folder / "model" / "exported_models").iterdir(), key=lambda export: int(export.name))
    frozen = [json.loads((export / "signature.json").read_text())["step"] for export in exports]
    assert frozen == steps, "both models know the same when the site opens"

    monkeypatch.chdir(examples / "live")
    assert main(["join", "join.yaml", "--until-end"]) == 0  # windows that were open when the loop ended
    assert require_every_impression_once(open_stream("runs/live/impressions"), open_stream("runs/live/examples")) > 1000


@pytest.mark.slow  # its parts are tested on Kafka one by one, and its files are compared with those of the folder
def test_the_loop_runs_on_kafka_with_the_same_files(examples: Path) -> None:
    """The broker is the mock cluster of librdkafka, which speaks the real protocol."""
    folder = examples / "live"
    with MockKafka({"impressions": 2, "actions": 2, "examples": 2}) as kafka:
        environment = {
            **os.environ,
            "BROKERS": kafka.address,
            "SECS": "8",
            "RATE": "100",
            "HTTP_PORT": str(free_ports(1)[0]),
        }
        with closing(Launch(folder, "kafka/online.yaml", environment=environment)) as loop:
            code, errors = loop.end(400)
            assert code == 0, errors
            fresh = [json.loads(line)["fresh_ms"] for line in loop.lines("site") if line.startswith('{"report"')]
            assert fresh[-1] is not None, "a click has changed an answer"
        urls = {name: kafka.url(name) for name in ("impressions", "actions", "examples")}
        sets = [
            f"impressions.stream={urls['impressions']}",
            f"actions.stream={urls['actions']}",
            f"output.stream={urls['examples']}",
        ]
        options = [part for one in sets for part in ("--set", one)]
        done = subprocess.run(
            [sys.executable, "-m", "monolith.cli", "join", "join.yaml", "--until-end", *options],
            cwd=folder,
            check=False,
        )
        assert done.returncode == 0
        assert (
            require_every_impression_once(*(open_stream(kafka.url(name)) for name in ("impressions", "examples"))) > 500
        )
