"""Frames over plain sockets: the streams of a client, and the service that a server listens with."""

from __future__ import annotations

import errno
import hmac
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from monolith.console import RareWarnings
from monolith.errors import (
    AuthenticationError,
    DeadlineExceededError,
    MonolithError,
    OverloadedError,
    ProtocolError,
    UnavailableError,
)
from monolith.process_bound import let_go_in_children
from monolith.transport.addresses import connect
from monolith.transport.calls import FrameCalls
from monolith.transport.framed_socket import (
    HELLO,
    FramedSocket,
    NoMemoryError,
    TooLongError,
    Welcome,
    hello,
    local_name,
    peer_uid,
)
from monolith.transport.frames import MAGIC, PROTOCOL_VERSION, Frame, decode
from monolith.transport.tokens import NO_TOKEN

if TYPE_CHECKING:
    from monolith.transport.server import ListenConfig

__all__ = [
    "HELLO_SECONDS",
    "SocketConnector",
    "SocketService",
    "SocketStream",
    "connect_nearby",
    "listen",
    "require_welcome",
    "welcome",
]

_logger = logging.getLogger(__name__)


class SocketStream:
    """One connection, with one request in flight at a time."""

    def __init__(self, connection: FramedSocket, address: str) -> None:
        self._connection = connection
        self._address = address

    def send(self, *parts: np.ndarray, deadline: float) -> None:
        """Send the bytes of a request."""
        try:
            self._connection.send_frame(*parts, deadline=deadline)
        except OSError as error:
            raise _failure(self._address, error) from None

    def receive(self, request: int, *, deadline: float) -> Frame:
        """Return the answer to `request`. Answers to other requests, delivered twice by the network, are skipped."""
        while True:
            try:
                data = self._connection.receive_frame(deadline=deadline)
            except OSError as error:
                raise _failure(self._address, error) from None
            shared = self._connection.shared
            # The server may overwrite it as soon as the next request is sent.
            frame = decode(data.copy() if shared is not None and shared.is_incoming(data) else data)
            # Requests are numbered from 1. 0 answers a frame whose number could not be read.
            if frame.request in (0, request):
                return frame

    @property
    def is_open(self) -> bool:
        """Whether the server has not closed it. Between requests, nothing but the end of the stream can arrive."""
        return not self._connection.is_readable()

    def close(self) -> None:
        """Close the stream in any state."""
        self._connection.close()


class SocketConnector:
    """Opens connections to one server."""

    def __init__(self, address: str, *, token: str | None) -> None:
        self._address = address
        host, _, port = address.rpartition(":")
        self._endpoint = (host.strip("[]"), int(port))
        self._hello = hello(token)

    def open(self, *, deadline: float) -> SocketStream:
        """Return a connection that the server has accepted."""
        try:
            connection = FramedSocket(
                connect_nearby(*self._endpoint) or connect(*self._endpoint, max(0.001, deadline - time.monotonic())),
                offers_memory=True,
            )
        except OSError as error:
            raise _failure(self._address, error) from None
        try:
            connection.send(self._hello, deadline=deadline)
            require_welcome(connection.receive(HELLO.size, deadline=deadline), self._address)
        except BaseException as error:
            connection.close()
            raise (_failure(self._address, error) if isinstance(error, OSError) else error) from None
        return SocketStream(connection, self._address)

    def close(self) -> None:
        """Connections share nothing, so there is nothing to close."""


def connect_nearby(host: str, port: int) -> socket.socket | None:
    """Connect to a server over a Unix socket. Returns None if the server is not on this machine, or of another user."""
    name = local_name(host, port)
    if name is None or not hasattr(socket, "SO_PEERCRED"):
        return None
    local = socket.socket(socket.AF_UNIX)
    # A full backlog would block without a time limit. TCP waits within the deadline.
    local.setblocking(False)
    try:
        local.connect(name)
        user = peer_uid(local)
    except OSError:
        local.close()
        return None
    if user != os.geteuid():
        # Any user can bind a name that no server has bound yet. Over TCP no memory is shared.
        _logger.debug("%s:%s: a process of user %s listens on this machine; using TCP", host, port, user)
        local.close()
        return None
    return local


def require_welcome(answer: np.ndarray, address: str) -> None:
    """Raise what the verdict of the server at `address` means. `answer` is its welcome."""
    magic, version, said = HELLO.unpack(answer.data)
    if magic != MAGIC:
        raise ProtocolError(
            f"the server at {address} does not speak frames over plain sockets; if it speaks Flight, "
            "give ClientConfig(transport='flight'), and if it has TLS tls_root_certs, or a command --tls-root-certs"
        )
    if said == Welcome.WRONG_TOKEN:
        raise AuthenticationError(f"the server at {address} {NO_TOKEN}")
    if said == Welcome.TOO_MANY_STREAMS:
        raise OverloadedError(f"the server at {address} has reached its limit of streams")
    if said != Welcome.ACCEPTED:
        raise ProtocolError(
            f"the server at {address} speaks version {version}, not {PROTOCOL_VERSION}; upgrade the older side"
        )


