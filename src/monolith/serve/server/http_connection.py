"""`HttpConnection`: one connection of HTTP/1.1, from bytes to requests with their whole body, and from answers to bytes.

httptools (llhttp) knows the syntax, and the core the part of it that most requests are. What is here is what a server decides:
the order of answers, and bounds on what a client may make it hold or wait for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Protocol, cast

from monolith._core import read_post
from monolith.console import RareWarnings
from monolith.errors import DeadlineExceededError, MessageTooLargeError, MonolithError, OverloadedError, ProtocolError
from monolith.optional_packages import import_extra
from monolith.serve.server.config import ServingConfig
from monolith.serve.server.failures import failure_of
from monolith.serve.server.handler import failure_response
from monolith.serve.server.http import HttpResponse
from monolith.serve.server.listener import LINGER_SECONDS

__all__ = ["HttpApplication", "HttpConnection", "IncomingRequest", "OpenConnections", "encode_head"]

_log = logging.getLogger(__name__)
_warnings = RareWarnings(_log, seconds=60)
MAX_HEAD_BYTES = 1 << 16
HEAD_SECONDS = 30.0
"""How long the request line and headers may take, from the first byte, or from the connection."""
IDLE_SECONDS = 75.0
"""How long a connection may be idle between requests, or its client not read an answer."""
_COPIED_BYTES = 1 << 16
"""A body up to this size is copied behind its head, which is quicker than sending two buffers."""
_SPARE_CONNECTIONS = 128
"""Connections beyond the limit whose requests are refused with an answer. Those beyond are closed at once."""
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


class IncomingRequest:
    """A request, as the application gets it when its body is complete. Used in the thread of the event loop only."""

    __slots__ = (
        *("_connection", "arrived", "body", "expects", "headers", "held"),
        *("is_cut", "is_last", "method", "refusal", "url"),
    )

    def __init__(self, connection: HttpConnection, method: str, url: bytes, headers: dict[str, str]) -> None:
        self._connection: HttpConnection | None = connection
        self.method, self.url, self.headers = method, url, headers
        self.arrived = time.monotonic()
        self.body = b""
        self.held = 0
        """Bytes of the body that are held."""
        self.expects = headers.get("expect", "").lower() == "100-continue"
        """Whether the client waits to be asked for the body."""
        self.is_last = False
        """Whether the connection is closed after it."""
        self.is_cut = False
        """Whether it was not read to its end."""
        self.refusal: HttpResponse | None = None
        """The answer, if it was known before the application saw the request."""

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits for an answer any more."""
        return self._connection is None

    def respond(self, response: HttpResponse) -> None:
        """Answer. Only the first answer counts."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.respond(self, response)

    def abandon(self) -> None:
        """Forget the connection, which is lost."""
        self._connection = None


class HttpApplication(Protocol):
    """What answers requests."""

    def refusal(self, request: IncomingRequest) -> HttpResponse | None:
        """Return the answer to a request that is refused by its headers alone, so that its body is not kept. Otherwise None."""

    def answer(self, request: IncomingRequest) -> None:
        """Call `request.respond` now or later, in the same thread."""


@dataclass(slots=True)
class OpenConnections:
    """What all connections of a listener share."""

    application: HttpApplication
    config: ServingConfig
    open: set[HttpConnection] = field(default_factory=set)
    held: int = 0
    """Bytes of bodies that are held, of all connections together."""
    stopping: bool = False
    date: str = field(default_factory=lambda: _date_line())

    def accept(self) -> HttpConnection:
        """Return what reads the next connection."""
        return HttpConnection(self)

    def sweep(self, now: float) -> None:
        """Close connections that have waited too long for their client, and set the date of answers. Called every second."""
        self.date = _date_line()
        for connection in tuple(self.open):
            connection.expire(now)

    def stop(self) -> None:
        """Close connections without a request, and the others after it."""
        self.stopping = True
        for connection in tuple(self.open):
            connection.stop()


class _StopParsingError(Exception):
    """Ends the parsing of a connection, in a callback of the parser."""


class HttpConnection(asyncio.Protocol):
    """One connection. Requests that come before earlier ones are answered wait, and the connection is not read meanwhile."""

    def __init__(self, shared: OpenConnections) -> None:
        httptools = import_extra("httptools", extra="serve", purpose="serving over HTTP")
        self._shared, self._application, self._config = shared, shared.application, shared.config
        self._parser = httptools.HttpRequestParser(self)
        self._upgrade, self._parser_error = httptools.HttpParserUpgrade, httptools.HttpParserError
        self._transport: asyncio.Transport | None = None
        self._is_excess = False
        # The message that is being read.
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._reading: IncomingRequest | None = None
        self._in_head = False
        self._progress = 0
        """Raised by everything that ends a head, a part of a body, or a message."""
        self._quiet_bytes = 0
        """Bytes since the last progress, which the parser holds: a head, trailers or extensions of chunks."""
        self._reads = True
        """Whether what comes is parsed. If not it is thrown away."""
        # Requests that are complete.
        self._waiting: deque[IncomingRequest] = deque()
        self._active: IncomingRequest | None = None
        self._is_advancing = False
        self._is_paused = False
        self._is_blocked = False
        """Whether the client does not read its answers."""
        self._expires = time.monotonic() + HEAD_SECONDS
        """When the client must have sent or read something. Without effect while it waits for an answer."""

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without being a subclass
        shared, limit = self._shared, self._config.max_connections
        self._is_excess = len(shared.open) >= limit
        if len(shared.open) >= limit + _SPARE_CONNECTIONS:
            _warnings.warn("a connection is closed at once: there are %d, and %d are allowed", len(shared.open), limit)
            self._transport.abort()
            return
        shared.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget everything that was to be sent."""
        self._shared.open.discard(self)
        self._transport = None
        for request in (self._reading, self._active, *self._waiting):
            if request is not None:
                request.abandon()
                self._release(request)
        self._reading = self._active = None
        self._waiting.clear()
        self._parser = None

    def data_received(self, data: bytes) -> None:
        """Parse, and answer what is complete."""
        if not self._reads:
            return
        progress = self._progress
        try:
            if self._in_head or self._reading is not None or not self._read_post(data):
                self._feed(data)
        except self._parser_error as error:
            if self._reads:
                self._fail(ProtocolError(f"HTTP: {error}"))
        self._quiet_bytes = self._quiet_bytes + len(data) if self._progress == progress else 0
        if self._quiet_bytes > MAX_HEAD_BYTES and self._reads and (self._in_head or self._reading is not None):
            self._fail(MessageTooLargeError(f"headers: expected at most {MAX_HEAD_BYTES:,} bytes"), status=431)
        self._advance()

    def _read_post(self, data: bytes) -> bool:
        """Read the usual request, which begins and ends with `data`. Returns False if it has to be parsed."""
        found = read_post(data)
        if found is None:
            return False
        url, headers, body = found
        self._parts = []
        try:
            self._begin("POST", url, headers, is_last=False)
            self.on_body(body)
            self.on_message_complete()
        except _StopParsingError:
            pass  # answered without it
        return True

    def _feed(self, data: bytes) -> None:
        left: bytes | memoryview = data
        while True:
            try:
                self._parser.feed_data(left)
                return
            except self._upgrade as upgrade:
                # No other protocol is spoken here, which a client learns from the answer to its request in HTTP/1.1.
                left = memoryview(left)[upgrade.args[0] :]

    def eof_received(self) -> bool:
        """Keep the connection until requests that have come are answered."""
        self._reads = False
        if self._active is None and not self._waiting:
            return False
        (self._waiting[-1] if self._waiting else self._active).is_last = True  # type: ignore[union-attr]
        return True

    def pause_writing(self) -> None:
        """Answer nothing more while the client does not read."""
        self._is_blocked = True
        self._expires = time.monotonic() + IDLE_SECONDS
        self._set_reading()

    def resume_writing(self) -> None:
        """Continue with requests that wait."""
        self._is_blocked = False
        self._expires = time.monotonic() + IDLE_SECONDS
        self._advance()

    # Called by the parser

    def on_message_begin(self) -> None:
        """Begin a message."""
        self._url, self._headers, self._parts = b"", [], []
        self._in_head = True
        self._expires = time.monotonic() + HEAD_SECONDS

    def on_url(self, url: bytes) -> None:
        """Add to the URL."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header. Trailers, which come after the body, are ignored."""
        if self._in_head:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Decide whether the body is wanted."""
        self._in_head = False
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self._headers}
        method = self._parser.get_method().decode("ascii")
        self._begin(method, self._url, headers, is_last=not self._parser.should_keep_alive())

    def _begin(self, method: str, url: bytes, headers: dict[str, str], *, is_last: bool) -> None:
        self._progress += 1
        self._reading = request = IncomingRequest(self, method, url, headers)
        request.is_last = is_last
        self._expires = request.arrived + self._config.deadline_secs
        try:
            self._check_head(request)
            request.refusal = self._application.refusal(request)
        except MonolithError as error:
            self._fail(error)
            raise _StopParsingError from None
        if request.refusal is not None and request.expects:
            request.is_cut = True  # the client may or may not send the body
            self._finish_reading(request)
            raise _StopParsingError
        if request.expects and self._active is None and not self._waiting:
            self._ask_for_body(request)

    def _check_head(self, request: IncomingRequest) -> None:
        limit = self._config.max_message_bytes
        stated = request.headers.get("content-length", "0")
        if not stated.isdecimal() or len(stated) > 15 or int(stated) > limit:
            raise MessageTooLargeError(f"body: expected at most {limit:,} bytes, got {stated:.20}")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise ProtocolError(f"content-encoding: expected none, got {request.headers['content-encoding']!r:.40}")
        if "upgrade" in request.headers and (stated != "0" or "transfer-encoding" in request.headers):
            # The parser would take the body for something in the other protocol.
            raise ProtocolError("upgrade: another protocol can only be offered by a request without a body")
        if self._is_excess:
            raise OverloadedError("there are more connections than are allowed; back off and retry")

    def on_body(self, body: bytes) -> None:
        """Add to the body, within what one request and all together may hold."""
        self._progress += 1
        request = self._reading
        if request is None or request.refusal is not None:
            return
        request.held += len(body)
        self._shared.held += len(body)
        self._parts.append(body)
        limit = self._config.max_message_bytes
        if request.held > limit:
            self._fail(MessageTooLargeError(f"body: expected at most {limit:,} bytes"))
        elif self._shared.held > 4 * limit:
            self._fail(OverloadedError("other requests hold all memory there is for them; back off and retry"))
        else:
            return
        raise _StopParsingError

    def on_message_complete(self) -> None:
        """Hand the request over. It is answered after those before it."""
        self._progress += 1
        request = self._reading
        if request is not None:
            parts = self._parts
            request.body = parts[0] if len(parts) == 1 else b"".join(parts)
            self._finish_reading(request)

    def _finish_reading(self, request: IncomingRequest) -> None:
        request.is_last = request.is_last or request.is_cut
        self._reads = not request.is_last
        self._reading, self._parts = None, []
        self._waiting.append(request)

    def _fail(self, error: MonolithError, *, status: int | None = None) -> None:
        """Answer what is being read with an error, after the requests before it, and read nothing more."""
        request = self._reading or IncomingRequest(self, "GET", b"", {})
        self._in_head = False
        answer = failure_response(failure_of(error))
        request.refusal = (
            answer if status is None else HttpResponse(status=status, headers=answer.headers, body=answer.body)
        )
        request.is_cut = True
        self._finish_reading(request)

    # Answers

    def _advance(self) -> None:
        """Answer requests that wait, one after the other."""
        if self._is_advancing:  # an answer came before the application returned
            return
        self._is_advancing = True
        try:
            while self._waiting and self._active is None and not self._is_blocked and self._transport is not None:
                request = self._active = self._waiting.popleft()
                if request.refusal is not None:
                    request.respond(request.refusal)
                else:
                    self._application.answer(request)
        finally:
            self._is_advancing = False
        reading = self._reading
        if reading is not None and reading.expects and self._active is None and not self._waiting:
            self._ask_for_body(reading)
        self._set_reading()

    def _ask_for_body(self, request: IncomingRequest) -> None:
        request.expects = False
        if self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def respond(self, request: IncomingRequest, response: HttpResponse) -> None:
        """Send the answer to the request that is being answered. `IncomingRequest.respond` calls it."""
        self._active = None
        self._release(request)
        transport = self._transport
        if transport is None:
            return
        is_last = request.is_last or self._shared.stopping
        try:
            head = encode_head(response, self._shared.date, close=is_last)
        except (ProtocolError, UnicodeEncodeError) as error:
            _log.error("an answer cannot be sent", exc_info=error)
            response = HttpResponse(status=500)
            head = encode_head(response, self._shared.date, close=is_last)
        if request.method == "HEAD":
            transport.write(head)
        elif len(response.body) <= _COPIED_BYTES:
            transport.write(head + response.body)
        else:
            transport.writelines((head, response.body))
        if is_last:
            self._close(transport, lingers=request.is_cut)
            return
        if self._reading is None and not self._in_head:
            self._expires = time.monotonic() + IDLE_SECONDS
        self._advance()

    def _release(self, request: IncomingRequest) -> None:
        self._shared.held -= request.held
        request.held = 0

    def _close(self, transport: asyncio.Transport, *, lingers: bool) -> None:
        """Send what is left and close. What a client still sends is read: a reset could take the answer from it."""
        self._reads = False
        for request in self._waiting:
            request.abandon()
            self._release(request)
        self._waiting.clear()
        self._set_reading()
        self._expires = time.monotonic() + LINGER_SECONDS
        if lingers and transport.can_write_eof():
            transport.write_eof()
        else:
            transport.close()

    def _set_reading(self) -> None:
        """Read unless requests wait or the client does not read."""
        paused = bool(self._waiting) or self._is_blocked
        transport = self._transport
        if paused == self._is_paused or transport is None or transport.is_closing():
            return
        self._is_paused = paused
        if paused:
            transport.pause_reading()
        else:
            transport.resume_reading()

    # Called by the listener

    def expire(self, now: float) -> None:
        """Give up on a client that has been waited for too long."""
        transport = self._transport
        is_answering = (self._active is not None or self._waiting) and not self._is_blocked
        if transport is None or is_answering or now < self._expires:
            return
        if self._reading is not None and self._reads:
            self._fail(DeadlineExceededError("the deadline of the request was exceeded before all of it had come"))
            self._advance()
        else:
            transport.abort()

    @property
    def is_busy(self) -> bool:
        """Whether a request is being read or answered."""
        return self._reading is not None or self._active is not None or bool(self._waiting)

    def stop(self) -> None:
        """Close the connection, unless a request is being read or answered, whose answer closes it."""
        if self._transport is not None and not self.is_busy:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()


def encode_head(response: HttpResponse, date: str, *, close: bool) -> bytes:
    """Return the status line and headers of an answer.

    Raises:
        ProtocolError: a header has a line end.

    Example:
        >>> encode_head(HttpResponse(body=b"ok"), "", close=False)
        b'HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\n'
    """
    lines = "".join([f"{name}: {value}\r\n" for name, value in response.headers.items()])
    if not lines.count("\r") == lines.count("\n") == len(response.headers):
        raise ProtocolError("headers of the answer: a name or value has a line end")
    end = "connection: close\r\n\r\n" if close else "\r\n"
    status = f"HTTP/1.1 {response.status} {_PHRASES.get(response.status, '')}\r\n"
    return f"{status}{date}{lines}content-length: {len(response.body)}\r\n{end}".encode("latin-1")


def _date_line() -> str:
    return f"date: {formatdate(usegmt=True)}\r\n"
