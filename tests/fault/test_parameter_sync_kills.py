"""Danger: a target of parameter sync is killed or stopped while rows are pushed, and never has some of them again.

The oracle is the table that was trained: the target must have its rows, bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from jobs import sync_target

import followed_tables
from followed_tables import rows_of, table, train, until
from monolith.follow import Feed
from monolith.original import DiscoveryBackend
from monolith.original.parameter_sync_hook import ParameterSyncThread
from monolith.transport.calls import BasicCall
from monolith.transport.link import Link


class Target:
    """A target that is a process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        before = self.addresses()
        home = str(Path(followed_tables.__file__).parent)
        process = subprocess.Popen(
            [sys.executable, sync_target.__file__, str(self._folder / "targets"), str(self._folder / "rows.json")],
            env={**os.environ, "PYTHONPATH": home},
        )
        until(lambda: self.addresses() != before)
        return process

    def addresses(self) -> tuple[str, ...]:
        with DiscoveryBackend(f"file={self._folder / 'targets'}") as backend:
            return tuple(backend.get_sync_targets("ps_0")[1])

    def kill_and_restart(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process = self._started()

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.process.send_signal(signal.SIGSTOP)
        yield
        self.process.send_signal(signal.SIGCONT)

    def rows(self) -> dict[int, tuple[float, ...]]:
        """End the process and return what it had."""
        link = Link(self.addresses()[0], timeout=20)
        link.call(BasicCall.SHUTDOWN)
        link.close()
        assert self.process.wait(60) == 0
        found = json.loads((self._folder / "rows.json").read_text())
        return {int(id_): tuple(row) for id_, row in found.items()}


def test_a_target_that_is_killed_and_stopped_has_all_rows_in_the_end(tmp_path: Path) -> None:
    trained = table()
    with ExitStack() as stack:
        target = Target(tmp_path)
        stack.callback(target.process.kill)
        feed = Feed(lambda: {"item": trained}, every=0.005)
        stack.callback(feed.close)
        backend = stack.enter_context(DiscoveryBackend(f"file={tmp_path / 'targets'}"))
        thread = ParameterSyncThread(feed, backend, 0, refresh_interval=0.2)
        for number in range(300):
            train(trained, list(range(number, number + 50)), seed=number)
            if number % 7 == 3:
                trained.erase([number])
            if number in (60, 200):
                target.kill_and_restart()
                stack.callback(target.process.kill)
            if number == 130:
                with target.paused():
                    # Longer than a push may take: it is given up, and may be applied late.
                    train(trained, list(range(1000)), seed=1)
                    until(lambda: any(one.status_code for one in thread.last_result.responses))
        until(lambda: thread.config.targets[:] == list(target.addresses()))
        assert thread.close(), thread.last_result
        assert target.rows() == rows_of(trained)
        assert len(rows_of(trained)) > 900
