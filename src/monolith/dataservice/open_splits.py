"""The splits a data worker reads at the moment: opened when they are asked for, closed when nobody asks any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from monolith.dataservice.messages import ReadBatch
from monolith.dataservice.split_stream import END, SplitStream
from monolith.errors import StalePushError
from monolith.transport.calls import Answer

__all__ = ["OpenSplits"]

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
