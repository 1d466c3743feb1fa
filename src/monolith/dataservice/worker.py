"""`DataWorker`: reads splits ahead and sends their batches to trainers."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from monolith.data.prefetch import PrefetchQueue
from monolith.dataservice import protocol
from monolith.dataservice.dataset import KINDS, Kinds, SplitReader, open_split, require_below, require_roots
from monolith.dataservice.protocol import (
    MAX_POSITION_CHARS,
    DataCall,
    DataClientConfig,
    HostPort,
    ReadBatch,
    ReadPart,
    arrays_of,
    ask,
    data_link,
)
from monolith.errors import ConfigError, InvalidArgumentError, ServerError, StalePushError
from monolith.features import Batch
from monolith.transport.calls import Answer, BasicCall, FrameCalls, json_answer, message_of
from monolith.transport.frames import Frame
from monolith.transport.link import Link
from monolith.transport.server import FrameServer, ListenConfig, require_safe

__all__ = ["DataWorker", "DataWorkerConfig", "NOT_READY", "OpenSplits", "SPLIT_END", "SplitStream", "position_of"]

SPLIT_END = Answer(text=ReadPart(state="end").model_dump_json())
NOT_READY = Answer(text=ReadPart(state="wait").model_dump_json())

_Read = tuple[str, Answer]
"""The position after a batch, and the batch as it is sent."""


class SplitStream:
    """Reads a split ahead in a thread. It keeps the last answer for a trainer that asks again.

    Example:
        >>> from monolith.dataservice.dataset import DatasetConfig, Split
        >>> from monolith.dataservice.dataset import open_split
        >>> dataset = DatasetConfig(kind="click_stream", fields={"batches": 1, "batch_size": 2, "users": 9})
        >>> stream = SplitStream(lambda: open_split(dataset, Split(number=0)), "")
        >>> first = stream.answer("", wait=60)
        >>> stream.answer("", wait=60) is first  # a retry
        True
        >>> stream.answer(json.loads(first.text)["position"], wait=60) == SPLIT_END
        True
    """

    def __init__(
        self, open_reader: Callable[[], SplitReader], position: str, *, read_ahead: int = 4, max_bytes: int = 2**28
    ) -> None:
        self._at = position
        self._before: str | None = None
        """The position of the last request that was answered with a batch."""
        self._last: Answer | None = None
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._queue: PrefetchQueue[_Read] = PrefetchQueue(read_ahead)
        threading.Thread(
            target=_read, args=(open_reader, position, self._queue, max_bytes), name="monolith-split", daemon=True
        ).start()

    def answer(self, position: str, *, wait: float) -> Answer | None:
        """Return the batch after `position`, waiting `wait` seconds at most. None if the stream is at another position."""
        with self._lock:
            if position == self._before:
                return self._last
            if position != self._at:
                return None
            if self._failure is not None:
                raise self._failure
            try:
                behind, answer = self._queue.get(timeout=wait)
            except TimeoutError:
                return NOT_READY
            except StopIteration:
                return SPLIT_END
            except BaseException as error:
                self._failure = error
                raise
            self._before, self._at, self._last = position, behind, answer
            return answer

    def close(self) -> None:
        """Stop the thread as soon as its read returns."""
        self._queue.close(drop=True)


def _read(open_reader: Callable[[], SplitReader], position: str, queue: PrefetchQueue[_Read], max_bytes: int) -> None:
    try:
        reader = open_reader()
        for batch in reader:
            behind = position_of(reader)
            if behind == position:
                # The position would not tell this batch from the next.
                raise InvalidArgumentError(f"{type(reader).__name__}: its state_dict did not change with a batch")
            position = behind
            if not queue.put((behind, _answer(batch, behind, max_bytes))):
                return
        queue.close()
    except BaseException as error:
        queue.close(error)


def position_of(reader: SplitReader) -> str:
    """Return the position of `reader` as JSON, as it is sent and stored."""
    try:
        position = json.dumps(reader.state_dict(), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{type(reader).__name__}: expected a state_dict of plain values that can be written as JSON; {error}"
        ) from None
    if len(position) > MAX_POSITION_CHARS:
        raise InvalidArgumentError(
            f"{type(reader).__name__}: its state_dict has {len(position):,} characters, more than {MAX_POSITION_CHARS:,}"
        )
    return position


def _answer(batch: Batch, behind: str, max_bytes: int) -> Answer:
    heads, arrays = arrays_of(batch)
    size = sum(array.nbytes for array in arrays)
    if size > max_bytes:
        raise InvalidArgumentError(f"a batch has {size:,} bytes, more than {max_bytes:,}; give a smaller batch_size")
    return Answer(
        text=ReadPart(state="batch", position=behind, columns=tuple(heads)).model_dump_json(), arrays=tuple(arrays)
    )


_Key = tuple[str, int, int, int, int]


class OpenSplits:
    """Streams by job, trainer, session, epoch and split. Safe from many threads.

    A request that does not continue a stream opens it again at the requested position, so it does not matter which data worker
    answered before. At most `max_splits` are kept, and none that was idle for `idle_secs`.
    """

    def __init__(
        self,
        open_stream: Callable[[ReadBatch], SplitStream],
        *,
        max_splits: int = 64,
        idle_secs: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_stream = open_stream
        self._max_splits, self._idle_secs, self._clock = max_splits, idle_secs, clock
        self._streams: dict[_Key, SplitStream] = {}
        self._used: dict[_Key, float] = {}
        self._sessions: dict[str, dict[int, int]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many are open."""
        return len(self._streams)

    def answer(self, request: ReadBatch, *, wait: float) -> Answer:
        """Return the answer to `request`, waiting `wait` seconds at most."""
        key = (request.job, request.trainer, request.session, request.epoch, request.split)
        if self._is_stale(key):
            raise StalePushError(
                f"trainer {request.trainer} of job {request.job!r} has been started again elsewhere; this process should end"
            )
        stream = self._stream(key, request, instead_of=None)
        try:
            while (answer := stream.answer(request.position, wait=wait)) is None:
                stream = self._stream(key, request, instead_of=stream)
        except BaseException:
            # The next attempt opens it again: the cause may have been repaired.
            self._forget(key, stream)
            raise
        if answer == SPLIT_END:
            self._forget(key, stream)
        return answer

    def know_sessions(self, sessions: dict[str, dict[int, int]]) -> None:
        """Refuse trainers that were replaced. The dispatcher refuses them when they open a split, this while they read one."""
        with self._lock:
            self._sessions = sessions
            for key in list(filter(self._is_stale, self._streams)):
                self._close(key)

    def close(self) -> None:
        """Close all."""
        with self._lock:
            for key in list(self._streams):
                self._close(key)

    def _is_stale(self, key: _Key) -> bool:
        job, trainer, session, _, _ = key
        return session < self._sessions.get(job, {}).get(trainer, 0)

    def _stream(self, key: _Key, request: ReadBatch, *, instead_of: SplitStream | None) -> SplitStream:
        with self._lock:
            now = self._clock()
            if self._streams.get(key) in (None, instead_of):
                self._close(key)
                self._evict(now)
                self._streams[key] = self._open_stream(request)
            self._used[key] = now
            return self._streams[key]

    def _evict(self, now: float) -> None:
        oldest_first = sorted(self._streams, key=self._used.__getitem__)
        for place, key in enumerate(oldest_first):
            if now - self._used[key] > self._idle_secs or len(oldest_first) - place >= self._max_splits:
                self._close(key)

    def _forget(self, key: _Key, stream: SplitStream) -> None:
        with self._lock:
            if self._streams.get(key) is stream:
                self._close(key)

    def _close(self, key: _Key) -> None:
        stream = self._streams.pop(key, None)
        self._used.pop(key, None)
        if stream is not None:
            stream.close()


