"""The data workers a dispatcher knows: who is alive, and who has the least to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

__all__ = ["WorkerPool"]

MAX_WORKERS = 65536


@dataclass
class _Worker:
    heard: float
    """When it said last that it is alive."""
    streams: int
    """Splits it reads, as it said, and those it was chosen for since."""


class WorkerPool:
    """Data workers, each alive for `lease_secs` after a heartbeat. Safe from many threads.

    Example:
        >>> pool = WorkerPool(lease_secs=5, clock=lambda: 0.0)
        >>> pool.heartbeat("a:1", streams=3), pool.heartbeat("b:1", streams=2)
        (None, None)
        >>> [pool.choose() for _ in range(3)]
        ['b:1', 'a:1', 'b:1']
    """

    def __init__(self, *, lease_secs: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.lease_secs = lease_secs
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self._lock = threading.Lock()

    def heartbeat(self, address: str, *, streams: int) -> None:
        """The data worker at `address` is alive."""
        with self._lock:
            self._forget_the_dead()
            if address in self._workers or len(self._workers) < MAX_WORKERS:
                self._workers[address] = _Worker(heard=self._clock(), streams=streams)

    def choose(self, avoid: Collection[str] = ()) -> str | None:
        """The one with the least to do, none to `avoid` if there is another; None if none is alive."""
        with self._lock:
            self._forget_the_dead()
            if not self._workers:
                return None
            chosen = min(self._workers, key=lambda address: (address in avoid, self._workers[address].streams, address))
            self._workers[chosen].streams += 1
            return chosen

    def alive(self) -> list[str]:
        """Their addresses, sorted."""
        with self._lock:
            self._forget_the_dead()
            return sorted(self._workers)

    def _forget_the_dead(self) -> None:
        since = self._clock() - self.lease_secs
        self._workers = {address: worker for address, worker in self._workers.items() if worker.heard >= since}
