"""Danger: links between the parts of an online loop are cut, slow or reset, or a part or the broker is killed or stopped, and an
impression is lost, trained twice, or has the wrong label, or the replica answers something else than what was trained.

`MONOLITH_CAMPAIGN_FAULTS=50 pytest -m slow tests/fault/test_loop_network.py` does each fault to each part so often.
"""

from __future__ import annotations

import logging
import os
import random
from contextlib import ExitStack
from pathlib import Path

import pytest
from loop_parts import Loop, require_each_once

from monolith.testing.mock_kafka import MockKafka
from real_servers import redis_server

_log = logging.getLogger(__name__)
SLOW_FAULTS = int(os.environ.get("MONOLITH_CAMPAIGN_FAULTS", "10"))
FAULTS = [
    (part, fault)
    for part in ("site", "joiner", "trainer", "replica", "broker")
    for fault in ("killed", "stopped", "cut", "reset", "slowed")
]


ON_KAFKA = [fault for fault in FAULTS if fault != ("broker", "killed")]
"""A mock cluster has all records in memory."""


def campaign(folder: Path, faults: list[tuple[str, str]], *, seed: int, pause: float, on_kafka: bool = False) -> Loop:
    draw = random.Random(seed)
    draw.shuffle(faults)
    with ExitStack() as stack:
        broker = stack.enter_context(MockKafka() if on_kafka else redis_server(folder / "redis"))
        loop = Loop(folder, stack, broker=broker)
        require_each_once(loop, faults, draw, pause=pause)
        # A client that asked its link only where the broker is would not have been hurt by anything.
        carried = {name: loop.links[name].carried for name in ("site", "joiner", "trainer")}
        assert min(carried.values()) > 50 * int((folder / "written").read_text()), carried
    return loop


def test_each_impression_counts_once_whatever_happens_to_parts_and_links(tmp_path: Path) -> None:
    campaign(tmp_path, list(FAULTS), seed=1, pause=0.3)


def test_each_impression_counts_once_on_kafka_too(tmp_path: Path) -> None:
    campaign(tmp_path, list(ON_KAFKA), seed=3, pause=0.3, on_kafka=True)


@pytest.mark.slow
@pytest.mark.parametrize("on_kafka", [False, True], ids=["redis", "kafka"])
def test_each_impression_counts_once_whatever_happens_very_often(tmp_path: Path, on_kafka: bool) -> None:
    faults = ON_KAFKA if on_kafka else FAULTS
    loop = campaign(tmp_path, faults * SLOW_FAULTS, seed=2, pause=0.9, on_kafka=on_kafka)
    _log.info(
        "%s impressions; %s; parts that ended by themselves: %s",
        (tmp_path / "written").read_text(),
        dict(sorted(loop.faults.items())),
        dict(loop.deaths),
    )
