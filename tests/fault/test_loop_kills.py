"""Danger: parts of an online loop die at random moments, and an impression is lost, trained twice, or has the wrong label, or the
replica answers something else than what was trained.

`MONOLITH_CAMPAIGN_KILLS=200 pytest -m slow tests/fault/test_loop_kills.py` is the long form: 50 of each of the four parts.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import loop_site
from launched_job import Launch, is_alive
from loop_site import FILES, PARTITIONS, is_clicked
from monolith.errors import MonolithError
from monolith.serve import Client
from monolith.streams import open_stream
from monolith.testing.servers import free_ports
from real_servers import until

SLOW_KILLS = int(os.environ.get("MONOLITH_CAMPAIGN_KILLS", "40"))
ROLES = ("site", "joiner", "trainer", "replica")


class Loop:
    """The loop as processes that `monolith launch` starts again."""

    def __init__(self, folder: Path, impressions: int) -> None:
        for name, text in FILES.items():
            (folder / name).write_text(text)
        for name in ("impressions", "actions", "examples"):
            open_stream(folder / name, partitions=PARTITIONS)
        pq.write_table(pa.table({"id": [10**9], "label": pa.array([0.0], pa.float32())}), folder / "history.parquet")
        site = Path(loop_site.__file__)
        port = free_ports(1)[0]
        environment = {
            **{name: text for name, text in os.environ.items() if not name.startswith("MONOLITH_")},
            "PYTHONPATH": str(site.parent),
            "OMP_NUM_THREADS": "1",
            "HTTP_PORT": str(port),
            "SITE": str(site),
            "IMPRESSIONS": str(impressions),
        }
        soon = '{"backoff_secs": 0.1, "max_backoff_secs": 0.1}'
        options = ("--restarts", "10000", "--liveness", soon, "--grace", "60")
        self.launch = Launch(folder, *options, "loop.yaml", environment=environment)
        self.folder, self.client = folder, Client(f"127.0.0.1:{port}", timeout=10.0)

    def close(self) -> None:
        self.client.close()
        self.launch.close()

    def running(self, role: str) -> int | None:
        """The process of a part, if it is alive."""
        pids = self.launch.pids(role)
        return pids[-1] if pids and is_alive(pids[-1]) else None

    def hurt(self, draw: random.Random) -> None:
        """Kill or stop one of the parts."""
        pid = self.running(draw.choice(ROLES))
        if pid is None:
            return  # it was hurt before, and is not back yet
        if draw.random() < 0.25:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(draw.uniform(0.05, 0.5))
            os.kill(pid, signal.SIGCONT)
        else:
            os.kill(pid, signal.SIGKILL)

    def counts(self, numbers: np.ndarray) -> np.ndarray | None:
        """How often the replica says that each impression was trained. None while it does not answer."""
        try:
            chances = self.client.infer({"id": numbers})["count"].astype(np.float64)
        except MonolithError:
            return None
        return np.round(np.log(chances / (1 - chances)), 3)


def require_each_once(loop: Loop, kills: int, impressions: int, draw: random.Random) -> None:
    until(lambda: not loop.launch.is_running or (loop.running("site") and loop.running("trainer")), seconds=240)
    assert loop.launch.is_running, loop.launch.end()
    for _ in range(kills):
        loop.hurt(draw)
        time.sleep(draw.uniform(0.0, 2.0))
    until(lambda: (loop.folder / "written").exists(), seconds=240)
    numbers = np.arange(impressions)
    expected = np.array([2.0 if is_clicked(number) else 1.0 for number in numbers.tolist()])
    found: list[np.ndarray | None] = [None]

    def is_settled() -> bool:
        found[0] = loop.counts(numbers)
        return found[0] is not None and bool((found[0] >= expected).all())

    try:
        until(is_settled, seconds=240)
    except AssertionError:
        assert found[0] is not None, "the replica does not answer"
        np.testing.assert_array_equal(found[0], expected)
    # Were one of them trained twice, that would be seen now, or when what is left has been trained.
    time.sleep(1.0)
    np.testing.assert_array_equal(loop.counts(numbers), expected)


def test_each_impression_counts_once_although_parts_are_killed(tmp_path: Path) -> None:
    with closing(Loop(tmp_path, impressions=1500)) as loop:
        require_each_once(loop, 8, 1500, random.Random(1))


@pytest.mark.slow
def test_each_impression_counts_once_although_parts_are_killed_very_often(tmp_path: Path) -> None:
    impressions = 100 * SLOW_KILLS
    with closing(Loop(tmp_path, impressions=impressions)) as loop:
        require_each_once(loop, SLOW_KILLS, impressions, random.Random(2))
