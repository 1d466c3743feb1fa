"""Danger: a replica that is cut off while a run of several processes ends lacks the last changes of some of them, and it must be
said if what they have saved cannot be read."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_follow_killed_run import launched, require_equal, untrained

from followed_tables import Cable, until
from monolith.follow import Writer
from monolith.serve.follow import RunWriters, TrainingFollower


class CutRun(RunWriters):
    """A run at the other end of a cable."""

    def __init__(self, folder: Path, cable: Cable) -> None:
        super().__init__(str(folder))
        self._cable = cable

    def writers(self) -> list[Writer]:
        return [self._cable.through(one) for one in super().writers()]

    def server(self, address: str) -> Writer:
        return self._cable.through(super().server(address))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--ranks", "2"], id="ranks", marks=pytest.mark.slow),
        pytest.param(["--workers", "2", "--ps", "2"], id="servers"),
    ],
)
def test_a_replica_has_the_last_changes_of_all_processes(
    tmp_path: Path, options: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHES", "60")
    folder, predictor, cable = tmp_path / "run", untrained(tmp_path / "export"), Cable()
    launcher = launched(folder, *options)
    try:
        follower = TrainingFollower.of_run(predictor, CutRun(folder, cable), silent_secs=3600)
        try:
            assert follower.wait_until_read(240), follower.describe()
            until(lambda: follower.lag().step > 5)
            cable.cut.set()
            launcher.wait(timeout=240)
            assert launcher.returncode == 0, (tmp_path / "launch.log").read_text()[-3000:]
            # As on a machine that does not see the folder of the ranks or servers.
            hidden = (folder / "ps").rename(tmp_path / "elsewhere")
            assert follower.catch_up() is None
            assert str(folder / "ps") in follower.lag().missing
            hidden.rename(folder / "ps")
            assert follower.catch_up() is not None
            assert not follower.lag().missing
            require_equal(folder, predictor)
        finally:
            follower.close()
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
