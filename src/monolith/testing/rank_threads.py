"""Ranks as threads of one process, for tests of what ranks do together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from monolith.errors import RankLostError, RanksDisagreeError
from monolith.ranks.mesh import Arrays, Channel, Kind, Mesh
from monolith.transport.frames import encode_parts

__all__ = ["ThreadMesh", "run_ranks"]

T = TypeVar("T")


@dataclass
class _Round:
    sent: dict[int, tuple[Kind, int, Sequence[Arrays]]] = field(default_factory=dict)
    taken: int = 0


class _Hub:
    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.changed = threading.Condition()
        self.rounds: dict[tuple[Channel, int], _Round] = {}
        self.lost: dict[int, str] = {}


class ThreadMesh:
    """A `Mesh` between threads. Messages are copied, as a network would."""

    generation = 1

    def __init__(self, hub: _Hub, rank: int) -> None:
        self._hub, self.rank, self.size = hub, rank, hub.size
        self._numbers = dict.fromkeys(Channel, 0)

    def exchange(
        self, kind: Kind, out: Sequence[Arrays], *, step: int = 0, channel: Channel = Channel.MAIN
    ) -> list[Arrays]:
        """Send `out[r]` to every rank r. Returns what each has sent here."""
        assert len(out) == self.size
        key = (channel, self._numbers[channel])
        self._numbers[channel] += 1
        hub = self._hub
        for arrays in out:
            # Fails for what a frame between processes cannot carry.
            encode_parts(call=kind, request=0, text="", arrays=list(arrays))
        with hub.changed:
            round_ = hub.rounds.setdefault(key, _Round())
            copies = [out[r] if r == self.rank else [np.array(a) for a in out[r]] for r in range(self.size)]
            round_.sent[self.rank] = (kind, step, copies)
            hub.changed.notify_all()
            self._wait(lambda: len(round_.sent) == self.size, round_, step)
            for rank, (other, at, _) in sorted(round_.sent.items()):
                if (other, at) != (kind, step):
                    raise RanksDisagreeError(
                        f"rank {self.rank} is in {kind.name} of step {step}, rank {rank} in {other.name} of step {at}"
                    )
            round_.taken += 1
            if round_.taken == self.size:
                del hub.rounds[key]
            return [round_.sent[rank][2][self.rank] for rank in range(self.size)]

    def next_kind(self, *, channel: Channel = Channel.MAIN) -> Kind:
        """Wait for the next message of another rank and return its kind."""
        key = (channel, self._numbers[channel])
        with self._hub.changed:
            round_ = self._hub.rounds.setdefault(key, _Round())
            self._wait(lambda: bool(round_.sent), round_, 0)
            return next(iter(round_.sent.values()))[0]

    def loss(self, *, step: int, wait_secs: float = 0.0) -> RankLostError | None:
        """Return the error of a rank that has failed or left."""
        with self._hub.changed:
            lost = next(((rank, why) for rank, why in self._hub.lost.items() if rank != self.rank), None)
        return None if lost is None else RankLostError(lost[1], rank=lost[0], step=step)

    def fail(self, reason: str) -> None:
        """Tell the others."""
        with self._hub.changed:
            self._hub.lost.setdefault(self.rank, f"rank {self.rank} failed: {reason}")
            self._hub.changed.notify_all()

    def close(self) -> None:
        """Leave. Others that wait for this rank get an error."""
        with self._hub.changed:
            self._hub.lost.setdefault(self.rank, f"rank {self.rank} has left")
            self._hub.changed.notify_all()

    def _wait(self, ready: Callable[[], bool], round_: _Round, step: int) -> None:
        hub, deadline = self._hub, time.monotonic() + self._hub.timeout
        while not ready():
            for rank, why in hub.lost.items():
                if rank != self.rank and rank not in round_.sent:
                    raise RankLostError(why, rank=rank, step=step)
            if not hub.changed.wait(timeout=max(0.0, deadline - time.monotonic())):
                silent = next(rank for rank in range(self.size) if rank not in round_.sent)
                raise RankLostError(f"rank {silent} was silent in step {step}", rank=silent, step=step)


def run_ranks(size: int, rank: Callable[[Mesh], T], *, timeout: float = 20.0) -> list[T]:
    """Call `rank(mesh)` in `size` threads, one for each rank. Returns what they returned, or raises the first error
    that is not the loss of another rank, if there is one.

    Example:
        >>> run_ranks(2, lambda mesh: mesh.rank)
        [0, 1]
    """
    hub = _Hub(size, timeout)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def body(mesh: ThreadMesh) -> None:
        try:
            results[mesh.rank] = rank(mesh)
        except BaseException as error:
            failures.append(error)
            mesh.fail(str(error))
        finally:
            mesh.close()

    threads = [threading.Thread(target=body, args=(ThreadMesh(hub, number),)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((error for error in failures if not isinstance(error, RankLostError)), failures[0])
    return [results[number] for number in range(size)]
