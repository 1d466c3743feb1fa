"""Connections between ranks: what a rank listens with, and how it connects to others."""

from __future__ import annotations

import hmac
import logging
import queue
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, Field, ValidationError

from monolith.cluster.net import concat_ip_and_port, get_local_host, split_address
from monolith.config import Config, Positive
from monolith.console import RareWarnings
from monolith.errors import MonolithError, ProtocolError, UnavailableError
from monolith.process_bound import ProcessBound, let_go_in_children
from monolith.transport.addresses import connect
from monolith.transport.framed_socket import HELLO, FramedSocket, Welcome, hello
from monolith.transport.frames import MAGIC, PROTOCOL_VERSION, Frame, decode, encode
from monolith.transport.server import require_safe
from monolith.transport.sockets import HELLO_SECONDS, connect_nearby, listen, require_welcome, welcome
from monolith.transport.tokens import Token, reveal

__all__ = ["Arrival", "Gate", "MeshConfig", "dial", "read_message", "receive_message", "send_message"]

MAX_STRANGERS = 64
"""Connections that have not said yet what they are for. Further ones are closed."""
MAX_HELLO_BYTES = 2**20

_log = logging.getLogger(__name__)
Message = TypeVar("Message", bound=BaseModel)


class MeshConfig(Config):
    """Where a rank listens for the others, which connections it accepts, and its time limits.

    Example:
        >>> MeshConfig(rank_timeout_secs=10.0).host
        '127.0.0.1'
    """

    config_group: ClassVar[str] = "run"

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """The address to listen on. One that other machines can reach needs TLS and a token."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """0 takes a free one."""
    advertised_host: Annotated[str, Field(min_length=1)] | None = None
    """The host under which the other ranks reach this one. None: `host`, or the address of this machine if that is a wildcard."""
    token: Token = None
    """The secret that all ranks share, at least 16 characters."""
    tls_cert: Path | None = None
    """The certificate chain of this rank, PEM."""
    tls_key: Path | None = None
    """Its private key, PEM."""
    tls_root_certs: Path | None = None
    """CA bundle (PEM) that signed the certificates of the ranks. Needed with `tls_cert`."""
    within_host: bool = True
    """Whether ranks of one machine use Unix sockets and shared memory. False: TCP."""
    formation_secs: Positive = 600.0
    """How long a rank waits until all others have joined."""
    rank_timeout_secs: Positive = 30.0
    """A rank that was not heard from for this long counts as lost. Ranks that compute are heard from."""
    exchange_timeout_secs: Positive = 1800.0
    """How long an exchange waits for a rank that is alive. Longer than any step, save or evaluation of one rank."""


class Arrival(NamedTuple):
    """A connection of another rank, and the first message on it."""

    connection: FramedSocket
    frame: Frame


class Gate:
    """Listens, and hands over each connection that has sent the token and a first message. Closed with `close`."""

    def __init__(self, config: MeshConfig) -> None:
        require_safe(config)
        self._token = (reveal(config.token) or "").encode()
        self._arrived: queue.Queue[Arrival] = queue.Queue()
        self._strangers: set[FramedSocket] = set()
        self._lock = threading.Lock()
        self._warnings = RareWarnings(_log)
        self._is_closed = False
        self._bound = ProcessBound("the connections of a rank")
        self._listeners = listen(config.host, config.port, backlog=256)
        port = self._listeners[0].getsockname()[1]
        if not config.within_host and len(self._listeners) > 1:
            self._listeners.pop().close()
        self.address = concat_ip_and_port(_advertised(config), port)
        """Where the other ranks reach this one."""
        self._threads = [
            threading.Thread(target=self._accept, args=(one,), name="monolith-ranks-accept", daemon=True)
            for one in self._listeners
        ]
        for thread in self._threads:
            thread.start()
        let_go_in_children(self)

    def take(self, *, timeout: float) -> Arrival | None:
        """Return the next connection, or None if none has come in time."""
        with suppress(queue.Empty):
            return self._arrived.get(timeout=timeout) if timeout > 0 else self._arrived.get_nowait()
        return None

    def close(self) -> None:
        """Stop listening, and close connections that nobody has taken. Idempotent."""
        if self._is_closed or not self._bound.is_here:
            return
        self._is_closed = True
        for listener in self._listeners:
            with suppress(OSError):
                # Closing alone does not wake a thread that waits in accept.
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._threads:
            thread.join()
        with self._lock:
            strangers, self._strangers = self._strangers, set()
        for connection in strangers:
            connection.close()
        while (arrival := self.take(timeout=0.0)) is not None:
            arrival.connection.close()

    def let_go(self) -> None:
        """Close the sockets in a forked child."""
        for listener in self._listeners:
            listener.close()
        for connection in self._strangers:
            connection.let_go()

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_closed:
            try:
                connected, _ = listener.accept()
            except OSError as error:
                if not self._is_closed:
                    self._warnings.warn("cannot accept a connection of a rank: %s", error.strerror)
                    time.sleep(0.05)
                continue
            connection = FramedSocket(connected)
            with self._lock:
                is_full = len(self._strangers) >= MAX_STRANGERS
                if not is_full:
                    self._strangers.add(connection)
            if is_full:
                self._warnings.warn("closed a connection: %s others have not said what they are for", MAX_STRANGERS)
                connection.close()
                continue
            threading.Thread(target=self._greet, args=(connection,), name="monolith-ranks-greet", daemon=True).start()

    def _greet(self, connection: FramedSocket) -> None:
        arrival = None
        try:
            deadline = time.monotonic() + HELLO_SECONDS
            if self._is_accepted(connection, deadline):
                data = connection.receive_frame(max_bytes=MAX_HELLO_BYTES, deadline=deadline)
                arrival = Arrival(connection, decode(data))
        except (OSError, MonolithError) as error:
            self._warnings.warn("closed a connection that is not of a rank: %s", error)
        finally:
            with self._lock:
                is_known = connection in self._strangers
                self._strangers.discard(connection)
                if arrival is not None and is_known and not self._is_closed:
                    self._arrived.put(arrival)
                else:
                    connection.close()

    def _is_accepted(self, connection: FramedSocket, deadline: float) -> bool:
        magic, version, size = HELLO.unpack(connection.receive(HELLO.size, deadline=deadline).data)
        if magic != MAGIC:
            raise ProtocolError(f"hello: expected the magic {MAGIC!r}, got {magic!r}")
        if version != PROTOCOL_VERSION:
            return welcome(connection, Welcome.OTHER_VERSION)
        token = connection.receive(size, deadline=deadline).tobytes()
        if self._token and not hmac.compare_digest(token, self._token):
            self._warnings.warn("refused a rank: its token is missing or wrong")
            return welcome(connection, Welcome.WRONG_TOKEN)
        return welcome(connection, Welcome.ACCEPTED)


def _advertised(config: MeshConfig) -> str:
    if config.advertised_host is not None:
        return config.advertised_host
    return get_local_host() if config.host in ("0.0.0.0", "::") else config.host


def dial(address: str, config: MeshConfig, *, deadline: float) -> FramedSocket:
    """Connect to the rank that listens at `address`.

    Raises:
        UnavailableError: nobody answers there.
        AuthenticationError: the token is wrong.
    """
    host, port = split_address(address)
    near = connect_nearby(host, port) if config.within_host else None
    try:
        connection = FramedSocket(near or connect(host, port, max(0.001, deadline - time.monotonic())))
    except OSError as error:
        raise UnavailableError(f"no rank listens at {address}: {error.strerror or error}") from None
    try:
        connection.send(hello(reveal(config.token)), deadline=deadline)
        require_welcome(connection.receive(HELLO.size, deadline=deadline), address)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError) and not isinstance(error, MonolithError):
            raise UnavailableError(f"the rank at {address} does not answer: {error.strerror or error}") from None
        raise
    return connection


def send_message(connection: FramedSocket, call: int, message: BaseModel, *, deadline: float) -> None:
    """Send one message of the formation of a run. Errors are those of sockets."""
    connection.send_frame(encode(call=call, request=1, text=message.model_dump_json()), deadline=deadline)


def receive_message(connection: FramedSocket, *, deadline: float) -> Frame:
    """Return the next message. Errors are those of sockets, and `ProtocolError`."""
    return decode(connection.receive_frame(max_bytes=MAX_HELLO_BYTES, deadline=deadline))


def read_message(frame: Frame, kind: type[Message]) -> Message:
    """Return the content of a message, checked."""
    try:
        return kind.model_validate_json(frame.text)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ProtocolError(f"{kind.__name__}.{where}: {problem['msg']}") from None
