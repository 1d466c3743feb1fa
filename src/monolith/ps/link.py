"""A link: requests to one server, each with a deadline, sent again after a failure. Several links are asked at once.

Sending again is safe for every call: reads change nothing, declarations may be repeated, and a push carries a number under
which the server applies it at most once.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable, Sequence

import numpy as np

from monolith.errors import DeadlineExceededError, UnavailableError
from monolith.ps.frames import Frame, Shape, allocate
from monolith.ps.messages import Call
from monolith.ps.remote_errors import raised
from monolith.ps.stream_pool import Stream, StreamPool, Transport, connector_to

__all__ = ["Exchange", "Link", "finish_all"]

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two attempts: doubled each time, up to the longest."""


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
        self.address = address
        self.timeout = timeout
        self.instance = 0
        """The life of the server that is meant; 0 until it has answered."""
        connector = connector_to(
            address, transport=transport, timeout=timeout, token=token, tls_root_certs=tls_root_certs
        )
        self.pool = StreamPool(address, connector, max_streams=max_streams)
        self._requests = itertools.count(1)

    def begin(
        self, call: Call, text: str, shapes: Sequence[Shape] = (), *, timeout: float | None = None
    ) -> tuple[Exchange, list[np.ndarray]]:
        """A request whose arrays are still to be filled, and the arrays; then `send` and `finish` it."""
        request = next(self._requests)
        frame, views = allocate(call=call, request=request, instance=self.instance, text=text, shapes=shapes)
        return Exchange(self, frame, request, self.timeout if timeout is None else timeout), views

    def call(
        self, call: Call, text: str = "{}", arrays: Sequence[np.ndarray] = (), *, timeout: float | None = None
    ) -> Frame:
        """The answer to one request."""
        exchange, views = self.begin(call, text, [(a.dtype, a.shape) for a in arrays], timeout=timeout)
        for view, array in zip(views, arrays, strict=True):
            view[...] = array
        return exchange.finish()

    def close(self) -> None:
        """Close the connection."""
        self.pool.close()


class Exchange:
    """One request under way."""

    def __init__(self, link: Link, frame: np.ndarray, request: int, timeout: float) -> None:
        self._link = link
        self._frame = frame
        self._request = request
        self._deadline = time.monotonic() + timeout
        self._timeout = timeout
        self._stream: Stream | None = None

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
            except UnavailableError as error:
                self._drop()
                # Spread, so that the workers of a cluster do not all come back at the same moment.
                pause = min(2 * pause, LONGEST_PAUSE) * random.uniform(0.5, 1.0)
                if time.monotonic() + pause >= self._deadline:
                    raise UnavailableError(f"{error}; tried for {self._timeout:g} s") from None
                time.sleep(pause)
            except BaseException:
                self._drop()
                raise

    def abandon(self) -> None:
        """Forget the request; an answer that may still come is not waited for."""
        self._drop()

    def _send(self) -> None:
        self._stream = self._link.pool.take(deadline=self._deadline)
        self._stream.send(self._frame, deadline=self._deadline)

    def _receive(self) -> Frame:
        assert self._stream is not None
        frame = self._stream.receive(self._request, deadline=self._deadline)
        stream, self._stream = self._stream, None
        self._link.pool.give_back(stream)
        if frame.call == Call.ERROR:
            raise raised(frame.text, self._link.address)
        self._link.instance = self._link.instance or frame.instance
        return frame

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            self._link.pool.discard(stream)


def finish_all(exchanges: Iterable[Exchange]) -> list[Frame]:
    """Send all requests, then take all answers: servers work beside each other, and no thread is needed for it.

    All are waited for, also after a failure, so that nothing is under way any more; then the first error is raised.
    """
    started = list(exchanges)
    for exchange in started:
        exchange.send()
    frames: list[Frame] = []
    failure: Exception | None = None
    for exchange in started:
        try:
            frames.append(exchange.finish())
        except Exception as error:
            failure = failure or error
        except BaseException:
            for other in started:
                other.abandon()
            raise
    if failure is not None:
        raise failure
    return frames
