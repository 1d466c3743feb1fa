"""Danger: a joiner that cannot be watched, is killed by an ordinary stop, or takes a slip in its file for a default."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

from join_oracle import Acted, Shown, config_for, joined, labels_by_key, write_events, written
from monolith.cli import main

SHOWN = [Shown(f"k{n}", 1_000_000 + 1000 * n) for n in range(20)]
ACTED = [Acted(f"k{n}", 1_003_000 + 1000 * n, "click") for n in range(0, 20, 5)]


def job(folder: Path, **fields: object) -> str:
    path = folder / "join.yaml"
    path.write_text(yaml.safe_dump(json.loads(config_for(folder, **fields).model_dump_json())))
    return str(path)


def test_a_job_joins_until_the_end_and_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events(tmp_path, SHOWN, ACTED)
    assert main(["join", job(tmp_path), "--until-end", "--json"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["event"], last["impressions"], last["actions"], last["lag_records"]) == ("end", 20, 4, 0)
    assert (last["positives"], last["negatives"], last["bad_records"]) == (4, 16, 0)
    assert labels_by_key(written(tmp_path / "examples")) == joined(SHOWN, ACTED, config_for(tmp_path))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"window_sec": 5}, "unknown field; did you mean 'window_secs'"),
        ({"labels": []}, "labels"),
        ({"emit_on": ["like"]}, "emit_on: expected types that a label names"),
        ({"late": "dead_letter"}, "late: dead_letter needs `dead_letters`"),
        ({"sampling": {"rate": 0.0}}, "rate"),
    ],
)
def test_a_slip_in_the_file_is_an_error_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, object], says: str
) -> None:
    write_events(tmp_path, SHOWN, ACTED)
    path = Path(job(tmp_path))
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    assert main(["join", str(path), "--until-end"]) == 2
    assert says in capsys.readouterr().err


def test_a_job_can_be_scraped_and_ends_in_order_on_sigterm(tmp_path: Path) -> None:
    write_events(tmp_path, SHOWN, ACTED)
    command = [sys.executable, "-m", "monolith.cli", "join", job(tmp_path), "--json", "--metrics-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = json.loads(process.stdout.readline())["port"]
            while True:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=60) as answer:
                    if json.load(answer)["impressions"] == 20:
                        break
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                lines = answer.read().decode().splitlines()
            assert "monolith_join_impressions_total 20" in lines
            assert "monolith_join_lag_records 0" in lines
            process.send_signal(signal.SIGTERM)
            assert json.loads(process.stdout.read().splitlines()[-1])["event"] == "end"
            assert process.wait(60) == 0
        finally:
            process.kill()
    # A checkpoint was written: what was open is closed by the next one.
    assert main(["join", job(tmp_path), "--until-end"]) == 0
    assert labels_by_key(written(tmp_path / "examples")) == joined(SHOWN, ACTED, config_for(tmp_path))