def _failure(address: str, error: OSError) -> MonolithError:
    if isinstance(error, MonolithError):
        return error
    if isinstance(error, TimeoutError):
        return DeadlineExceededError(f"the server at {address} did not answer in time")
    return UnavailableError(f"the server at {address}: {error.strerror or error}")


HELLO_SECONDS = 10.0
"""How long a new connection may take to send its hello."""
SLOW_SECONDS = 10.0
"""How long a message may take however slow the connection is."""
HEALTH_STREAMS = 8
"""Streams beyond `max_streams`, for one health check each."""
HEALTH_BYTES = 4096
"""Upper limit for the size of a health check."""
RETRY_SECONDS = 0.05
"""Pause before a connection is accepted again after the system had no descriptor or memory for one."""

_logger = logging.getLogger(__name__)


class SocketService:
    """Passes each frame of each connection to `calls` and sends the answer back. Each connection has a thread."""

    def __init__(self, calls: FrameCalls, config: ListenConfig, *, token: str | None) -> None:
        self._calls = calls
        self._token = (token or "").encode()
        self._config = config
        self._free = threading.Semaphore(config.max_streams)
        self._for_health = threading.Semaphore(HEALTH_STREAMS)
        self._most = 2 * config.max_streams + HEALTH_STREAMS
        self._connections: dict[FramedSocket, bool] = {}
        """Whether each has sent a valid hello, oldest first."""
        self._ended = threading.Condition()
        self._stopping = False
        self._warnings = RareWarnings(_logger)
        self._spare = _Spare()
        self._listeners = listen(config.host, config.port, backlog=config.max_streams)
        self.port: int = self._listeners[0].getsockname()[1]
        self._accepting = [
            threading.Thread(target=self._accept, args=(listener,), name="monolith-ps-accept", daemon=True)
            for listener in self._listeners
        ]
        for thread in self._accepting:
            thread.start()
        let_go_in_children(self)

    def let_go(self) -> None:
        """Close the sockets in a forked child, which would keep the port open after the server has died."""
        for listener in self._listeners:
            listener.close()
        for connection in self._connections:
            connection.let_go()
        self._connections, self._ended = {}, threading.Condition()

    def shutdown(self) -> None:
        """Stop listening, send the answers of running requests, and wait until every connection has ended."""
        with self._ended:
            self._stopping = True
            for connection in self._connections:
                connection.stop_receiving()
        for listener in self._listeners:
            with suppress(OSError):
                # Closing alone does not wake a thread that waits in accept.
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._accepting:
            # While it is in accept the address is in use, and a successor could not listen there.
            thread.join()
        with self._ended:
            self._ended.wait_for(lambda: not self._connections)
        self._spare.close()

    def _accept(self, listener: socket.socket) -> None:
        """Accept connections until the service stops. A connection that cannot be served is closed."""
        while not self._stopping:
            try:
                connected, _ = listener.accept()
            except OSError as error:
                if not self._stopping:
                    self._not_accepted(listener, error)
                continue
            try:
                self._begin(connected)
            except Exception as error:
                connected.close()
                self._warnings.warn("cannot serve a connection: %s; it was closed, the client may try again", error)

    def _not_accepted(self, listener: socket.socket, error: OSError) -> None:
        if error.errno in (errno.ECONNABORTED, errno.EINTR):
            return
        self._warnings.warn(
            "cannot accept a connection: %s; %s are open; raise the limit of the process (ulimit -n) or lower max_streams",
            error.strerror,
            len(self._connections),
        )
        if error.errno == errno.EMFILE:
            # A client in the backlog would wait for ever: accept and close its connection.
            with self._spare.given_up(), suppress(OSError):
                listener.setblocking(False)
                try:
                    listener.accept()[0].close()
                finally:
                    listener.setblocking(True)
        time.sleep(RETRY_SECONDS)

    def _begin(self, connected: socket.socket) -> None:
        connection = FramedSocket(connected, accepts_memory=True)
        uid = connection.peer_uid
        if uid not in (None, 0, os.geteuid()):
            self._warnings.warn(
                "refused a connection from a process of user %s, which is neither this user nor root", uid
            )
            connection.close()
            return
        with self._ended:
            if len(self._connections) >= self._most:
                self._drop_oldest_stranger()
            welcome = not self._stopping and len(self._connections) < self._most
            if welcome:
                self._connections[connection] = False
        if not welcome:
            connection.close()
            return
        try:
            threading.Thread(target=self._run, args=(connection,), name="monolith-ps-stream", daemon=True).start()
        except BaseException:
            self._end(connection)
            raise

    def _drop_oldest_stranger(self) -> None:
        """Close the oldest connection that has not sent a hello. More may connect than are served."""
        stranger = next((connection for connection, is_known in self._connections.items() if not is_known), None)
        if stranger is not None:
            self._warnings.warn("%s connections are open: closed one that sent no hello", self._most)
            del self._connections[stranger]
            stranger.close()

    def _run(self, connection: FramedSocket) -> None:
        try:
            if self._is_accepted(connection):
                with self._ended:
                    if connection in self._connections:
                        self._connections[connection] = True
                self._serve(connection)
        except TimeoutError as error:
            _logger.info("closed a stream: %s", error)
        except OSError:
            # The client has disconnected or speaks another protocol: there is nobody to answer.
            pass
        finally:
            self._end(connection)

    def _end(self, connection: FramedSocket) -> None:
        connection.close()
        with self._ended:
            self._connections.pop(connection, None)
            self._ended.notify_all()

    def _is_accepted(self, connection: FramedSocket) -> bool:
        deadline = time.monotonic() + HELLO_SECONDS
        magic, version, size = HELLO.unpack(connection.receive(HELLO.size, deadline=deadline).data)
        if magic != MAGIC:
            return False
        if version != PROTOCOL_VERSION:
            return welcome(connection, Welcome.OTHER_VERSION)
        token = connection.receive(size, deadline=deadline).tobytes()
        if self._token and not hmac.compare_digest(token, self._token):
            self._warnings.warn("refused a client: its token is missing or wrong")
            return welcome(connection, Welcome.WRONG_TOKEN)
        return True

    def _serve(self, connection: FramedSocket) -> None:
        if not self._free.acquire(blocking=False):
            self._serve_health(connection)
            return
        try:
            welcome(connection, Welcome.ACCEPTED)
            while True:
                self._answer_one(connection)
        finally:
            self._free.release()

    def _serve_health(self, connection: FramedSocket) -> None:
        """Answer one health check. Any other request is refused with `OverloadedError`."""
        why = f"{self._config.max_streams} streams are open, no more are allowed; close some, or raise max_streams"
        self._warnings.warn("refused a client: %s", why)
        if not self._for_health.acquire(blocking=False):
            welcome(connection, Welcome.TOO_MANY_STREAMS)
            return
        try:
            welcome(connection, Welcome.ACCEPTED)
            deadline = time.monotonic() + HELLO_SECONDS
            try:
                data = connection.receive_frame(max_bytes=HEALTH_BYTES, deadline=deadline)
            except TooLongError as long:
                answer = self._calls.refused(long.head, OverloadedError(why))
            else:
                answer = self._calls.answer_health_only(data.copy(), why=why)
            connection.send_frame(answer, deadline=deadline)
        finally:
            self._for_health.release()

    def _answer_one(self, connection: FramedSocket) -> None:
        with self._calls.frames.lent() as take:
            answer = self._answer_to(connection, take)
            connection.send_frame(answer, deadline=self._finish_by(len(answer)))

    def _answer_to(self, connection: FramedSocket, take: Callable[[int], bool]) -> np.ndarray:
        """Receive a request and return its answer. `take` says whether there is memory for it."""
        try:
            data = connection.receive_frame(
                max_bytes=self._config.max_message_bytes,
                deadline=time.monotonic() + self._config.idle_secs,
                finish_by=self._finish_by,
                take=take,
            )
        except NoMemoryError as long:
            why = f"requests and answers of {self._calls.frames.in_use:,} bytes are in memory"
            self._warnings.warn("refused a request of %s bytes: %s", long.size, why)
            return self._calls.refused(
                long.head, OverloadedError(f"{why}, no memory for {long.size:,} more; try again later")
            )
        except TooLongError as long:
            error = ProtocolError(
                f"frame: expected at most {self._config.max_message_bytes:,} bytes, got {long.size:,}; send smaller batches"
            )
            return self._calls.refused(long.head, error)
        shared = connection.shared
        is_shared = shared is not None and shared.is_incoming(data)
        return self._calls.answer(data, is_shared=is_shared, out=None if shared is None else shared.outgoing)

    def _finish_by(self, size: int) -> float:
        """Return when a message of `size` bytes must have been received or sent."""
        return time.monotonic() + SLOW_SECONDS + size / self._config.min_bytes_per_sec


