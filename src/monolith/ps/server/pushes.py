"""`PushLedger`: applies each push at most once, and records the progress of each worker.

A change carries (worker, epoch, sequence). The outcome of a sequence number, an answer or an error, is decided once and repeated
for retries and duplicated frames. Numbers may arrive in any order and with gaps, since a worker has several streams and sends
some changes to other servers. The server remembers the last `WINDOW` numbers and refuses older ones, because it no longer knows
whether they were applied.

A worker that is started again has a larger epoch. Once it has joined, pushes of earlier epochs are refused. Gradients may name
the batch they belong to. The last applied batch is recorded for each bucket and each dense parameter, because buckets move
between servers, and a worker may die after only some servers have applied a batch. A successor repeats some batches, and each
bucket skips those that it has had.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from monolith.errors import ConfigError, ProtocolError, StalePushError
from monolith.ps.protocol.messages import BucketsAt, HeldPosition, Join, ParametersAt, Push
from monolith.ps.server.gate import ChangeGate
from monolith.table.buckets import NUM_BUCKETS, mask_of, ranges_of
from monolith.table.store import Position

__all__ = ["BucketProgress", "ParameterProgress", "PushLedger", "WINDOW", "WorkerRecord"]


class BucketProgress:
    """The last batch of one worker that each bucket has had.

    A living worker pushes every batch to all buckets, so they are usually all at the same position, and a push costs one
    assignment whatever the number of buckets. Others are kept as masks for as long as they differ.

    Example:
        >>> progress = BucketProgress()
        >>> progress.advance(HeldPosition(batches=7, epoch=1), None)
        >>> progress.put([BucketsAt(position=HeldPosition(batches=6, epoch=1), ranges=((0, 10),))])
        >>> [(at.position.batches, at.ranges) for at in progress.at()]
        [(7, ((10, 4096),)), (6, ((0, 10),))]
    """

    def __init__(self) -> None:
        self._rest: HeldPosition | None = None
        # Disjoint. Replaced as a whole, never modified.
        self._others: list[tuple[np.ndarray, HeldPosition | None]] = []

    @property
    def first(self) -> HeldPosition | None:
        """The position of the first bucket. None: it has had no batch."""
        return next((at for mask, at in self._others if mask[0]), self._rest)

    def had(self, position: Position, epoch: int) -> np.ndarray | None:
        """Return bool [NUM_BUCKETS]: buckets that have had the batch of `position` before `epoch`. None: no bucket has."""
        rest = _has_had(self._rest, position, epoch)
        if not rest and not any(_has_had(held, position, epoch) for _, held in self._others):
            return None
        had = np.full(NUM_BUCKETS, rest)
        for mask, held in self._others:
            had[mask] = _has_had(held, position, epoch)
        return had

    def advance(self, position: HeldPosition, buckets: np.ndarray | None) -> None:
        """Record that `buckets`, a mask, are at `position` now. None: all buckets of the server."""
        if buckets is None:
            self._rest, self._others = position, []
        else:
            self._set(buckets, position)

    def put(self, parts: Iterable[BucketsAt], buckets: np.ndarray | None = None) -> None:
        """Record the positions of `parts`. Those of `buckets` that are in none of them have had no batch."""
        if buckets is not None:
            self._set(buckets, None)
        for part in parts:
            mask = mask_of(part.ranges)
            self._set(mask if buckets is None else mask & buckets, part.position)

    def at(self, buckets: np.ndarray | None = None) -> list[BucketsAt]:
        """Return the positions of all buckets, or of those of a mask. Buckets that have had no batch are in none."""
        rest = np.ones(NUM_BUCKETS, dtype=np.bool_)
        for mask, _ in self._others:
            rest &= ~mask
        parts = [(rest, self._rest), *self._others]
        shown = [(mask if buckets is None else mask & buckets, position) for mask, position in parts]
        return [
            BucketsAt(position=position, ranges=ranges_of(mask))
            for mask, position in shown
            if position is not None and mask.any()
        ]

    @property
    def nbytes(self) -> int:
        """Memory held."""
        positions = [self._rest, *(position for _, position in self._others)]
        return sum(map(_position_bytes, positions)) + NUM_BUCKETS * len(self._others)

    def _set(self, buckets: np.ndarray, position: HeldPosition | None) -> None:
        others, joined = [], buckets
        for mask, at in self._others:
            left = mask & ~buckets
            if at == position:
                joined = joined | left
            elif left.any():
                others.append((left, at))
        if position != self._rest and joined.any():
            others.append((joined, position))
        self._others = others


class ParameterProgress:
    """The last batch of one worker that each dense parameter has had.

    Example:
        >>> progress = ParameterProgress()
        >>> progress.advance(HeldPosition(batches=7, epoch=1), ["w", "b"])
        >>> progress.missing(Position(batches=7), 2, ["w", "c"])
        ['c']
    """

    def __init__(self) -> None:
        self._positions: dict[str, HeldPosition] = {}

    def missing(self, position: Position, epoch: int, names: Sequence[str]) -> list[str]:
        """Return those of `names` that have not had the batch of `position` before `epoch`."""
        return [name for name in names if not _has_had(self._positions.get(name), position, epoch)]

    def advance(self, position: HeldPosition, names: Iterable[str]) -> None:
        """Record that `names` are at `position` now."""
        self._positions |= dict.fromkeys(names, position)

    def put(self, parts: Iterable[ParametersAt], names: Collection[str]) -> None:
        """Record the positions of `names` in `parts`. Those that are in none of them have had no batch."""
        kept = {name: at for name, at in self._positions.items() if name not in names}
        found = {name: part.position for part in parts for name in part.names if name in names}
        self._positions = kept | found

    def at(self, names: Collection[str] | None = None) -> list[ParametersAt]:
        """Return the positions of all parameters, or of `names`. Parameters that have had no batch are in none."""
        parts: list[tuple[HeldPosition, list[str]]] = []
        for name, position in list(self._positions.items()):
            if names is not None and name not in names:
                continue
            # Nearly always the position of the parameter before it.
            same = next((part for part in reversed(parts) if part[0] is position or part[0] == position), None)
            if same is None:
                parts.append((position, [name]))
            else:
                same[1].append(name)
        return [ParametersAt(position=position, names=tuple(of)) for position, of in parts]

    @property
    def nbytes(self) -> int:
        """Memory held."""
        distinct = {id(position): position for position in list(self._positions.values())}
        return sum(map(_position_bytes, distinct.values())) + sum(
            len(name) + _OVERHEAD for name in list(self._positions)
        )


_OVERHEAD = 128
"""Approximate bytes of a small Python object and its entry in a dict."""


def _position_bytes(position: HeldPosition | None) -> int:
    return 0 if position is None else len(position.state or "") + 4 * _OVERHEAD


def _has_had(held: HeldPosition | None, position: Position, epoch: int) -> bool:
    # Within one epoch the sequence numbers are enough. Only a successor, which cannot know where the last one stopped, repeats
    # batches.
    return held is not None and held.epoch < epoch and position.batches <= held.batches


WINDOW = 64
"""Sequence numbers remembered for each worker: more than it can have in flight, few enough to keep their answers."""
MAX_WORKERS = 65536
_RECORD_BYTES = 4096
"""Approximate size of a record without its positions and outcomes."""

Answer = TypeVar("Answer")


@dataclass
class WorkerRecord(Generic[Answer]):
    """The record of one worker."""

    epoch: int
    nonce: int
    met: int
    """The epoch in which this server, or the one that a bucket came from, first heard of the worker."""
    highest: int = -1
    outcomes: OrderedDict[int, Answer | Exception] = field(default_factory=OrderedDict)
    buckets: BucketProgress = field(default_factory=BucketProgress)
    """The last batch that each bucket has had. It outlives the epochs."""
    parameters: ParameterProgress = field(default_factory=ParameterProgress)
    """The last batch that each dense parameter has had."""
    # Held while a push is applied: a duplicate waits for the first one, and a successor for its predecessor's last push.
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        """Memory held, approximately."""
        outcomes = sum(_size(outcome) for outcome in list(self.outcomes.values()))
        return _RECORD_BYTES + self.buckets.nbytes + self.parameters.nbytes + outcomes

    def begin(self, epoch: int, nonce: int) -> None:
        """Begin another epoch: its sequence numbers start again."""
        self.epoch, self.nonce, self.highest = epoch, nonce, -1
        self.outcomes.clear()


class PushLedger(Generic[Answer]):
    """The pushes of all workers that were applied, and their outcomes.

    Example:
        >>> ledger, counted = PushLedger(), []
        >>> ledger.join(Join(worker="w0", epoch=1, nonce=5)).epoch
        1
        >>> push = Push(worker="w0", epoch=1, sequence=1)
        >>> for _ in range(3):
        ...     ledger.once(push, lambda worker: counted.append(worker.epoch))
        >>> counted
        [1]
    """

    def __init__(
        self,
        *,
        gate: ChangeGate | None = None,
        window: int = WINDOW,
        max_workers: int = MAX_WORKERS,
        require_memory: Callable[[int], None] = lambda more: None,
    ) -> None:
        self._require_memory = require_memory
        self._gate = gate or ChangeGate()
        self._window = window
        self._max_workers = max_workers
        self._workers: dict[str, WorkerRecord[Answer]] = {}
        self._lock = threading.Lock()
        self.base_step: int | None = None
        """The global step before the first batch that a worker's position counts. None until it is set."""

    def join(self, join: Join) -> WorkerRecord[Answer]:
        """Start an epoch. Returns the record of the worker when pushes of earlier epochs can no longer take effect."""
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
        return worker

    def once(self, push: Push, action: Callable[[WorkerRecord[Answer]], Answer]) -> Answer:
        """Call `action` for the first push with this number only. Retries return or raise the same outcome."""
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

    def batches(self) -> int:
        """Return the number of batches that were applied, of all workers together, each counted once."""
        return sum(_batches(worker) for worker in list(self._workers.values()))

    def step(self) -> int:
        """Return the global step: one for each applied batch of a worker. Exact on the owner of the first bucket.

        It is derived from the positions of pushes, so it changes and becomes durable with them, and no failure can make it count
        a batch twice or not at all.
        """
        return (self.base_step or 0) + self.batches()

    def count_from(self, step: int) -> None:
        """Set the global step to `step`."""
        self.base_step = step - self.batches()

    @property
    def nbytes(self) -> int:
        """Memory held: names, positions and outcomes of all workers."""
        return sum(len(name) + record.nbytes for name, record in list(self._workers.items()))

    def records(self) -> Mapping[str, WorkerRecord[Answer]]:
        """Return the records of all workers. To be read while the gate is closed."""
        return dict(self._workers)

    def meet(self, name: str, *, epoch: int, nonce: int, met: int) -> WorkerRecord[Answer]:
        """Record a worker that another server knows, or knows in a later epoch. The gate must be closed."""
        with self._lock:
            known = self._workers.setdefault(name, WorkerRecord(epoch=epoch, nonce=nonce, met=met))
        known.met = min(known.met, met)
        if epoch > known.epoch:
            known.begin(epoch, nonce)
        return known

    def replace(self, records: Mapping[str, WorkerRecord[Answer]]) -> None:
        """Replace all records. Called while the gate is closed, or before the first request."""
        with self._lock:
            self._workers = dict(records)

    def _outcome(
        self, worker: WorkerRecord[Answer], push: Push, action: Callable[[WorkerRecord[Answer]], Answer]
    ) -> Answer | Exception:
        if push.sequence in worker.outcomes:
            return worker.outcomes[push.sequence]
        if push.sequence <= worker.highest - self._window:
            raise StalePushError(
                f"push: {push.sequence} of worker {push.worker!r} is older than the last {self._window} up to {worker.highest}; "
                "whether it was applied is not known any more"
            )
        try:
            outcome: Answer | Exception = action(worker)
        except Exception as error:
            # A failure is an outcome too: the sender knows, or will know, that the push was not applied.
            outcome = error.with_traceback(None)
        worker.outcomes[push.sequence] = outcome
        worker.highest = max(worker.highest, push.sequence)
        # Outcomes that arrived out of order stay until older ones are dropped.
        while next(iter(worker.outcomes)) <= worker.highest - self._window:
            worker.outcomes.popitem(last=False)
        return outcome

    def _worker(self, join: Join) -> WorkerRecord[Answer]:
        with self._lock:
            if join.worker not in self._workers and len(self._workers) >= self._max_workers:
                raise ConfigError(f"worker: the server knows {self._max_workers:,} workers already; reuse names")
            if join.worker not in self._workers:
                self._require_memory(len(join.worker) + _RECORD_BYTES)
            new = WorkerRecord[Answer](epoch=join.epoch, nonce=join.nonce, met=join.epoch)
            return self._workers.setdefault(join.worker, new)


def _batches(worker: WorkerRecord[Answer]) -> int:
    # The first bucket moves together with the count. Of a batch, the part for the tables is pushed last.
    last = worker.buckets.first
    return 0 if last is None else last.batches


def _size(outcome: object) -> int:
    """Return the bytes of an answer: of its arrays and its text. Of an error, its message."""
    arrays, text = getattr(outcome, "arrays", ()), getattr(outcome, "text", None)
    return sum(int(array.nbytes) for array in arrays) + len(str(outcome) if text is None else text)


def _stale(worker: str, epoch: int, newest: int) -> StalePushError:
    return StalePushError(
        f"epoch: {epoch} of worker {worker!r} is over, {newest} has joined since; this process has been replaced and should end"
    )
