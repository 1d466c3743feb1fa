"""From a request frame to an answer frame: what a parameter server does, without the network around it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from monolith.errors import FencedError, OverloadedError, ProtocolError, ServerRestoredError
from monolith.ps.protocol import messages
from monolith.ps.protocol.calls import AUTHORITATIVE, CHANGES, READ_IN_PLACE, Call
from monolith.ps.protocol.ownership import mask_of, ranges_of
from monolith.ps.protocol.precision import WIRE_DTYPES
from monolith.ps.rebalance.installs import BucketInstalls
from monolith.ps.rebalance.lease import MoverLease
from monolith.ps.rebalance.moves import PIECE_BYTES, BucketMoves
from monolith.ps.server.bucket_calls import BucketCalls
from monolith.ps.server.coordination import CoordinationFile
from monolith.ps.server.coordination_calls import CoordinationCalls
from monolith.ps.server.dense_calls import DenseCalls
from monolith.ps.server.folder import ServerFolder
from monolith.ps.server.identity import kept_identity
from monolith.ps.server.ledger_state import read_ledger
from monolith.ps.server.log_calls import LogCalls
from monolith.ps.server.owned_buckets import OwnedBuckets
from monolith.ps.server.pushes import WorkerRecord
from monolith.ps.server.save_calls import SaveCalls
from monolith.ps.server.state import ServerState
from monolith.ps.server.table_calls import TableCalls
from monolith.state.storage import StrPath
from monolith.table.buckets import NUM_BUCKETS
from monolith.transport.calls import Answer, BasicCall, CallNumber, FrameCalls, json_answer, message_of
from monolith.transport.frames import Frame, allocate
from monolith.transport.link import Link

__all__ = ["Dispatcher"]

PEER_SECONDS = 10.0
"""How long another server may take to answer."""
MAX_REMEMBERED = 16384
"""Characters of a lookup's text that is worth keeping: whoever sends long ones must not fill the memory."""


_SPIN_SIZE = 256


