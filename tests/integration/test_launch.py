"""Danger: a job on this machine that hangs, ends with the wrong code, loses what servers hold, or leaves processes behind.

That no role outlives a launcher that is killed is tried in test_launch_child_process.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import counting_worker
from launched_job import Launch, is_alive
from real_servers import until

Start = Callable[..., Launch]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def start(code: str, *arguments: str, script_arguments: tuple[str, ...] = ()) -> Launch:
            (tmp_path / "work.py").write_text(code)
            launch = Launch(tmp_path, *arguments, "work.py", *script_arguments)
            stack.callback(launch.close)
            return launch

        yield start


def test_servers_and_workers_work_and_end_although_a_server_is_killed_meanwhile(start: Start, tmp_path: Path) -> None:
    options = (
        "--ps",
        "2",
        "--workers",
        "2",
        "--restarts",
        "2",
        "--model-dir",
        "model",
    )
    job = start(Path(counting_worker.__file__).read_text(), *options, script_arguments=("6",))
    workers = ("worker 0", "worker 1")
    until(lambda: all("round 3" in job.lines(worker) for worker in workers), seconds=180)
    os.kill(job.pids("ps 1")[0], signal.SIGKILL)
    until(lambda: len(job.pids("ps 1")) == 2)
    (tmp_path / "go").touch()
    code, errors = job.end()
    assert code == 0, errors
    assert [job.lines(worker)[-1] for worker in workers] == ["counted 6.0 6.0"] * 2
    assert job.kinds("ps 0") == ["started", "ended"]
    assert job.kinds("ps 1") == ["started", "restarting", "started", "ended"]
    assert job.events[-1] == {"event": "over", "ok": True, "failed": None, "code": None, "stopped": None}
    assert not any(map(is_alive, job.all_pids()))
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        *("ps-0.log", "ps-1.log", "worker-0.log", "worker-1.log")
    }
    assert (tmp_path / "logs" / "worker-1.log").read_text().splitlines() == job.lines("worker 1")


def test_a_worker_that_fails_ends_the_job_with_its_last_lines(start: Start) -> None:
    job = start(
        "import os, sys, time\n"
        "if os.environ['MONOLITH_INDEX'] == '1': print('no data', sys.argv[1:]); sys.exit(3)\n"
        "time.sleep(600)",
        "--workers",
        "2",
        script_arguments=("--ps", "x"),
    )
    code, errors = job.end()
    assert code == 1
    assert "worker 1 failed: exit code 3" in errors
    assert "no data ['--ps', 'x']" in errors, "what follows the script is the script's"
    assert job.kinds("worker 0") == ["started", "ended"]
    assert not any(map(is_alive, job.all_pids()))


def test_an_interrupt_ends_workers_then_servers(start: Start) -> None:
    job = start(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))\n"
        "print('ready'); time.sleep(600)"
    )
    until(lambda: job.lines("worker 0") and any("listening" in line for line in job.lines("ps 0")), seconds=120)
    job.send(signal.SIGINT)
    code, _ = job.end()
    assert code == 130
    assert job.lines("worker 0") == ["ready", "saved"]
    ended = [event["role"] for event in job.events if event["event"] == "ended"]
    assert ended == ["worker 0", "ps 0"]
    assert not any(map(is_alive, job.all_pids()))
