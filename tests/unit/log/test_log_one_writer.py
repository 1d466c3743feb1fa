"""Danger: two processes that write one log and give one number to two segments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from log_tables import new_table
from monolith import InvalidArgumentError, StorageError
from monolith.log import ChangeLog, LogReader

OTHER = (
    "import sys\n"
    "from monolith.log import ChangeLog\n"
    "log = ChangeLog(sys.argv[1], [])\n"
    "log.commit(step=1)\n"
    "print('open', flush=True)\n"
    "sys.stdin.read()\n"
)


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    first = ChangeLog(tmp_path, [])
    with pytest.raises(StorageError, match="another writer"):
        ChangeLog(tmp_path, [])
    first.close()
    ChangeLog(tmp_path, []).close()


def test_a_writer_that_is_no_longer_held_by_anyone_lets_go(tmp_path: Path) -> None:
    ChangeLog(tmp_path, [])
    ChangeLog(tmp_path, []).close()


def test_a_killed_process_lets_go(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(StorageError, match="another writer"):
            ChangeLog(tmp_path, [])
        assert [info.step for info in LogReader(tmp_path).segments()] == [1]
        other.send_signal(signal.SIGKILL)
        other.wait()
    with ChangeLog(tmp_path, []) as log:
        assert log.commit(step=2) == 2


FORKING = (
    "import os, signal, sys\n"
    "from monolith.log import ChangeLog\n"
    "log = ChangeLog(sys.argv[1], [])\n"
    "child = os.fork()\n"
    "if child == 0:\n"
    "    sys.stdin.read()\n"
    "    os._exit(0)\n"
    "print(child, flush=True)\n"
    "os.kill(os.getpid(), signal.SIGKILL)\n"
)


def test_children_of_a_killed_process_do_not_hold_the_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKING, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert parent.wait(timeout=60) == -signal.SIGKILL
        os.kill(child, 0)  # it is alive
        ChangeLog(tmp_path, []).close()


def test_a_forked_child_cannot_write_and_does_not_unlock(tmp_path: Path) -> None:
    script = FORKING.replace("sys.stdin.read()", "print(log.commit(step=1))").replace(
        "os.kill(", "sys.stdin.read() and ("
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        child = int(parent.stdout.readline())
        while "ForkedProcessError" not in (line := parent.stderr.readline()):
            assert line, "the child wrote to its parent's log"
        assert child > 0
        with pytest.raises(StorageError, match="another writer"):
            ChangeLog(tmp_path, [])
        parent.communicate()


def test_a_table_is_given_once(tmp_path: Path) -> None:
    table = new_table()
    for tables in ([table, table], {"a": table, "b": [table]}):
        with pytest.raises(InvalidArgumentError, match="each table once"):
            ChangeLog(tmp_path, tables)
