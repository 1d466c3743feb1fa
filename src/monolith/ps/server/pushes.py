"""Pushes applied at most once: a change carries (worker, epoch, sequence), and the server remembers what it has seen.

A worker numbers its changes. What a number led to, an answer or an error, is decided once and given again to whoever sends
the number again: the client that did not hear the answer, or a network that delivers twice. Numbers may arrive in any order
and with gaps, since a worker has several streams and some changes go to other servers. The server remembers the last `WINDOW`
of them; a number below is refused, because nobody can tell any more whether it was applied.

A worker that is started again has a larger epoch. From the moment it joins, pushes of the earlier epochs are refused. A push may
say which batch it belongs to: a successor that begins some batches earlier pushes them again, and those that were applied here
are not applied twice.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from monolith.errors import ConfigError, ProtocolError, StalePushError
from monolith.ps.messages import HeldPosition, Join, Push
from monolith.ps.server.gate import ChangeGate

__all__ = ["PushLedger", "WINDOW", "WorkerRecord"]

WINDOW = 64
"""Numbers remembered for each worker: more than it can have under way, few enough to keep their answers."""
MAX_WORKERS = 65536

Answer = TypeVar("Answer")


@dataclass
class WorkerRecord(Generic[Answer]):
    """What is known of one worker."""

    epoch: int
    nonce: int
    highest: int = -1
    outcomes: OrderedDict[int, Answer | Exception] = field(default_factory=OrderedDict)
    positions: dict[str, HeldPosition] = field(default_factory=dict)
    """The last batch applied, by channel; it outlives the epochs."""
    # Held while a push is applied: one that comes twice waits for the first, and a successor for its predecessor's last.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, epoch: int, nonce: int) -> None:
        """Another life of the worker: its numbers begin anew."""
        self.epoch, self.nonce, self.highest = epoch, nonce, -1
        self.outcomes.clear()


class PushLedger(Generic[Answer]):
    """Which pushes of which workers were applied, and what they led to. `skipped` is the answer to a batch that came again.

    Example:
        >>> ledger, counted = PushLedger(skipped=None), []
        >>> ledger.join(Join(worker="w0", epoch=1, nonce=5))
        False
        >>> push = Push(worker="w0", epoch=1, sequence=1)
        >>> for _ in range(3):
        ...     ledger.once(push, lambda: counted.append(1))
        >>> counted
        [1]
    """

    def __init__(
        self,
        *,
        skipped: Answer,
        gate: ChangeGate | None = None,
        window: int = WINDOW,
        max_workers: int = MAX_WORKERS,
    ) -> None:
        self._skipped = skipped
        self._gate = gate or ChangeGate()
        self._window = window
        self._max_workers = max_workers
        self._workers: dict[str, WorkerRecord[Answer]] = {}
        self._lock = threading.Lock()

    def join(self, join: Join) -> bool:
        """Begin an epoch; returns when no push of an earlier one can take effect any more: whether the worker was known."""
        known = join.worker in self._workers
        worker = self._worker(join)
        with worker.lock, self._gate.changing():
            if join.epoch < worker.epoch:
                raise _stale(join.worker, join.epoch, worker.epoch)
            if join.epoch > worker.epoch:
                worker.begin(join.epoch, join.nonce)
            elif join.nonce != worker.nonce:
                raise ConfigError(
                    f"worker: another process has joined as {join.worker!r} in epoch {join.epoch}; give each worker a name of "
                    "its own, and a restarted one a larger epoch"
                )
        return known

    def once(self, push: Push, action: Callable[[], Answer]) -> Answer:
        """What `action` returned or raised for the first push of this number; it is called for that one only."""
        with self._lock:
            worker = self._workers.get(push.worker)
        if worker is None:
            raise ProtocolError(f"push: worker {push.worker!r} has not joined")
        with worker.lock:
            if push.epoch > worker.epoch:
                raise ProtocolError(
                    f"push: worker {push.worker!r} has not joined in epoch {push.epoch}, only in {worker.epoch}"
                )
            if push.epoch < worker.epoch:
                raise _stale(push.worker, push.epoch, worker.epoch)
            with self._gate.changing():
                outcome = self._outcome(worker, push, action)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def positions(self, worker: str) -> dict[str, HeldPosition]:
        """The last batch of `worker` that was applied, by channel."""
        found = self._workers.get(worker)
        return {} if found is None else dict(found.positions)

    def records(self) -> Mapping[str, WorkerRecord[Answer]]:
        """All workers; to be read while the gate is closed."""
        return dict(self._workers)

    def meet(self, name: str, *, epoch: int, nonce: int) -> WorkerRecord[Answer]:
        """What is known of a worker that another server has met in `epoch`; while the gate is closed."""
        with self._lock:
            known = self._workers.setdefault(name, WorkerRecord(epoch=epoch, nonce=nonce))
        if epoch > known.epoch:
            known.begin(epoch, nonce)
        return known

    def replace(self, records: Mapping[str, WorkerRecord[Answer]]) -> None:
        """Know these workers and no others; while the gate is closed, or before the first call."""
        with self._lock:
            self._workers = dict(records)

    def _outcome(self, worker: WorkerRecord[Answer], push: Push, action: Callable[[], Answer]) -> Answer | Exception:
        if push.sequence in worker.outcomes:
            return worker.outcomes[push.sequence]
        if push.sequence <= worker.highest - self._window:
            raise StalePushError(
                f"push: {push.sequence} of worker {push.worker!r} is older than the last {self._window} up to {worker.highest}; "
                "whether it was applied is not known any more"
            )
        outcome = self._applied(worker, push, action)
        worker.outcomes[push.sequence] = outcome
        worker.highest = max(worker.highest, push.sequence)
        # Those that came out of turn stay until those before them go.
        while next(iter(worker.outcomes)) <= worker.highest - self._window:
            worker.outcomes.popitem(last=False)
        return outcome

    def _applied(self, worker: WorkerRecord[Answer], push: Push, action: Callable[[], Answer]) -> Answer | Exception:
        position = push.position
        before = None if position is None else worker.positions.get(position.channel)
        # Within one life the numbers are enough; only a successor, who cannot know where the last one stopped, repeats batches.
        if (
            position is not None
            and before is not None
            and before.epoch < push.epoch
            and position.batches <= before.batches
        ):
            return self._skipped
        try:
            outcome = action()
        except Exception as error:
            # A failure is an outcome too: the sender was told, or will be, that it did not happen.
            return error.with_traceback(None)
        if position is not None:
            held = HeldPosition(**position.model_dump(), epoch=push.epoch)
            worker.positions[position.channel] = held
        return outcome

    def _worker(self, join: Join) -> WorkerRecord[Answer]:
        with self._lock:
            if join.worker not in self._workers and len(self._workers) >= self._max_workers:
                raise ConfigError(f"worker: the server knows {self._max_workers:,} workers already; reuse names")
            return self._workers.setdefault(join.worker, WorkerRecord(epoch=join.epoch, nonce=join.nonce))


def _stale(worker: str, epoch: int, newest: int) -> StalePushError:
    return StalePushError(
        f"epoch: {epoch} of worker {worker!r} is over, {newest} has joined since; this process has been replaced and should end"
    )
