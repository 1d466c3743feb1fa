"""A link: requests to one server, each with a deadline, sent again after a failure. Several links are asked at once.

Sending again is safe for every call: reads change nothing, declarations may be repeated, and a push carries a number under
which the server applies it at most once.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from monolith.errors import (
    DeadlineExceededError,
    FencedError,
    MonolithError,
    OverloadedError,
    OwnershipChangedError,
    ServerRestoredError,
    UnavailableError,
)
from monolith.transport.calls import BasicCall, CallNumber
from monolith.transport.frames import Frame, instance_of, pieces, set_instance
from monolith.transport.pauses import spread
from monolith.transport.remote_errors import raised
from monolith.transport.stream_pool import Stream, StreamPool, Transport, connector_to

__all__ = ["Exchange", "Link", "finish_all", "finish_each"]

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two attempts: doubled each time, up to the longest."""
LONGEST_OVERLOAD_PAUSE = 5.0
"""The longest pause before an overloaded server is asked again."""


class Link:
    """The way to one server."""

    def __init__(
        self,
        address: str,
        *,
        timeout: float,
        token: str | None = None,
        tls_root_certs: bytes | None = None,
        max_streams: int = 4,
        transport: Transport | None = None,
    ) -> None:
        self.timeout = timeout
        self.instance = 0
        """The life of the server that is meant; 0 until it has answered."""
        self.server = 0
        """The identity of the server, which it keeps in all its lives; 0 if it was not asked."""
        self.left = False
        """Whether others own what the server owned: what was not sent yet is theirs."""
        self.on_restored: Callable[[int], None] | None = None
        """Called with the life that was meant when the server has restored itself in another one; raises, or has joined that."""
        self.on_unavailable: Callable[[], None] | None = None
        """Called between two attempts to reach the server: it may be elsewhere, or have left."""
        self._requests = itertools.count(1)
        self._max_streams = max_streams
        self._connector_to = partial(
            connector_to, transport=transport, timeout=timeout, token=token, tls_root_certs=tls_root_certs
        )
        self._earlier: list[StreamPool] = []
        self.address = address
        self.pool = self._pool_to(address)

    def _pool_to(self, address: str) -> StreamPool:
        return StreamPool(address, self._connector_to(address), max_streams=self._max_streams)

    def begin(
        self, call: CallNumber, text: str = "{}", arrays: Sequence[np.ndarray] = (), *, timeout: float | None = None
    ) -> Exchange:
        """A request that is still to be sent. Its arrays are not copied: nobody may write to them before it has finished."""
        request = next(self._requests)
        frame = pieces(call=call, request=request, instance=self.instance, text=text, arrays=arrays)
        limit = self.timeout if timeout is None else timeout
        return Exchange(self, frame, request, limit, changes=call.changes_state)

    def call(
        self, call: CallNumber, text: str = "{}", arrays: Sequence[np.ndarray] = (), *, timeout: float | None = None
    ) -> Frame:
        """The answer to one request."""
        return self.begin(call, text, arrays, timeout=timeout).finish()

    def move_to(self, address: str) -> None:
        """The server is at another address from now on; what is under way is sent there when it fails."""
        self._earlier.append(self.pool)
        self.address, self.pool = address, self._pool_to(address)

    def close(self) -> None:
        """Close the connection."""
        for pool in (self.pool, *self._earlier):
            pool.close()


class Exchange:
    """One request under way."""

    def __init__(self, link: Link, frame: list[np.ndarray], request: int, timeout: float, *, changes: bool) -> None:
        self._link = link
        self._frame = frame
        self._request = request
        self._deadline = time.monotonic() + timeout
        self._timeout = timeout
        self._stream: Stream | None = None
        self._pool = link.pool
        self._changes = changes
        self._in_doubt = False
        self.was_refused = False
        """Whether the error that `finish` raised is the server's answer, and not about the way there."""

    def send(self) -> None:
        """Send the request, once; a failure is dealt with by `finish`."""
        try:
            self._send()
        except (DeadlineExceededError, UnavailableError):
            self._drop()

    def finish(self) -> Frame:
        """The answer. After a failure the request is sent again, with growing pauses, until the deadline."""
        pause = FIRST_PAUSE
        while True:
            try:
                if self._stream is None:
                    self._send()
                return self._receive()
            except ServerRestoredError:
                self._drop()
                if self._link.on_restored is None or time.monotonic() >= self._deadline:
                    raise
                self._link.on_restored(instance_of(self._frame[0]))
                # The same request, under the same number: if it was applied before the server died, it is known there.
                set_instance(self._frame[0], self._link.instance)
            except OverloadedError as error:
                # It is there but overloaded: back off, and do not look for another server.
                self._drop()
                pause = self._paused(pause, LONGEST_OVERLOAD_PAUSE, error)
            except (UnavailableError, FencedError) as error:
                self._drop()
                self._look_for_server()
                pause = self._paused(pause, LONGEST_PAUSE, error)
            except BaseException:
                self._drop()
                raise

    def _paused(self, pause: float, longest: float, error: MonolithError) -> float:
        """Wait about twice as long as `pause`, the last wait. Returns how long. Raises `error` if the deadline comes first."""
        pause = spread(min(2 * pause, longest))
        if time.monotonic() + pause >= self._deadline:
            kind = OverloadedError if isinstance(error, OverloadedError) else UnavailableError
            raise kind(f"{error}; tried for {self._timeout:g} s") from None
        time.sleep(pause)
        return pause

    def abandon(self) -> None:
        """Forget the request; an answer that may still come is not waited for."""
        self._drop()

    def _look_for_server(self) -> None:
        if self._link.on_unavailable is not None:
            self._link.on_unavailable()
        if self._link.left and not self._in_doubt:
            raise OwnershipChangedError(f"the server at {self._link.address} has given its buckets to others")

    def _send(self) -> None:
        self._pool = self._link.pool
        self._stream = self._pool.take(deadline=self._deadline)
        self._in_doubt = self._changes
        self._stream.send(*self._frame, deadline=self._deadline)

    def _receive(self) -> Frame:
        assert self._stream is not None
        frame = self._stream.receive(self._request, deadline=self._deadline)
        error = raised(frame.text, self._link.address) if frame.call == BasicCall.ERROR else None
        if not isinstance(error, OverloadedError):  # its stream may have been for this answer alone
            stream, self._stream = self._stream, None
            self._pool.give_back(stream)
        if error is not None:
            self.was_refused = True
            raise error
        self._link.instance = self._link.instance or frame.instance
        return frame

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            self._pool.discard(stream)


def finish_all(exchanges: Iterable[Exchange]) -> list[Frame]:
    """As `finish_each`, and the first error is raised."""
    outcomes = finish_each(exchanges)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, Frame)]


def finish_each(exchanges: Iterable[Exchange]) -> list[Frame | Exception]:
    """Send all requests, then take all answers: servers work beside each other, and no thread is needed for it.

    All are waited for, also after a failure, so that nothing is under way any more.
    """
    started = list(exchanges)
    for exchange in started:
        exchange.send()
    outcomes: list[Frame | Exception] = []
    for exchange in started:
        try:
            outcomes.append(exchange.finish())
        except Exception as error:
            outcomes.append(error)
        except BaseException:
            for other in started:
                other.abandon()
            raise
    return outcomes
