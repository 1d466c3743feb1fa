"""Streams to one server: what a transport has to offer, and how threads share the streams of one."""

from __future__ import annotations

import threading
import time
from typing import Literal, Protocol

import numpy as np

from monolith.errors import ConfigError, DeadlineExceededError
from monolith.process_bound import ProcessBound
from monolith.transport.frames import Frame

__all__ = ["Connector", "Stream", "StreamPool", "Transport", "connector_to"]

Transport = Literal["socket", "flight"]
"""How frames travel: over plain sockets, or as messages of Arrow Flight, which can encrypt."""


class Stream(Protocol):
    """One open exchange with a server: a request is sent, then its answer received."""

    def send(self, *pieces: np.ndarray, deadline: float) -> None:
        """Send the bytes of a request, one piece behind the other."""

    def receive(self, request: int, *, deadline: float) -> Frame:
        """The answer to `request`; answers to others, which somebody delivered twice, are skipped."""

    @property
    def is_open(self) -> bool:
        """Whether the server has not closed it, as far as is known here."""

    def close(self) -> None:
        """Let go of the stream, whatever state it is in."""


class Connector(Protocol):
    """Opens streams to one server."""

    def open(self, *, deadline: float) -> Stream:
        """A new stream; `UnavailableError` if there is no server, `AuthenticationError` if it wants another token."""

    def close(self) -> None:
        """Let go of what the streams share."""


def connector_to(
    address: str, *, transport: Transport | None, timeout: float, token: str | None, tls_root_certs: bytes | None
) -> Connector:
    """The way to `address`; `transport` None takes Flight where there is TLS, and sockets otherwise."""
    if (transport or ("socket" if tls_root_certs is None else "flight")) == "socket":
        from monolith.transport.socket_stream import SocketConnector

        if tls_root_certs is not None:
            raise ConfigError(
                "transport: plain sockets cannot encrypt; leave out transport='socket', or tls_root_certs"
            )
        return SocketConnector(address, token=token)
    from monolith.transport.flight_stream import FlightConnector

    return FlightConnector(address, connect_timeout=timeout, token=token, tls_root_certs=tls_root_certs)


class StreamPool:
    """Streams to one server, opened as threads need them and kept for the next.

    A thread that finds all of them taken waits for one.
    """

    def __init__(self, address: str, connector: Connector, *, max_streams: int = 4) -> None:
        self._address = address
        self._connector = connector
        self._idle: list[Stream] = []
        self._open = 0
        self._max_streams = max_streams
        self._changed = threading.Condition()
        self._bound = ProcessBound(f"the connection to {address}")

    def take(self, *, deadline: float) -> Stream:
        """A stream for the caller alone, until `give_back` or `discard`. `ForkedProcessError` in a forked child."""
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
                # The server has closed it meanwhile, as it does with those that are idle.
                stream.close()
                self._open -= 1
            self._open += 1
        try:
            return self._connector.open(deadline=deadline)
        except BaseException:
            self._closed()
            raise

    def give_back(self, stream: Stream) -> None:
        """Keep a stream on which nothing is under way for the next caller."""
        with self._changed:
            self._idle.append(stream)
            self._changed.notify()

    def discard(self, stream: Stream) -> None:
        """Close a stream that failed, or on which an answer may still come."""
        stream.close()
        self._closed()

    def close(self) -> None:
        """Close the streams nobody uses, and the connection. A forked child leaves those of its parent alone."""
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
