"""`GrpcConnection`: one connection of gRPC. The core knows HTTP/2, what is here connects it to the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Protocol, cast

from monolith import _core
from monolith.console import RareWarnings
from monolith.serve.server.config import ServingConfig
from monolith.serve.server.failures import RequestFailure
from monolith.serve.server.listener import LINGER_SECONDS

__all__ = ["GrpcApplication", "GrpcConnection", "IncomingCall", "OpenGrpcConnections"]

_log = logging.getLogger(__name__)
_warnings = RareWarnings(_log, seconds=60)
STALL_SECONDS = 75.0
"""How long a client may not read what is sent."""
_SPARE_STREAMS = 8
"""Calls that a client may make beyond those that all clients may make together, so that it hears that they are too many."""
_STATUSES = {
    "INVALID_ARGUMENT": 3,
    "DEADLINE_EXCEEDED": 4,
    "NOT_FOUND": 5,
    "RESOURCE_EXHAUSTED": 8,
    "UNIMPLEMENTED": 12,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
    "UNAUTHENTICATED": 16,
}
"""The numbers of the statuses in `RequestFailure.grpc`."""


class IncomingCall:
    """A call of which the whole message has come. Used in the thread of the event loop, apart from what it carries."""

    __slots__ = ("_connection", "_stream", "arrived", "is_compressed", "message", "metadata", "path")

    def __init__(
        self,
        connection: GrpcConnection,
        stream: int,
        arrived: float,
        path: str,
        metadata: dict[str, str],
        message: bytes,
        is_compressed: bool,
    ) -> None:
        self._connection, self._stream = connection, stream
        self.arrived, self.path, self.metadata = arrived, path, metadata
        self.message, self.is_compressed = message, is_compressed

    @property
    def is_abandoned(self) -> bool:
        """Whether the client has given it up."""
        return not self._connection.waits(self._stream)

    def respond(self, answer: bytes | RequestFailure) -> None:
        """Answer with a message or with a failure. Only the first answer counts."""
        self._connection.respond(self._stream, answer)


class GrpcApplication(Protocol):
    """What answers calls."""

    def answer(self, call: IncomingCall) -> None:
        """Call `call.respond` now or later, in the same thread."""


@dataclass(slots=True)
class OpenGrpcConnections:
    """What all connections of a listener share."""

    application: GrpcApplication
    config: ServingConfig
    open: set[GrpcConnection] = field(default_factory=set)
    memory: _core.GrpcMemory = field(init=False)

    def __post_init__(self) -> None:
        self.memory = _core.GrpcMemory(4 * self.config.max_message_bytes)

    def accept(self) -> GrpcConnection:
        """Return what reads the next connection."""
        return GrpcConnection(self)

    def sweep(self, now: float) -> None:
        """End requests and connections that have waited too long for their client. Called every second."""
        for connection in tuple(self.open):
            connection.expire(now)

    def stop(self) -> None:
        """Close connections without a call, and the others after their calls."""
        for connection in tuple(self.open):
            connection.stop()


class GrpcConnection(asyncio.Protocol):
    """One connection."""

    def __init__(self, shared: OpenGrpcConnections) -> None:
        self._shared = shared
        config = shared.config
        self._core: _core.GrpcConnection | None = _core.GrpcConnection(
            shared.memory,
            time.monotonic(),
            max_streams=config.max_concurrency + config.max_queue + _SPARE_STREAMS,
            max_message_bytes=config.max_message_bytes,
            request_secs=config.deadline_secs,
        )
        self._transport: asyncio.Transport | None = None
        self._is_receiving = False
        self._ends = 0.0
        """When the connection is closed in any case, because it is over or the client does not read. 0: not yet."""
        self._is_closing = False

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the settings, and refuse a connection too many."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without being a subclass
        shared, limit = self._shared, self._shared.config.max_connections
        if len(shared.open) >= limit:
            _warnings.warn("a connection is closed at once: there are %d, and %d are allowed", len(shared.open), limit)
            self.stop()
        else:
            shared.open.add(self)
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget all calls."""
        self._shared.open.discard(self)
        self._transport = self._core = None

    def data_received(self, data: bytes) -> None:
        """Answer what is complete."""
        core = self._core
        if core is None or self._is_closing:
            return
        self._is_receiving = True
        try:
            for found in core.receive(data, time.monotonic()):
                self._shared.application.answer(IncomingCall(self, *found))
        finally:
            self._is_receiving = False
            self._send()

    def pause_writing(self) -> None:
        """Read nothing more while the client does not."""
        self._ends = self._ends or time.monotonic() + STALL_SECONDS
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Read again."""
        if not self._is_closing:
            self._ends = 0.0
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # Called by calls

    def waits(self, stream: int) -> bool:
        """Whether the client waits for the answer to a call."""
        return self._core is not None and self._core.is_open(stream)

    def respond(self, stream: int, answer: bytes | RequestFailure) -> None:
        """Answer a call. `IncomingCall.respond` calls it."""
        core = self._core
        if core is None:
            return
        if isinstance(answer, bytes):
            core.answer(stream, answer)
        else:
            core.fail(stream, _STATUSES[answer.grpc], answer.message)
        if not self._is_receiving:
            self._send()

    def _send(self) -> None:
        core, transport = self._core, self._transport
        if core is None or transport is None or self._is_closing:
            return
        output = core.take_output()
        if output:
            transport.write(output)
        if core.is_over:
            self._close(transport, lingers=core.has_failed)

    def _close(self, transport: asyncio.Transport, *, lingers: bool) -> None:
        """Send what is left and close. What a client still sends is read: a reset could take the reason from it."""
        self._is_closing = True
        self._ends = time.monotonic() + LINGER_SECONDS
        if lingers and transport.can_write_eof():
            transport.write_eof()
        else:
            transport.close()

    # Called by the listener

    def expire(self, now: float) -> None:
        """Give up on a client that has been waited for too long."""
        if self._core is None:
            return
        if not self._ends:
            self._core.expire(now)
            self._send()
        elif now > self._ends:
            self.abort()

    @property
    def is_busy(self) -> bool:
        """Whether a call is being read or answered."""
        return self._core is not None and self._core.open_streams > 0

    def stop(self) -> None:
        """Accept no further calls, and close the connection after those that have begun."""
        if self._core is not None:
            self._core.go_away()
            self._send()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()
