"""`ParameterServer`: tables and dense parameters for many workers, over streams that stay open."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from monolith.errors import FencedError, ServerRestoredError
from monolith.follow.calls import FollowCalls
from monolith.follow.feed import EVERY_SECS, LAST_SECS, MAX_REWOUND, Feed, LogPosition
from monolith.log.segment_format import SegmentInfo
from monolith.ps.protocol import messages
from monolith.ps.protocol.calls import AUTHORITATIVE, CHANGES, READ_IN_PLACE, Call
from monolith.ps.rebalance.moves import TRANSFER_BYTES, BucketMoves
from monolith.ps.rebalance.transfer import BucketInstalls, MoverLease
from monolith.ps.server.calls import BucketCalls, CoordinationCalls, DenseCalls, TableCalls
from monolith.ps.server.coordination import CoordinationFile
from monolith.ps.server.folder import ServerFolder, kept_identity
from monolith.ps.server.ledger_state import read_ledger
from monolith.ps.server.owned_buckets import OwnedBuckets
from monolith.ps.server.pushes import WorkerRecord
from monolith.ps.server.saving import LogCalls, SaveCalls
from monolith.ps.server.state import ServerState
from monolith.state.restore_points import Moment
from monolith.state.storage import StrPath
from monolith.table import EmbeddingTable
from monolith.table.buckets import NUM_BUCKETS, mask_of, ranges_of
from monolith.transport.calls import Answer, BasicCall, CallNumber, FrameCalls, json_answer, message_of
from monolith.transport.frames import Frame
from monolith.transport.link import Link
from monolith.transport.server import FrameServer, ListenConfig, read_pem, require_safe
from monolith.transport.tokens import reveal
from monolith.urls import LocalPath, Location

__all__ = ["Dispatcher", "ParameterServer", "ServerConfig"]

_log = logging.getLogger(__name__)

PEER_SECONDS = 10.0
"""How long another server may take to answer."""
MAX_CACHED = 16384
"""Characters of the longest text of a lookup that is cached, so that clients cannot fill the memory."""


_SPIN_SIZE = 256


class Dispatcher(FrameCalls):
    """Answers frames, without the network. `answer` may run in many threads and never raises: errors become error frames.

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
        move_piece_bytes: int = TRANSFER_BYTES,
        feed_secs: float = EVERY_SECS,
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
            state, owned, lease, commit=self.commit, connect=connect, transfer_bytes=move_piece_bytes
        )
        self._handlers |= {
            BasicCall.HEALTH: self._health,
            Call.JOIN: self._join,
            Call.POSITIONS: self._positions,
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
        self.feed = Feed(
            lambda: {table.name: table for table in state.tables.all()},
            dense=lambda: dict(zip(names := state.dense.declared(), state.dense.read(names), strict=True)),
            every=feed_secs,
            moment=lambda: (state.step, 0),
            owner=_OwnedMask(owned),
            log=_FolderLog(lambda: self._folder),
        )
        state.memory.count("what followers read", lambda: self.feed.nbytes)
        self._handlers |= FollowCalls(self.feed, on_follower=self._note_follower, moved_to=lambda: owned.gave).calls()
        # Last: the state of the calls above is restored with the rest.
        if folder is not None:
            self._folder = ServerFolder(
                folder, state, flush_secs=log_flush_secs, take_over=take_over, restore_to=restore_to
            )
            owned.identify(kept_identity(folder, owned.server))
            self._keep_coordination(folder)
            if self._folder.is_followed:
                self._note_follower()
                self.feed.start(complete=True)
        log_new = state.tables.on_new
        state.tables.on_new = lambda made: self._made(made, log_new)
        self._moves.resume()

    def _made(self, tables: list[EmbeddingTable], log_new: Callable[[list[EmbeddingTable]], None]) -> None:
        log_new(tables)
        self.feed.add_tables({table.name: table for table in tables})

    def _note_follower(self) -> None:
        if self._folder is not None:
            self._folder.note_follower()
            self._folder.change_log.on_cut = self._cut_for_followers

    def _cut_for_followers(self) -> Callable[[SegmentInfo], None]:
        durable = self.feed.cut()
        return lambda info: durable(LogPosition(sequence=info.sequence, checksum=info.checksum))

    def _keep_coordination(self, folder: Path) -> None:
        kept = CoordinationFile(folder)
        if kept.text is not None:
            self._state.coordination.load(kept.text)
        self._state.coordination.keep = kept.write

    def commit(self) -> None:
        """Make everything so far durable. Does nothing without a folder."""
        if self._folder is not None:
            self._folder.commit()

    def stop(self, *, grace: float) -> bool:
        """As of every server. Buckets in transit stay in transit."""
        self._moves.stop()
        # Replicas read the last changes before the server refuses them too.
        try:
            if not self.feed.flush(min(grace, LAST_SECS)):
                _log.warning("not all replicas have read the last changes; they read them when it is started again")
        except Exception:
            _log.exception(
                "the last changes could not be published; replicas read them when the server is started again"
            )
        self.feed.release()
        return super().stop(grace=grace)

    def close(self) -> None:
        """Release the folder. Called after `stop`."""
        self.feed.close()
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
                # Another process owns the folder now.
                self.stop_asked.set()
                raise
        return answer

    def _require_mine(self, frame: Frame) -> None:
        if self._restored and frame.instance not in (0, self.instance):
            raise ServerRestoredError(
                f"the server was started again and has restored itself to number {self._restored} of its log; rejoin()"
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
            memory_limit=self._state.memory.limit,
            out_of_memory=self._state.memory.full,
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

    def _positions(self, frame: Frame) -> Answer:
        with self._state.gate.closed():
            mask = mask_of(self._owned.ranges if self._owned.version else ((0, NUM_BUCKETS),))
            found: dict[str, tuple[messages.HeldPosition, ...]] = {}
            for name, worker in self._state.pushes.records().items():
                buckets = worker.buckets.at(mask)
                unseen = (mask & ~mask_of(pair for at in buckets for pair in at.ranges)).any()
                parameters = worker.parameters.at(self._state.dense.declared())
                positions = [at.position for at in buckets] + [at.position for at in parameters]
                if unseen and positions:
                    positions.append(messages.HeldPosition(batches=0, epoch=0))
                found[name] = tuple(positions)
        return Answer(text=messages.WorkerPositionsAt(workers=found).model_dump_json())

    def _lookup(self, frame: Frame, out: np.ndarray | None) -> np.ndarray:
        text = frame.text
        lookup = (_cached_lookup if len(text) <= MAX_CACHED else messages.Lookup.from_json)(text)
        self._owned.require_read(lookup.map)
        buffer = self._state.tables.answer(
            lookup,
            frame,
            instance=self.instance,
            max_bytes=self._max_frame_bytes,
            memory=self.frames,
            out=out,
        )
        # Rows may have been removed because they were moved away meanwhile.
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


class _OwnedMask:
    """The buckets of a server, for its feed."""

    def __init__(self, owned: OwnedBuckets) -> None:
        self._owned = owned

    def mask(self) -> np.ndarray:
        return mask_of(self._owned.ranges)


class _FolderLog:
    """The change log of a server, for its feed."""

    def __init__(self, folder: Callable[[], ServerFolder | None]) -> None:
        self._folder = folder

    def changed_since(self, position: LogPosition) -> Mapping[str, np.ndarray] | None:
        folder = self._folder()
        if folder is None:
            return None
        return folder.change_log.changed_since(position.sequence, position.checksum, limit=MAX_REWOUND)


def spin(seconds: float, *, clock: Callable[[], float] = time.monotonic) -> float:
    """Return rounds of arithmetic on a matrix per second, measured for `seconds` and at least one round."""
    matrix = np.linspace(0.1, 1.0, _SPIN_SIZE * _SPIN_SIZE, dtype=np.float32).reshape(_SPIN_SIZE, _SPIN_SIZE)
    start, rounds = clock(), 0
    while True:
        matrix = np.sqrt(matrix @ matrix.T / _SPIN_SIZE + 0.25)
        rounds += 1
        elapsed = clock() - start
        if elapsed >= seconds:
            return rounds / max(elapsed, 1e-9)


# The lookups of a run differ in their arrays, rarely in their text.
_cached_lookup = lru_cache(maxsize=256)(messages.Lookup.from_json)


class ServerConfig(ListenConfig):
    """Where a server listens, which clients it accepts, its limits and its folder.

    Example:
        >>> ServerConfig(memory_limit=8 * 2**30).host
        '127.0.0.1'
    """

    config_group: ClassVar[str] = "run"

    memory_limit: Annotated[int | None, Field(gt=0)] = None
    """Bytes that the server may hold: tables, dense parameters, positions of workers, coordination, requests and answers. What
    would need more is refused. None: no limit but 1 GiB for requests and answers."""
    folder: LocalPath | None = None
    """Folder for its log of changes, snapshots and checkpoints, on a disk that survives the server. A server that is started on a
    folder with a log restores itself from it. None: in memory only."""
    log_flush_secs: Annotated[float | None, Field(ge=0)] = 0.0
    """Seconds between two commits to the log in `folder`, which is what a crash loses at most. 0: a push is answered when it is
    durable, so no acknowledged push is lost. None: the log is written with checkpoints only."""
    take_over: bool = False
    """Take `folder` from a process that still holds it, such as one that hangs. That process is fenced and ends."""
    restore_to: Moment | None = None
    """Restore step=N, time=UNIX_SECONDS or sequence=N of the log in `folder` and discard everything later. For a log that has
    lost a segment. The server does so once for each value."""
    restore_roots: tuple[Location, ...] = ()
    """Folders and URLs that clients may let the server restore checkpoints from, in addition to its own model_dir: `folder`,
    or, if it is called <model_dir>/ps/<number>, that model_dir."""
    tls_root_certs: Path | None = None
    """CA bundle (PEM) that signed the certificates of other servers, for moving buckets to them. None: `tls_cert`."""
    feed_secs: Annotated[float, Field(gt=0)] = EVERY_SECS
    """Seconds between two publications of changed rows to replicas that follow the server. Nothing is done while none does."""
    move_piece_bytes: Annotated[int, Field(gt=0)] = TRANSFER_BYTES
    """Bytes of rows that are moved to another server at a time. Changes to these rows wait for the transfer."""


class ParameterServer(FrameServer):
    """Serves from its construction until `close`.

    Threads of the transport handle requests: they decode arrays and call the core.

    Example:
        >>> from monolith.ps import ParameterServer, ServerStore
        >>> from monolith.testing import sgd_table_config
        >>> with ParameterServer() as server, ServerStore([server.address]) as store:
        ...     store.declare([sgd_table_config(2, name="item")])
        ...     store.stats()["item"].rows
        0
    """

    def __init__(self, config: ServerConfig | None = None) -> None:
        self.config = config or ServerConfig()
        require_safe(self.config)
        self._dispatcher = Dispatcher(
            memory_limit=self.config.memory_limit,
            max_frame_bytes=self.config.max_message_bytes,
            folder=self.config.folder,
            log_flush_secs=self.config.log_flush_secs,
            take_over=self.config.take_over,
            restore_to=self.config.restore_to,
            restore_roots=self.config.restore_roots,
            connect=self._connect,
            move_piece_bytes=self.config.move_piece_bytes,
            feed_secs=self.config.feed_secs,
        )
        try:
            super().__init__(self.config, self._dispatcher)
        except BaseException:
            self._dispatcher.close()
            raise

    @property
    def silence(self) -> float:
        """Seconds since the last call of a client, other than a health check."""
        return self._dispatcher.silence

    @property
    def feed(self) -> Feed:
        """The changes of its rows, for somebody in this process."""
        return self._dispatcher.feed

    def _connect(self, address: str) -> Link:
        """Return a link to another server of the same group, which requires the same token."""
        certificates = self.config.tls_root_certs or self.config.tls_cert
        return Link(
            address,
            timeout=PEER_SECONDS,
            token=reveal(self.config.token),
            tls_root_certs=None if certificates is None else read_pem(certificates, "tls_root_certs"),
            transport=self.config.transport,
        )

    def close(self, *, grace: float = 5.0) -> bool:
        """Refuse new requests, finish running ones, stop listening. Returns whether all ended within `grace` seconds.

        A stream whose client neither sends nor closes cannot be ended: it ends with the process.
        """
        clean = super().close(grace=grace)
        if self._bound.is_here:
            self._dispatcher.close()
        return clean
