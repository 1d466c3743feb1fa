"""`DataWorker`: reads splits and hands their batches to the trainers that have them."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from monolith.data.prefetch import PrefetchQueue
from monolith.dataservice import protocol as messages
from monolith.dataservice.dataset import KINDS, Kinds, SplitReader, open_split, require_below, require_roots
from monolith.dataservice.protocol import (
    MAX_POSITION,
    Address,
    DataCall,
    DataClientConfig,
    ReadBatch,
    ReadPart,
    arrays_of,
    ask,
    link_to,
)
from monolith.errors import ConfigError, InvalidArgumentError, ServerError, StalePushError
from monolith.features import Batch
from monolith.transport.calls import Answer, BasicCall, FrameCalls, json_answer, message_of
from monolith.transport.frames import Frame
from monolith.transport.link import Link
from monolith.transport.server import FrameServer, ListenConfig, require_safe

__all__ = ["DataWorker", "DataWorkerConfig", "END", "OpenSplits", "SplitStream", "WAIT", "position_of"]

END = Answer(text=ReadPart(state="end").model_dump_json())
WAIT = Answer(text=ReadPart(state="wait").model_dump_json())

_Read = tuple[str, Answer]
"""A batch as it is sent, and the position behind it."""


class SplitStream:
    """A thread that reads, and the answer to the last question, in case it got lost.

    Example:
        >>> from monolith.dataservice.dataset import DatasetConfig, Split
        >>> from monolith.dataservice.dataset import open_split
        >>> dataset = DatasetConfig(kind="click_stream", fields={"batches": 1, "batch_size": 2, "users": 9})
        >>> stream = SplitStream(lambda: open_split(dataset, Split(number=0)), "")
        >>> first = stream.answer("", wait=60)
        >>> stream.answer("", wait=60) is first  # the same question
        True
        >>> stream.answer(json.loads(first.text)["position"], wait=60) == END
        True
    """

    def __init__(
        self, open_reader: Callable[[], SplitReader], position: str, *, read_ahead: int = 4, max_bytes: int = 2**28
    ) -> None:
        self._at = position
        self._before: str | None = None
        """The position of the last question that was answered with a batch."""
        self._last: Answer | None = None
        self._failure: BaseException | None = None
        self._turn = threading.Lock()
        self._queue: PrefetchQueue[_Read] = PrefetchQueue(read_ahead)
        threading.Thread(
            target=_read, args=(open_reader, position, self._queue, max_bytes), name="monolith-split", daemon=True
        ).start()

    def answer(self, position: str, *, wait: float) -> Answer | None:
        """The batch behind `position`, waited for so many seconds; None if the stream is at another position."""
        with self._turn:
            if position == self._before:
                return self._last
            if position != self._at:
                return None
            if self._failure is not None:
                raise self._failure
            try:
                behind, answer = self._queue.get(timeout=wait)
            except TimeoutError:
                return WAIT
            except StopIteration:
                return END
            except BaseException as error:
                self._failure = error
                raise
            self._before, self._at, self._last = position, behind, answer
            return answer

    def close(self) -> None:
        """Let the thread end as soon as its read returns."""
        self._queue.close(drop=True)


def _read(open_reader: Callable[[], SplitReader], position: str, queue: PrefetchQueue[_Read], max_bytes: int) -> None:
    try:
        reader = open_reader()
        for batch in reader:
            behind = position_of(reader)
            if behind == position:
                # Asked for what is behind it, nobody could tell this batch from the next.
                raise InvalidArgumentError(f"{type(reader).__name__}: its state_dict did not change with a batch")
            position = behind
            if not queue.put((behind, _answer(batch, behind, max_bytes))):
                return
        queue.close()
    except BaseException as error:
        queue.close(error)


def position_of(reader: SplitReader) -> str:
    """The place of `reader` as JSON, which is what travels and is kept."""
    try:
        position = json.dumps(reader.state_dict(), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{type(reader).__name__}: expected a state_dict of plain values, which go into JSON; {error}"
        ) from None
    if len(position) > MAX_POSITION:
        raise InvalidArgumentError(
            f"{type(reader).__name__}: its state_dict has {len(position):,} characters, more than {MAX_POSITION:,}"
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

    A question that does not continue a stream opens it anew at the place asked for: so it does not matter who was asked
    before, nor whether this process was there. At most `max_splits` are kept, and none that was idle for `idle_secs`.
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
        """The answer to `request`, waited for so many seconds."""
        key = (request.job, request.trainer, request.session, request.epoch, request.split)
        if self._is_stale(key):
            raise StalePushError(
                f"trainer {request.trainer} of job {request.job!r} has begun anew elsewhere; this one should end"
            )
        stream = self._stream(key, request, instead_of=None)
        try:
            while (answer := stream.answer(request.position, wait=wait)) is None:
                stream = self._stream(key, request, instead_of=stream)
        except BaseException:
            # Whoever asks again may have mended it.
            self._forget(key, stream)
            raise
        if answer == END:
            self._forget(key, stream)
        return answer

    def know_sessions(self, sessions: dict[str, dict[int, int]]) -> None:
        """Turn away trainers that were replaced: the dispatcher does it when they open a split, this when they go on reading."""
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
                self._make_room(now)
                self._streams[key] = self._open_stream(request)
            self._used[key] = now
            return self._streams[key]

    def _make_room(self, now: float) -> None:
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
WAIT_SECS = 0.5
"""How long a question waits for a batch that is being read, before the answer is: not yet."""


class DataWorkerConfig(ListenConfig):
    """Where a data worker listens and whom it works for.

    Example:
        >>> DataWorkerConfig(dispatcher="127.0.0.1:7200").read_ahead
        4
    """

    dispatcher: Address
    """host:port."""
    advertise: Address | None = None
    """host:port that trainers reach it by; None: the one it listens on."""
    client: DataClientConfig = DataClientConfig()
    """How it reaches the dispatcher."""
    read_ahead: Annotated[int, Field(ge=1)] = 4
    """Batches of each split that are read before they are asked for."""
    max_splits: Annotated[int, Field(ge=1)] = 64
    """Splits that are open at the same time; beyond, those that nobody asked for the longest are closed."""
    roots: tuple[str, ...] = ()
    """Folders, or beginnings of URLs, that files must be below. "*": any file this process may read. Without roots, any file on
    loopback; on an address that other machines can reach, the worker does not start."""


class _WorkerCalls(FrameCalls):
    """What a data worker does, without the network around it."""

    def __init__(self, config: DataWorkerConfig, dispatcher: Link, kinds: Kinds) -> None:
        super().__init__(max_frame_bytes=config.max_message_bytes)
        self._config, self._dispatcher, self._kinds = config, dispatcher, kinds
        self.splits = OpenSplits(self._open_stream, max_splits=config.max_splits)
        self._handlers |= {
            BasicCall.HEALTH: lambda frame: json_answer(streams=len(self.splits)),
            DataCall.READ_BATCH: self._read_batch,
        }

    def _require_mine(self, frame: Frame) -> None:
        """Nothing is lost with a data worker, so any of its lives may answer."""

    def _read_batch(self, frame: Frame) -> Answer:
        return self.splits.answer(message_of(ReadBatch, frame), wait=WAIT_SECS)

    def _open_stream(self, request: ReadBatch) -> SplitStream:
        return SplitStream(
            lambda: self._open(request),
            request.position,
            read_ahead=self._config.read_ahead,
            max_bytes=self._config.max_message_bytes,
        )

    def _open(self, request: ReadBatch) -> SplitReader:
        # Asked of the dispatcher, not told by the trainer: it also says whether the split is this trainer's.
        question = messages.DescribeSplit(**request.model_dump(exclude={"position"}))
        part = ask(self._dispatcher, DataCall.DESCRIBE_SPLIT, question, messages.Part)
        if part.split.file is not None:
            require_below(part.split.file, self._config.roots)
        return open_split(part.dataset, part.split, request.position, kinds=self._kinds)


class DataWorker(FrameServer):
    """Serves until `close`, and tells the dispatcher all the time that it is alive.

    `kinds`: further sources by name, functions of `paths` and the fields of a dataset.

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
        self._link = link_to(config.dispatcher, config.client, timeout=config.client.timeout, max_streams=8)
        calls = _WorkerCalls(config, self._link, {**KINDS, **(kinds or {})})
        super().__init__(config, calls)
        self._splits = calls.splits
        self.advertised = config.advertise or self.address
        """host:port that trainers are told."""
        self._closing = threading.Event()
        threading.Thread(target=self._stay_known, name="monolith-data-worker", daemon=True).start()

    def close(self, *, grace: float = 5.0) -> bool:
        """Finish what is under way, refuse what comes, stop listening; whether all ended within `grace` seconds."""
        self._closing.set()
        clean = super().close(grace=grace)
        self._splits.close()
        self._link.close()
        return clean

    def _stay_known(self) -> None:
        pause = 0.0
        while not self._closing.wait(pause):
            try:
                self._link.instance = 0  # a dispatcher that was started again is as good
                heartbeat = messages.Heartbeat(address=self.advertised, streams=len(self._splits))
                living = ask(self._link, DataCall.HEARTBEAT, heartbeat, messages.Living)
            except ServerError as error:
                pause = 1.0
                if not self._closing.is_set():
                    _log.warning("the dispatcher does not hear this data worker: %s", error)
            else:
                self._splits.know_sessions(living.sessions)
                pause = living.lease_secs / 5