class Dispatcher(FrameCalls):
    """Answers frames. `answer` may run in many threads, and never raises: what is wrong comes back as an error frame.

    Example:
        >>> import json
        >>> from monolith.transport.frames import decode, encode
        >>> dispatcher = Dispatcher()
        >>> answer = decode(dispatcher.answer(encode(call=BasicCall.HEALTH, request=1, text="{}")))
        >>> json.loads(answer.text)["tables"]
        0
    """

    read_in_place = READ_IN_PLACE

    def __init__(
        self,
        *,
        memory_limit: int | None = None,
        max_frame_bytes: int = 2**28,
        folder: Path | None = None,
        log_flush_secs: float | None = None,
        take_over: bool = False,
        restore_to: str | None = None,
        restore_roots: Sequence[StrPath] = (),
        connect: Callable[[str], Link] = lambda address: Link(address, timeout=PEER_SECONDS),
        move_piece_bytes: int = PIECE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(max_frame_bytes=max_frame_bytes)
        self._clock = clock
        self._started = self._called_at = clock()
        self._state = state = ServerState(memory_limit=memory_limit, clock=clock)
        self.frames = state.memory.frames
        self._folder: ServerFolder | None = None
        self._saves = SaveCalls(state, lambda: self._folder, restore_roots)
        self._owned = owned = OwnedBuckets()
        state.parts["ownership"] = owned
        state.ranges = lambda: [range(*pair) for pair in owned.ranges] if owned.version else None
        state.moving = lambda: owned.giving is not None
        state.moving_dense = lambda: () if owned.giving is None else owned.giving.dense
        state.gave_dense = lambda: owned.gave_dense
        lease = MoverLease(clock=clock)
        installs = BucketInstalls(state, owned, lease, commit=self.commit)
        self._moves = BucketMoves(
            state, owned, lease, commit=self.commit, connect=connect, piece_bytes=move_piece_bytes
        )
        self._handlers |= {
            BasicCall.HEALTH: self._health,
            Call.JOIN: self._join,
            Call.IS_INITIALISED: self._is_initialised,
            Call.MARK_INITIALISED: self._mark_initialised,
            Call.MEASURE: self._measure,
            **TableCalls(state, owned).calls(),
            **BucketCalls(state, owned, self._moves, installs, durable=folder is not None).calls(),
            **DenseCalls(state, owned).calls(),
            **self._saves.calls(),
            **LogCalls(lambda: self._folder).calls(),
            **CoordinationCalls(state, owned).calls(),
        }
        # Last: what the calls above keep is restored with the rest.
        if folder is not None:
            self._folder = ServerFolder(
                folder, state, flush_secs=log_flush_secs, take_over=take_over, restore_to=restore_to
            )
            owned.identify(kept_identity(folder, owned.server))
            self._keep_coordination(folder)
        self._moves.resume()

    def _keep_coordination(self, folder: Path) -> None:
        kept = CoordinationFile(folder)
        if kept.text is not None:
            self._state.coordination.load(kept.text)
        self._state.coordination.keep = kept.write

    def commit(self) -> None:
        """Return when everything so far is durable; without a folder there is nothing to wait for."""
        if self._folder is not None:
            self._folder.commit()

    def stop(self, *, grace: float) -> bool:
        """As of every server; buckets on their way stay so."""
        self._moves.stop()
        return super().stop(grace=grace)

    def close(self) -> None:
        """Let go of the folder; after `stop`."""
        self._saves.close()
        self._moves.close()
        if self._folder is not None:
            self._folder.close()

    def _called(self, frame: Frame) -> Answer:
        answer = super()._called(frame)
        if self._folder is not None:
            try:
                if frame.call in CHANGES:
                    self._folder.acknowledge()
                elif frame.call in AUTHORITATIVE:
                    self._folder.require_own()
            except FencedError:
                # Another process does the work: this one is in the way.
                self.stop_asked.set()
                raise
        return answer

    def _require_mine(self, frame: Frame) -> None:
        if self._restored and frame.instance not in (0, self.instance):
            raise ServerRestoredError(
                f"the server was started again and has restored itself to number {self._restored} of its log; rejoin() and go on"
            )
        super()._require_mine(frame)

    @property
    def _restored(self) -> int:
        return 0 if self._folder is None else self._folder.restored

    @property
    def silence(self) -> float:
        """Seconds since the last call, other than a health check."""
        return self._clock() - self._called_at

    def _answered(self, frame: Frame, out: np.ndarray | None) -> np.ndarray:
        if frame.call != BasicCall.HEALTH:
            self._called_at = self._clock()
        # Rows are written into the answer itself.
        return self._lookup(frame, out) if frame.call == Call.LOOKUP else super()._answered(frame, out)

    def _known(self) -> list[CallNumber]:
        return sorted([*super()._known(), Call.LOOKUP])

    def _health(self, frame: Frame) -> Answer:
        return json_answer(
            tables=len(self._state.tables.declared()),
            dense=len(self._state.dense),
            bytes=self._state.memory.used,
            initialised=self._state.initialised,
            checkpoint=self._state.checkpoint,
            owns=bool(self._owned.ranges),
            seconds=self._clock() - self._started,
            folder=self._folder is not None,
            restored=self._restored,
            sequence=0 if self._folder is None else self._folder.sequence,
        )

    def _join(self, frame: Frame) -> Answer:
        join = message_of(messages.Join, frame)
        worker = self._state.pushes.join(join)
        # Buckets and positions of one moment: a transfer moves both.
        with self._state.gate.closed():
            return Answer(text=self._joined(join, worker).model_dump_json())

    def _joined(self, join: messages.Join, worker: WorkerRecord[Answer]) -> messages.Joined:
        owned, giving = self._owned, self._owned.giving
        ranges = owned.ranges if owned.version else ((0, NUM_BUCKETS),)
        held = self._state.dense.declared()
        known = read_ledger(giving.positions, f"the positions of {giving}").get(join.worker) if giving else None
        moving = [giving.buckets] if giving and giving.buckets else []
        return messages.Joined(
            restored=self._restored,
            known=worker.met < join.epoch,
            ranges=ranges_of(mask_of([*ranges, *moving])),
            tables=(*worker.buckets.at(mask_of(ranges)), *(known.tables if known else ())),
            parameters=(*held, *(giving.dense if giving else ())),
            gave=owned.gave_dense,
            dense=(*worker.parameters.at(held), *(known.dense if known else ())),
        )

    def _lookup(self, frame: Frame, out: np.ndarray | None) -> np.ndarray:
        lookup = _lookup_of(frame.text)
        self._owned.require_read(lookup.map)
        reads = self._state.tables.reads(lookup, frame.arrays)
        shapes = [(WIRE_DTYPES[lookup.wire], read.shape) for read in reads]
        size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in shapes)
        if size > self._max_frame_bytes:
            raise ProtocolError(
                f"lookup: the answer would have {size:,} bytes, the limit is {self._max_frame_bytes:,}; ask for fewer ids"
            )
        if not self.frames.fits(size):
            raise OverloadedError(
                f"lookup: requests and answers of {self.frames.in_use:,} bytes are in memory, none is left for one of {size:,}; "
                "try again later"
            )
        buffer, views = allocate(
            call=Call.LOOKUP, request=frame.request, instance=self.instance, text="{}", shapes=shapes, out=out
        )
        self._state.tables.lookup(reads, views)
        # Rows that were given away while they were read may have been removed.
        self._owned.require_read(lookup.map)
        return buffer

    def _is_initialised(self, frame: Frame) -> Answer:
        return json_answer(initialised=self._state.initialised)

    def _mark_initialised(self, frame: Frame) -> Answer:
        with self._state.gate.changing():
            self._state.initialised = True
        return Answer()

    def _measure(self, frame: Frame) -> Answer:
        return json_answer(throughput=spin(message_of(messages.Measure, frame).seconds, clock=self._clock))


def spin(seconds: float, *, clock: Callable[[], float] = time.monotonic) -> float:
    """Rounds of arithmetic on a matrix per second, tried for `seconds`; at least one round."""
    matrix = np.linspace(0.1, 1.0, _SPIN_SIZE * _SPIN_SIZE, dtype=np.float32).reshape(_SPIN_SIZE, _SPIN_SIZE)
    start, rounds = clock(), 0
    while True:
        matrix = np.sqrt(matrix @ matrix.T / _SPIN_SIZE + 0.25)
        rounds += 1
        elapsed = clock() - start
        if elapsed >= seconds:
            return rounds / max(elapsed, 1e-9)


# The lookups of a run differ in their arrays; their text is that of the one before.
_remembered = lru_cache(maxsize=256)(messages.Lookup.from_json)


def _lookup_of(text: str) -> messages.Lookup:
    return _remembered(text) if len(text) <= MAX_REMEMBERED else messages.Lookup.from_json(text)
