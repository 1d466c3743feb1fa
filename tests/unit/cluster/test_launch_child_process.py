"""Danger: a role that outlives its launcher, whose output is lost, or that cannot be ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from monolith.cluster.launch import JobRoles
from monolith.cluster.launch.local import ChildProcess, LocalRoles
from monolith.errors import StorageError
from real_servers import until

WAIT = 60.0


class Started:
    """Starts Python code as children of the test and ends what is left."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "logs" / "worker-0.log"
        self.lines: list[str] = []
        self.children: list[ChildProcess] = []

    def __call__(self, code: str, **environment: str) -> ChildProcess:
        child = ChildProcess(
            [sys.executable, "-S", "-c", code], log=self.log, environment=environment, on_line=self.lines.append
        )
        self.children.append(child)
        return child


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Started]:
    started = Started(tmp_path)
    yield started
    for child in started.children:
        child.kill()


def is_alive(pid: int) -> bool:
    try:
        # A process that nobody has reaped is dead all the same.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_output_goes_to_the_log_as_it_is_and_on_line_by_line(start: Started) -> None:
    child = start("import sys; print('one'); print('two', file=sys.stderr); sys.stdout.write('half')")
    assert child.wait(WAIT) == 0
    assert start.lines == ["one", "two", "half"]
    assert start.log.read_bytes() == b"one\ntwo\nhalf"
    assert start("print('again')").wait(WAIT) == 0
    assert start.log.read_bytes() == b"one\ntwo\nhalfagain\n"


def test_lines_come_while_it_runs_without_the_script_flushing(start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    child = start("import time; print('here'); time.sleep(600)")
    until(lambda: start.lines == ["here"])
    assert child.poll() is None


def test_the_last_lines_are_all_there_when_the_exit_code_is(tmp_path: Path) -> None:
    def hear_late(line: str) -> None:
        until(lambda: not is_alive(child.pid or 0))
        time.sleep(0.001)  # without waiting for the lines, the code would come before most of them

    child = ChildProcess(
        [sys.executable, "-S", "-c", "for i in range(500): print(i)\nraise SystemExit(3)"],
        log=tmp_path / "log",
        on_line=hear_late,
    )
    until(lambda: child.poll() is not None)
    assert child.poll() == 3
    assert child.last_lines == [str(i) for i in range(480, 500)]


def test_a_role_that_closes_its_output_lives_on(start: Started) -> None:
    child = start("import os, time; print('closing'); os.close(1); os.close(2); time.sleep(1); os._exit(7)")
    until(lambda: child.poll() is not None)
    assert child.poll() == 7


def test_the_environment_is_added_to_ours(start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOLITH_INDEX", "9")
    monkeypatch.setenv("KEPT", "yes")
    start("import os; print(os.environ['MONOLITH_INDEX'], os.environ['KEPT'])", MONOLITH_INDEX="1").wait(WAIT)
    assert start.lines == ["1 yes"]


def test_asked_to_end_it_may_take_its_time_and_choose_its_code(start: Started) -> None:
    child = start(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saving'), sys.exit(5)))\n"
        "print('ready'); time.sleep(600)"
    )
    until(lambda: start.lines == ["ready"])
    child.ask_to_end()
    assert child.wait(WAIT) == 5
    assert start.lines == ["ready", "saving"]


def test_an_interrupt_at_the_terminal_does_not_reach_it(start: Started) -> None:
    child = start("print('ready'); import time; time.sleep(600)")
    until(lambda: start.lines == ["ready"])
    assert child.pid is not None
    assert os.getpgid(child.pid) != os.getpgid(0)


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_what_it_started_ends_with_it(start: Started, how: str) -> None:
    child = start(
        "import subprocess, sys, time\n"
        "inner = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
        f"print(inner.pid); time.sleep({600 if how == 'killed' else 0})"
    )
    until(lambda: start.lines)
    if how == "killed":
        child.kill()
    until(lambda: child.poll() is not None)
    until(lambda: not is_alive(int(start.lines[0])))


def test_a_command_that_does_not_exist_says_so_and_fails(start: Started, tmp_path: Path) -> None:
    child = ChildProcess(["/no/such/program"], log=tmp_path / "log")
    assert child.wait(WAIT) == 127
    assert child.last_lines == ["cannot run /no/such/program: No such file or directory"]


def test_a_log_that_cannot_be_written_is_an_error_of_the_launcher(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        ChildProcess(["true"], log=tmp_path / "file" / "log")


def test_signals_after_the_end_reach_nobody(start: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    child = start("")
    assert child.wait(WAIT) == 0
    sent: list[tuple[int, int]] = []  # to a number that may be someone else's by now
    for call in ("kill", "killpg"):
        monkeypatch.setattr(os, call, lambda pid, number: sent.append((pid, number)))
    child.ask_to_end()
    child.kill()
    assert child.poll() == 0
    assert sent == []


def test_a_launcher_that_is_killed_leaves_nobody_behind(tmp_path: Path) -> None:
    launcher = (
        "import sys, time; from pathlib import Path\n"
        "from monolith.cluster.launch.local import ChildProcess\n"
        "child = ChildProcess([sys.executable, '-S', '-c', 'import time; time.sleep(600)'], log=Path('log'))\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        pid = int(process.stdout.readline())
    assert is_alive(pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not is_alive(pid))


def test_logs_that_cannot_be_written_are_an_error_that_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    job = JobRoles(num_ps=0, num_workers=1, uuid="try", worker_args=("-c", "pass"))
    roles = LocalRoles(job, tmp_path / "run" / "logs")
    with pytest.raises(StorageError, match=r"run/logs/discovery-try: cannot make the folder for logs: Not a directory"):
        roles.start(job.roles[0])
