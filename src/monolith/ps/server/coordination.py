"""What the workers of a run know in common, kept by one of their servers: it outlives each of them, the chief too.

Little of it is worth keeping on a disk: workers repeat who they are and how far with every call, so a server that was started
anew knows it again within a heartbeat. Nobody is waited for in here; who waits asks again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from monolith.errors import ConfigError, StalePushError
from monolith.ps.coordination_messages import Barrier, Greet, Member, Members, Phase, Seen

__all__ = ["Coordination"]

CHIEF = 0
MAX_KEYS = 4096


@dataclass
class _Worker:
    epoch: int
    phase: Phase
    until: float
    made: int | None = None
    held: int | None = None


class Coordination:
    """Who takes part, the global step, a barrier, and keys that are set once.

    A worker counts as long as its lease runs. One that was started again, with a larger epoch, takes the place of its
    predecessor, whose calls are refused from then on. A barrier falls with the one who placed it.

    Example:
        >>> common = Coordination(clock=lambda: 0.0)
        >>> chief, worker = (Greet(index=index, epoch=1, lease=30.0) for index in (0, 1))
        >>> common.greet(chief)
        >>> common.greet(worker)
        >>> common.report(worker, made=1, seen=0), common.report(chief, made=1, seen=0)
        (Seen(step=1, barrier=None), Seen(step=2, barrier=None))
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._workers: dict[int, _Worker] = {}
        self._step = 0
        self._barrier: Barrier | None = None
        self._placed_by: tuple[int, int] | None = None
        self._barriers = 0
        self._keys: dict[str, str] = {}

    def greet(self, who: Greet) -> None:
        """Take note of a worker, or that it is still there."""
        with self._lock:
            new = who.index not in self._workers or self._workers[who.index].epoch < who.epoch
            worker = self._greet(who)
            if new and who.phase == "joined":
                # It begins: the steps it will make all count.
                worker.made = 0

    def members(self) -> Members:
        """All workers, and what is common to them."""
        with self._lock:
            barrier, now = self._standing(), self._clock()
            members = tuple(
                Member(
                    index=index,
                    epoch=worker.epoch,
                    phase=worker.phase,
                    alive=now < worker.until,
                    held=barrier is not None and worker.held == barrier.number,
                )
                for index, worker in sorted(self._workers.items())
            )
            return Members(members=members, step=self._step, barrier=barrier)

    def report(self, who: Greet, *, made: int, seen: int) -> Seen:
        """Count the steps of a worker that were not counted yet."""
        with self._lock:
            worker = self._greet(who)
            # Of a worker first heard of now, `made` counts from here: it was counted before this server was started.
            new = 0 if worker.made is None else max(0, made - worker.made)
            worker.made = max(made, worker.made or 0)
            self._step = max(self._step + new, seen)
            return Seen(step=self._step, barrier=self._standing())

    def place(self, who: Greet, action: str) -> tuple[bool, Barrier]:
        """Hold every worker that comes by from now on; False, and the barrier there is, if they are held already."""
        with self._lock:
            self._greet(who)
            if (standing := self._standing()) is not None:
                return False, standing
            self._barriers += 1
            self._barrier = Barrier(number=self._barriers, action=action)
            self._placed_by = (who.index, who.epoch)
            return True, self._barrier

    def remove(self, who: Greet) -> None:
        """Let all go."""
        with self._lock:
            self._greet(who)
            self._barrier = None

    def hold(self, who: Greet, number: int) -> bool:
        """Worker `who` waits behind barrier `number`; whether it still has to."""
        with self._lock:
            worker, barrier = self._greet(who), self._standing()
            held = barrier is not None and barrier.number == number
            worker.held = number if held else None
            return held

    def read_keys(self, prefix: str) -> dict[str, str]:
        """The values of all keys that begin with `prefix`."""
        with self._lock:
            return {key: value for key, value in sorted(self._keys.items()) if key.startswith(prefix)}

    def set_key(self, key: str, value: str, expected: str | None) -> tuple[bool, str]:
        """Set a key that has the value `expected`; whether it has `value` now, and what it has."""
        with self._lock:
            there = self._keys.get(key)
            if there == expected:
                if there is None and len(self._keys) >= MAX_KEYS:
                    raise ConfigError(f"key: there are {MAX_KEYS:,} keys already, no room for {key!r}")
                self._keys[key] = there = value
            # Sent again by someone who did not hear the answer, it has been set already.
            return there == value, "" if there is None else there

    def _greet(self, who: Greet) -> _Worker:
        known, until = self._workers.get(who.index), self._clock() + who.lease
        if known is not None and who.epoch < known.epoch:
            raise StalePushError(
                f"epoch: {who.epoch} of worker {who.index} is over, {known.epoch} has come since; this process has been "
                "replaced and should end"
            )
        if known is None or who.epoch > known.epoch:
            known = self._workers[who.index] = _Worker(epoch=who.epoch, phase=who.phase, until=until)
        known.phase, known.until = who.phase, until
        return known

    def _standing(self) -> Barrier | None:
        """The barrier there is; one whose chief was replaced or is not heard of any more has fallen."""
        if self._barrier is not None and self._placed_by is not None:
            index, epoch = self._placed_by
            worker = self._workers[index]
            if worker.epoch != epoch or self._clock() >= worker.until:
                self._barrier = None
        return self._barrier
