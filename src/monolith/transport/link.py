"""`Link`: sends requests to one server, with deadlines and retries, over a pool of streams.

Retries are safe because every call is idempotent: reads change nothing, declarations may be repeated, and a push has a sequence
number under which the server applies it at most once.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal, Protocol

import numpy as np

from monolith.console import Outage
from monolith.errors import (
    ConfigError,
    DeadlineExceededError,
    FencedError,
    MonolithError,
    OverloadedError,
    OwnershipChangedError,
    ServerRestoredError,
    UnavailableError,
)
from monolith.process_bound import ProcessBound
from monolith.transport.calls import BasicCall, CallNumber
from monolith.transport.errors import decode_error
from monolith.transport.frames import Frame, encode_parts, instance_of, set_instance

__all__ = [
    "CallStream",
    "Connector",
    "Exchange",
    "Link",
    "StreamPool",
    "Transport",
    "connector_to",
    "finish_all",
    "finish_each",
    "jittered",
]

# Not the generator of the process: a retry in some thread would change what a seeded program draws.
_random = random.SystemRandom()


def jittered(seconds: float) -> float:
    """Return between half of `seconds` and all of it, so that the clients of a server do not retry all at once."""
    return seconds * _random.uniform(0.5, 1.0)


Transport = Literal["socket", "flight"]
"""How frames travel: over plain sockets, or as messages of Arrow Flight, which can encrypt."""


_log = logging.getLogger(__name__)


class CallStream(Protocol):
    """One open exchange with a server: a request is sent, then its answer received."""

    def send(self, *parts: np.ndarray, deadline: float) -> None:
        """Send the bytes of a request, in order."""

    def receive(self, request: int, *, deadline: float) -> Frame:
        """Return the answer to `request`. Answers to other requests, delivered twice by the network, are skipped."""

    @property
    def is_open(self) -> bool:
        """Whether the server has not closed it, as far as the client knows."""

    def close(self) -> None:
        """Close the stream in any state."""


class Connector(Protocol):
    """Opens streams to one server."""

    def open(self, *, deadline: float) -> CallStream:
        """Return a new stream. Raises `UnavailableError` or, if the token is refused, `AuthenticationError`."""

    def close(self) -> None:
        """Close what the streams share."""


def connector_to(
    address: str, *, transport: Transport | None, timeout: float, token: str | None, tls_root_certs: bytes | None
) -> Connector:
    """Return a connector to `address`. If `transport` is None, it uses Flight with TLS and sockets without."""
    if (transport or ("socket" if tls_root_certs is None else "flight")) == "socket":
        from monolith.transport.sockets import SocketConnector

        if tls_root_certs is not None:
            raise ConfigError(
                "transport: plain sockets cannot encrypt; leave out transport='socket', or tls_root_certs"
            )
        return SocketConnector(address, token=token)
    from monolith.transport.flight import FlightConnector

    return FlightConnector(address, connect_timeout=timeout, token=token, tls_root_certs=tls_root_certs)


class StreamPool:
    """Streams to one server, opened on demand and reused. A thread waits if all are in use."""

    def __init__(self, address: str, connector: Connector, *, max_streams: int = 4) -> None:
        self._address = address
        self._connector = connector
        self._idle: list[CallStream] = []
        self._open = 0
        self._max_streams = max_streams
        self._changed = threading.Condition()
        self._bound = ProcessBound(f"the connection to {address}")

    def take(self, *, deadline: float) -> CallStream:
        """Return a stream for the caller alone, until `give_back` or `discard`. Raises `ForkedProcessError` in a forked child."""
        self._bound.require()
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._idle or self._open < self._max_streams, timeout=max(0.0, deadline - time.monotonic())
            )
            if not free:
                raise DeadlineExceededError(
                    f"the server at {self._address}: all {self._max_streams} streams were in use until the deadline"
                )
            while self._idle:
                stream = self._idle.pop()
                if stream.is_open:
                    return stream
                # The server has closed it, as it does with idle streams.
                stream.close()
                self._open -= 1
            self._open += 1
        try:
            return self._connector.open(deadline=deadline)
        except BaseException:
            self._closed()
            raise

    def give_back(self, stream: CallStream) -> None:
        """Keep a stream without a request in flight for the next caller."""
        with self._changed:
            self._idle.append(stream)
            self._changed.notify()

    def discard(self, stream: CallStream) -> None:
        """Close a stream that failed, or on which an answer may still arrive."""
        stream.close()
        self._closed()

    def close(self) -> None:
        """Close the idle streams and the connection. In a forked child it does nothing."""
        if not self._bound.is_here:
            return
        with self._changed:
            idle, self._idle = self._idle, []
        for stream in idle:
            self.discard(stream)
        self._connector.close()

    def _closed(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify()


FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two attempts. Doubled each time, up to the longest."""
LONGEST_OVERLOAD_PAUSE = 5.0
"""Seconds of the longest pause before a request to an overloaded server is repeated."""


