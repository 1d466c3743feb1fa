"""Danger: a role that is stopped or hangs and is never replaced; one that works and is killed because it counts as hung."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from monolith.cluster.launch.local import ChildProcess
from monolith.cluster.launch.reporting import Pulse, beating
from monolith.exit_codes import HEARTBEAT_VARIABLE
from real_servers import until

BEATING = "from monolith.cluster.launch.reporting import beating; import time\nwith beating(0.02): print('on'); time.sleep(600)"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pulse(clock: Clock) -> Iterator[Pulse]:
    made = Pulse(clock=clock)
    yield made
    made.close()


def test_silence_is_counted_from_the_last_heartbeat(pulse: Pulse, clock: Clock) -> None:
    with beating(600.0, {HEARTBEAT_VARIABLE: pulse.variable}):
        until(lambda: pulse.silence(os.getpid()) == 0.0 and pulse._last is not None)
        clock.now += 7
        assert pulse.silence(os.getpid()) == 7.0
    assert pulse.silence(os.getpid()) == 0.0, "behind the block it is not expected to send any"
    clock.now += 1000
    assert pulse.silence(os.getpid()) == 0.0


def test_a_role_that_never_sends_one_does_not_hang(pulse: Pulse, clock: Clock) -> None:
    clock.now += 1e6
    assert pulse.silence(os.getpid()) == 0.0


def test_a_stopped_process_is_noticed_before_its_first_heartbeat(pulse: Pulse, clock: Clock) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    try:
        assert pulse.silence(process.pid) == 0.0
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert pulse.silence(process.pid) == 0.0
        clock.now += 9
        assert pulse.silence(process.pid) == 9.0
        process.send_signal(signal.SIGCONT)
        until(lambda: pulse.silence(process.pid) == 0.0)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("variable", ["", "x", "0", "999999:1", "{other}"])
def test_nothing_is_written_into_a_file_that_is_not_the_pipe(variable: str, tmp_path: Path) -> None:
    """A process that a role starts has the variable, and under the same number perhaps a file of its own."""
    with (
        (tmp_path / "rows").open("w") as other,
        beating(0.001, {HEARTBEAT_VARIABLE: variable.format(other=f"{other.fileno()}:7")}),
    ):
        assert not [thread for thread in threading.enumerate() if thread.name == "monolith-launch-beat"]
    assert (tmp_path / "rows").read_text() == ""


def test_a_child_beats_until_it_is_stopped(tmp_path: Path) -> None:
    child = ChildProcess([sys.executable, "-c", BEATING], log=tmp_path / "log")
    try:
        until(lambda: child.last_lines == ["on"], seconds=60)
        until(lambda: child._pulse._last is None or child.silence < 0.5)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        until(lambda: child.silence > 0.5)
    finally:
        child.kill()
    assert child.silence == 0.0
    assert child.poll() == -9
