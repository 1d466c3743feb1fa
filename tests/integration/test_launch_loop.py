"""Danger: an online loop of which processes stay behind, or that starts over what it has already prepared."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import yaml

from launched_job import Launch, is_alive
from real_servers import until

PART = """\
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("ended in order"), sys.exit(0)))
print("part", *sys.argv[1:])
time.sleep(600)
"""
LOOP = {
    "name": "try",
    "prepare": [{"run": "python prepare.py", "unless": "made"}],
    "parts": {
        "joiner": {"run": "python part.py --index {index} --count {count}", "count": 2},
        "replica": {"run": "python part.py", "wait_for": "export"},
        "world": {"run": "python world.py", "ends": True},
    },
}


def write(folder: Path) -> None:
    (folder / "part.py").write_text(PART)
    (folder / "prepare.py").write_text("print('prepared'); open('made', 'w').close()")
    # It ends when the test says so.
    (folder / "world.py").write_text("import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)")
    (folder / "loop.yaml").write_text(yaml.safe_dump(LOOP, sort_keys=False))


def test_a_loop_is_prepared_once_replaces_killed_parts_and_ends_with_its_driver(tmp_path: Path) -> None:
    write(tmp_path)
    with closing(Launch(tmp_path, "loop.yaml")) as job:
        until(lambda: job.lines("joiner 0") and job.lines("joiner 1"), seconds=60)
        assert job.lines("prepare 0") == ["prepared"]
        assert job.lines("joiner 1") == ["part --index 1 --count 2"]
        assert job.kinds("replica") == [], "it waits for the export"
        (tmp_path / "export").mkdir()
        until(lambda: job.lines("replica"), seconds=60)
        os.kill(job.pids("joiner 1")[0], signal.SIGKILL)
        until(lambda: len(job.lines("joiner 1")) == 2, seconds=60)
        (tmp_path / "go").touch()
        code, errors = job.end()
        assert code == 0, errors
        assert job.lines("joiner 0")[-1] == job.lines("replica")[-1] == "ended in order"
        assert not any(map(is_alive, job.all_pids()))
    with closing(Launch(tmp_path, "loop.yaml")) as again:
        assert again.end()[0] == 0
        assert again.lines("prepare 0") == []


def test_an_interrupt_ends_all_parts_in_order(tmp_path: Path) -> None:
    write(tmp_path)
    with closing(Launch(tmp_path, "loop.yaml")) as job:
        until(lambda: job.lines("joiner 0") and job.lines("joiner 1"), seconds=60)
        job.send(signal.SIGINT)
        code, _ = job.end()
        assert code == 130
        assert job.lines("joiner 0")[-1] == job.lines("joiner 1")[-1] == "ended in order"
        assert not any(map(is_alive, job.all_pids()))


def test_a_step_of_the_preparation_that_fails_is_told_and_no_part_starts(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "prepare.py").write_text("print('no history'); raise SystemExit(4)")
    with closing(Launch(tmp_path, "loop.yaml")) as job:
        code, errors = job.end()
        assert code == 1
        assert "python prepare.py: exit code 4" in errors
        assert "no history" in errors
        assert job.kinds("joiner 0") == []


def test_options_for_other_jobs_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with closing(Launch(tmp_path, "--ps", "2", "loop.yaml")) as job:
        code, errors = job.end()
        assert code == 2
        assert "the file says what runs" in errors