_log = logging.getLogger(__name__)
READ_WAIT_SECS = 0.5
"""How long a request waits for a batch that is being read before the answer is "wait"."""


class DataWorkerConfig(ListenConfig):
    """Where a data worker listens, and its dispatcher.

    Example:
        >>> DataWorkerConfig(dispatcher="127.0.0.1:7200").read_ahead
        4
    """

    dispatcher: HostPort
    """host:port."""
    advertise: HostPort | None = None
    """host:port at which trainers reach it. None: the address it listens on."""
    client: DataClientConfig = DataClientConfig()
    """How it reaches the dispatcher."""
    read_ahead: Annotated[int, Field(ge=1)] = 4
    """Batches of each split that are read ahead."""
    max_splits: Annotated[int, Field(ge=1)] = 64
    """Open splits. Beyond this the least recently used are closed."""
    roots: tuple[str, ...] = ()
    """Folders or URL prefixes that contain the files. "*": any file that this process may read. Without roots, a worker on
    loopback reads any file, and one that other machines can reach does not start."""


class _WorkerCalls(FrameCalls):
    """Answers the calls of a data worker, without the network."""

    def __init__(self, config: DataWorkerConfig, dispatcher: Link, kinds: Kinds) -> None:
        super().__init__(max_frame_bytes=config.max_message_bytes)
        self._config, self._dispatcher, self._kinds = config, dispatcher, kinds
        self.splits = OpenSplits(self._open_stream, max_splits=config.max_splits)
        self._handlers |= {
            BasicCall.HEALTH: lambda frame: json_answer(streams=len(self.splits)),
            DataCall.READ_BATCH: self._read_batch,
        }

    def _require_mine(self, frame: Frame) -> None:
        """A data worker holds no state, so any of its incarnations may answer."""

    def _read_batch(self, frame: Frame) -> Answer:
        return self.splits.answer(message_of(ReadBatch, frame), wait=READ_WAIT_SECS)

    def _open_stream(self, request: ReadBatch) -> SplitStream:
        return SplitStream(
            lambda: self._open(request),
            request.position,
            read_ahead=self._config.read_ahead,
            max_bytes=self._config.max_message_bytes,
        )

    def _open(self, request: ReadBatch) -> SplitReader:
        # From the dispatcher, not from the trainer: it also checks that the split belongs to this trainer.
        question = protocol.DescribeSplit(**request.model_dump(exclude={"position"}))
        part = ask(self._dispatcher, DataCall.DESCRIBE_SPLIT, question, protocol.DescribedSplit)
        if part.split.file is not None:
            require_below(part.split.file, self._config.roots)
        return open_split(part.dataset, part.split, request.position, kinds=self._kinds)