class Link:
    """Sends requests to one server."""

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
        """The incarnation of the server that requests are for. 0 until it has answered."""
        self.server = 0
        """The identity of the server, which survives restarts. 0 if it was not asked for."""
        self.left = False
        """Whether other servers own the buckets of this one, so that new requests go to them."""
        self.on_restored: Callable[[int], None] | None = None
        """Called with the old incarnation when the server has restored itself in a new one. It joins the new one, or raises."""
        self.on_unavailable: Callable[[], None] | None = None
        """Called between two attempts to reach the server, which may have moved or left."""
        self.outage = Outage(_log)
        """Logs that requests wait for the server."""
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
        """Return a request to be sent. Its arrays are not copied and must not change before it has finished."""
        request = next(self._requests)
        frame = encode_parts(call=call, request=request, instance=self.instance, text=text, arrays=arrays)
        limit = self.timeout if timeout is None else timeout
        return Exchange(self, frame, request, limit, changes=call.changes_state)

    def call(
        self, call: CallNumber, text: str = "{}", arrays: Sequence[np.ndarray] = (), *, timeout: float | None = None
    ) -> Frame:
        """Send one request and return its answer."""
        return self.begin(call, text, arrays, timeout=timeout).finish()

    def move_to(self, address: str) -> None:
        """Use another address of the server from now on, also for the retries of requests in flight."""
        self._earlier.append(self.pool)
        self.address, self.pool = address, self._pool_to(address)

    def close(self) -> None:
        """Close the connection."""
        for pool in (self.pool, *self._earlier):
            pool.close()


class Exchange:
    """One request in flight."""

    def __init__(self, link: Link, frame: list[np.ndarray], request: int, timeout: float, *, changes: bool) -> None:
        self._link = link
        self._frame = frame
        self._request = request
        self._deadline = time.monotonic() + timeout
        self._timeout = timeout
        self._stream: CallStream | None = None
        self._pool = link.pool
        self._changes = changes
        self._in_doubt = False
        self.was_refused = False
        """Whether the error that `finish` raised came from the server, not from the network."""

    def send(self) -> None:
        """Send the request once. `finish` handles a failure."""
        try:
            self._send()
        except (DeadlineExceededError, UnavailableError):
            self._drop()

    def finish(self) -> Frame:
        """Return the answer. A request that failed is retried with exponential backoff until the deadline."""
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
                # The same sequence number: if it was applied before the server died, the server knows.
                set_instance(self._frame[0], self._link.instance)
            except OverloadedError as error:
                # The server is there but overloaded: back off, and do not look for another server.
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
        """Wait about twice as long as `pause`, the last wait. Returns how long. Raises `error` if the deadline is earlier."""
        pause = jittered(min(2 * pause, longest))
        if time.monotonic() + pause >= self._deadline:
            kind = OverloadedError if isinstance(error, OverloadedError) else UnavailableError
            raise kind(f"{error}; tried for {self._timeout:g} s") from None
        self._link.outage.waits(error, left_secs=self._deadline - time.monotonic())
        time.sleep(pause)
        return pause

    def abandon(self) -> None:
        """Give up the request without waiting for its answer."""
        self._drop()

    def _look_for_server(self) -> None:
        if self._link.on_unavailable is not None:
            self._link.on_unavailable()
        if self._link.left and not self._in_doubt:
            raise OwnershipChangedError(f"the server at {self._link.address} has moved its buckets to other servers")

    def _send(self) -> None:
        self._pool = self._link.pool
        self._stream = self._pool.take(deadline=self._deadline)
        self._in_doubt = self._changes
        self._stream.send(*self._frame, deadline=self._deadline)

    def _receive(self) -> Frame:
        assert self._stream is not None
        frame = self._stream.receive(self._request, deadline=self._deadline)
        error = decode_error(frame.text, self._link.address) if frame.call == BasicCall.ERROR else None
        if not isinstance(error, OverloadedError):  # the server may close the stream after this answer
            stream, self._stream = self._stream, None
            self._pool.give_back(stream)
        if error is not None:
            self.was_refused = True
            raise error
        self._link.instance = self._link.instance or frame.instance
        self._link.outage.over(self._link.address)
        return frame

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            self._pool.discard(stream)


def finish_all(exchanges: Iterable[Exchange]) -> list[Frame]:
    """Send all requests and return all answers. Raises the first error after all have finished."""
    outcomes = finish_each(exchanges)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, Frame)]


def finish_each(exchanges: Iterable[Exchange]) -> list[Frame | Exception]:
    """Send all requests, then receive all answers: servers work in parallel without threads here.

    Returns an answer or an error for each. Waits for all of them even after a failure, so that nothing is left in flight.
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
