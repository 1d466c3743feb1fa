"""Danger: parts of an online loop die or hang at random moments, and an impression is lost, trained twice, or has the wrong
label, or the replica answers something else than what was trained.

Streams are in folders here. test_loop_network.py has a broker, and links that can be cut. The long form is a loop of `monolith
launch`: `MONOLITH_CAMPAIGN_KILLS=50 pytest -m slow tests/fault/test_loop_kills.py` kills and stops each part so often.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loop_parts import PARTS, Loop, require_each_once, require_trained_once

import loop_site
from launched_job import Launch, is_alive
from loop_site import FILES, PARTITIONS, end_event_time
from monolith.serve import Client
from monolith.streams import open_stream
from monolith.testing.servers import free_ports
from real_servers import until

_log = logging.getLogger(__name__)
SLOW_KILLS = int(os.environ.get("MONOLITH_CAMPAIGN_KILLS", "10"))


def faults(times: int, draw: random.Random) -> list[tuple[str, str]]:
    """Each part killed and stopped so often, in any order."""
    made = [(part, fault) for part in PARTS for fault in ("killed", "stopped")] * times
    draw.shuffle(made)
    return made


def test_each_impression_counts_once_although_parts_are_killed_and_stopped(tmp_path: Path) -> None:
    draw = random.Random(1)
    with ExitStack() as stack:
        require_each_once(Loop(tmp_path, stack), faults(2, draw), draw, pause=0.4)


class LaunchedLoop:
    """The loop as processes that `monolith launch` starts again."""

    def __init__(self, folder: Path) -> None:
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
        }
        soon = '{"backoff_secs": 0.1, "max_backoff_secs": 0.1}'
        options = ("--restarts", "10000", "--liveness", soon, "--grace", "60")
        self.launch = Launch(folder, *options, "loop.yaml", environment=environment)
        self.folder, self.client = folder, Client(f"127.0.0.1:{port}", timeout=10.0)
        self.faults: Counter[str] = Counter()
        """What was done, by part and fault."""
        self._killed: set[int] = set()

    def close(self) -> None:
        self.client.close()
        self.launch.close()

    def running(self, part: str) -> int | None:
        """The process of a part, if it is alive, was not killed a moment ago, and has said that it is at work.

        Else most faults would meet a process that imports its modules.
        """
        own = [event for event in self.launch.events.copy() if event.get("role") == part]
        begins = [number for number, event in enumerate(own) if event["event"] == "started"]
        if not begins or all(event["event"] != "line" for event in own[begins[-1] :]):
            return None
        pid: int = own[begins[-1]]["pid"]
        return pid if pid not in self._killed and is_alive(pid) else None

    def hurt(self, part: str, fault: str, draw: random.Random) -> None:
        until(lambda: self._hurt_what_runs(part, fault, draw.uniform(0.05, 0.5)), seconds=240)
        self.faults[f"{part} {fault}"] += 1

    def _hurt_what_runs(self, part: str, fault: str, seconds: float) -> bool:
        """Returns whether there was a process, which had not just ended by itself."""
        pid = self.running(part)
        if pid is None:
            return False
        try:
            if fault == "killed":
                os.kill(pid, signal.SIGKILL)
                self._killed.add(pid)
            else:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(seconds)
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return False
        return True

    def ended(self) -> Counter[str]:
        """How often each part has ended without being killed."""
        return Counter({part: len(self.launch.pids(part)) - 1 - self.faults[f"{part} killed"] for part in PARTS})


@pytest.mark.slow
def test_each_impression_counts_once_although_parts_are_killed_and_stopped_very_often(tmp_path: Path) -> None:
    draw = random.Random(3)
    with ExitStack() as stack:
        loop = Loop(tmp_path, stack)
        require_each_once(loop, faults(SLOW_KILLS, draw), draw, pause=0.9)
    _log.info("%s impressions; %s; %s", (tmp_path / "written").read_text(), dict(loop.faults), dict(loop.deaths))


@pytest.mark.slow
def test_a_launched_loop_counts_each_impression_once_although_parts_are_killed_and_stopped(tmp_path: Path) -> None:
    draw = random.Random(2)
    chosen = faults(SLOW_KILLS, draw)
    with closing(LaunchedLoop(tmp_path)) as loop:
        until(lambda: not loop.launch.is_running or (loop.running("site") and loop.running("trainer")), seconds=240)
        assert loop.launch.is_running, loop.launch.end()
        for part, fault in chosen:
            loop.hurt(part, fault, draw)
            time.sleep(draw.uniform(0.0, 2.0))
        (tmp_path / "enough").touch()
        until(lambda: (tmp_path / "written").exists(), seconds=240)
        end_event_time(tmp_path)
        loop.hurt("joiner", "killed", draw)
        written = int((tmp_path / "written").read_text())
        require_trained_once(loop.client, np.arange(written))
        _log.info(
            "%d impressions; %s; parts that ended by themselves: %s",
            written,
            dict(sorted(loop.faults.items())),
            dict(loop.ended()),
        )