class DataWorker(FrameServer):
    """Serves until `close`, and sends heartbeats to the dispatcher.

    `kinds` adds sources by name: functions of `paths` and the fields of a dataset.

    Example:
        >>> from monolith.dataservice import DataDispatcher
        >>> with DataDispatcher() as dispatcher, DataWorker(DataWorkerConfig(dispatcher=dispatcher.address)) as worker:
        ...     worker.address.startswith("127.0.0.1:")
        True
    """

    def __init__(self, config: DataWorkerConfig, kinds: Kinds | None = None) -> None:
        self.config = config
        require_safe(config)
        require_roots(config, config.roots)
        if config.advertise is None and config.host in ("0.0.0.0", "::"):
            raise ConfigError(
                f"DataWorkerConfig.advertise: expected host:port that trainers can reach, as host is {config.host}"
            )
        self._link = data_link(config.dispatcher, config.client, timeout=config.client.timeout, max_streams=8)
        calls = _WorkerCalls(config, self._link, {**KINDS, **(kinds or {})})
        super().__init__(config, calls)
        self._splits = calls.splits
        self.advertised = config.advertise or self.address
        """host:port that the dispatcher gives to trainers."""
        self._closing = threading.Event()
        threading.Thread(target=self._send_heartbeats, name="monolith-data-worker", daemon=True).start()

    def close(self, *, grace: float = 5.0) -> bool:
        """Refuse new requests, finish running ones, stop listening. Returns whether all ended within `grace` seconds."""
        self._closing.set()
        clean = super().close(grace=grace)
        self._splits.close()
        self._link.close()
        return clean

    def _send_heartbeats(self) -> None:
        pause = 0.0
        while not self._closing.wait(pause):
            try:
                self._link.instance = 0  # any incarnation of the dispatcher will do
                heartbeat = protocol.Heartbeat(address=self.advertised, streams=len(self._splits))
                living = ask(self._link, DataCall.HEARTBEAT, heartbeat, protocol.Living)
            except ServerError as error:
                pause = 1.0
                if not self._closing.is_set():
                    _log.warning("cannot send a heartbeat to the dispatcher: %s", error)
            else:
                self._splits.know_sessions(living.sessions)
                pause = living.lease_secs / 5
