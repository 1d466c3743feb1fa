"""Time in the made-up world: its tastes and items change while the site is open, and wait while it is closed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from monolith.durable import write_durably

HISTORY_SECS, HISTORY_RATE, HISTORY_BATCH = 60, 5000, 2048
HISTORY_BATCHES = HISTORY_SECS * HISTORY_RATE // HISTORY_BATCH
"""What the model learns before the site opens."""


MOST_SECS = 1.0
"""A tick that comes later than this after the one before it found the site stalled: asleep, or waiting for its replica."""


class WorldClock:
    """Counts the seconds that the site was open, from the end of the history on. They survive in `file`."""

    def __init__(self, file: Path, begin: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock, self._begin = file, clock, begin
        open_secs = float(json.loads(file.read_text())["open_secs"]) if file.exists() else 0.0
        self.now = self.opened = begin + open_secs
        self._ticked: float | None = None

    def tick(self) -> float:
        """Let the time since the last tick pass, none before the first. Returns the time in the world."""
        now = self._clock()
        if self._ticked is not None:
            self.now += min(now - self._ticked, MOST_SECS)
        self._ticked = now
        return self.now

    def save(self) -> None:
        """Remember the time. A site that is killed goes back to here."""
        write_durably(self._file, json.dumps({"open_secs": self.now - self._begin}).encode())
