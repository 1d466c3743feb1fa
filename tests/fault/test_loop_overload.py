"""Danger: a loop that gets more than it can train keeps it in memory until it dies, loses some of it, does not say that it is
behind, or never catches up.

For every batch that may be trained two come, so the load is twice the peak, however fast the machine is at that moment. Then the
trainer hangs in a step, as one that waits for a disk does, and must still be said to be behind. No time is asserted.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import orjson
import pytest
from loop_parts import PARTS, Loop, counts, require_trained_once

from loop_site import PACE, PARTITIONS
from monolith.streams import open_stream
from monolith.train.control import TrainingStatus
from monolith.train.control_server import ControlClient
from real_servers import until

BATCH = 64
AHEAD = 4
"""No more batches are read ahead."""
READ_AHEAD = 1 << 20
SECONDS = 240.0


class Site:
    """Writes impressions of `size` bytes, as many as it is asked to. All are clicked, so none waits for the end of its window."""

    def __init__(self, folder: Path, stack: ExitStack, size: int) -> None:
        self.impressions, self.actions = (
            stack.enter_context(open_stream(folder / name).writer()) for name in ("impressions", "actions")
        )
        self.written, self._pad, self._begun = 0, "x" * size, int(time.time() * 1000)

    def write(self, count: int) -> None:
        for number in self.numbers(self.written, self.written + count).tolist():
            key, partition, when = b"%d" % number, number % PARTITIONS, self._begun + number
            value = orjson.dumps({"id": number, "pad": self._pad})
            self.impressions.append(value, key=key, partition=partition, timestamp=when)
            self.actions.append(b'{"action":"click"}', key=key, partition=partition, timestamp=when)
        self.written += max(count, 0)

    def numbers(self, first: int, end: int) -> np.ndarray:
        """Those of impressions. All of them are clicked ones."""
        return np.arange(first, end) * 3


class Seen:
    """What an operator sees of the loop."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._examples = open_stream(loop.folder / "examples")

    def status(self) -> TrainingStatus:
        """What the trainer says of itself."""
        with ControlClient.of_run(str(self.loop.folder / "run"), timeout=SECONDS) as client:
            return client.status()

    def page(self) -> int:
        """The lag in records that the page of the replica has. -1: it says that the trainer does not answer."""
        with urlopen(f"http://{self.loop.address}/status.json", timeout=SECONDS) as answer:
            (run,) = json.load(answer)["runs"]
        live: dict[str, Any] = run["live"]
        return live["lag_records"] if live["answers"] else -1

    def metric(self) -> int:
        """The same in its metrics."""
        with urlopen(f"http://{self.loop.address}/metrics", timeout=SECONDS) as answer:
            lines = [
                line for line in answer.read().decode().splitlines() if line.startswith("monolith_training_lag_records")
            ]
        return int(float(lines[0].split()[-1])) if lines else -1

    def joined(self) -> int:
        """Examples that there are."""
        return sum(end for _, end in self._examples.bounds().values())


def overload(folder: Path, *, steps: int, size: int) -> None:
    """Let twice as many impressions come as are trained in `steps` full batches, and then some while a step hangs."""
    options = {"trainer": ("--set", f"then.read_ahead_bytes={READ_AHEAD}")}
    with ExitStack() as stack:
        loop = Loop(folder, stack, parts=PARTS[1:], options=options)
        site, seen = Site(folder, stack, size), Seen(loop)
        until(lambda: loop.tend() or counts(loop.client, np.zeros(1, np.int64)) is not None, seconds=SECONDS)
        # What a first batch needs is in memory from here on.
        site.write(BATCH)
        require_trained_once(loop.client, site.numbers(0, BATCH))
        held = {part: loop.memory(part) for part in ("trainer", "replica")}

        first, begun = seen.status().step, site.written
        with (folder / PACE).open("ab", buffering=0) as pace:
            for _ in range(steps):
                site.write(2 * BATCH)
                pace.write(b".")
        until(lambda: seen.joined() == site.written and seen.status().step >= first + steps, seconds=SECONDS)
        # The trainer hangs in the next step, and has read a few batches more.
        behind = site.written - begun - (steps + AHEAD) * BATCH
        assert behind > 0
        until(lambda: seen.page() >= behind and seen.metric() >= behind, seconds=SECONDS)
        most = {part: loop.memory(part) for part in held}
        before = seen.status().lag_records
        assert before is not None
        site.write(2 * AHEAD * BATCH)
        until(lambda: seen.joined() == site.written, seconds=SECONDS)
        least = before + AHEAD * BATCH
        until(lambda: seen.page() == seen.metric() == seen.status().lag_records >= least, seconds=SECONDS)
        (folder / PACE).unlink()

        require_trained_once(loop.client, site.numbers(0, site.written))
        until(lambda: seen.page() == seen.metric() == 0, seconds=SECONDS)
        # What waited was in the stream. In memory was what may be read ahead, and what is being trained.
        for part, bytes_ in held.items():
            grown, waited = most[part] - bytes_, before * size
            assert grown < max(waited // 2, 64 << 20), (part, bytes_, most[part], waited)
        assert loop.deaths.total() == 0, loop.logs()


def test_twice_the_peak_is_seen_loses_nothing_and_is_caught_up(tmp_path: Path) -> None:
    overload(tmp_path, steps=8, size=100)


@pytest.mark.slow
def test_twice_the_peak_for_long_stays_in_the_stream_and_out_of_memory(tmp_path: Path) -> None:
    overload(tmp_path, steps=80, size=40_000)