class _Spare:
    """A descriptor in reserve for the moment when no other is left."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._take()

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Free the descriptor for the length of the block."""
        with self._lock:
            self._free()
            try:
                yield
            finally:
                self._take()

    def close(self) -> None:
        """Close the descriptor. Idempotent and thread-safe."""
        with self._lock:
            self._closed = True
            self._free()

    def _free(self) -> None:
        # Closed twice, the number may belong to another file the second time.
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _take(self) -> None:
        if not self._closed:
            with suppress(OSError):
                self._descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


def listen(host: str, port: int, *, backlog: int) -> list[socket.socket]:
    """Listen on TCP, and on a Unix socket for processes of this machine."""
    made: list[socket.socket] = []
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made.append(socket.create_server((host, port), family=family, backlog=backlog))
        name = local_name(host, made[0].getsockname()[1])
        if name is not None:
            made.append(socket.socket(socket.AF_UNIX))
            made[1].bind(name)
            made[1].listen(backlog)
    except OSError as error:
        for listener in made:
            listener.close()
        raise UnavailableError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return made


def welcome(connection: FramedSocket, said: Welcome) -> bool:
    """Send the verdict on a hello. Returns whether it is to accept the client."""
    connection.send(HELLO.pack(MAGIC, PROTOCOL_VERSION, said))
    return said == Welcome.ACCEPTED
