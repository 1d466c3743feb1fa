"""Connections between ranks: what a rank listens with, and how it connects to others."""

from __future__ import annotations

import hmac
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from monolith.cluster.net import concat_ip_and_port, get_local_host, split_address
from monolith.config import Config, Positive
from monolith.console import RareWarnings
from monolith.errors import AuthenticationError, MonolithError, ProtocolError, UnavailableError
from monolith.process_bound import ProcessBound, let_go_in_children
from monolith.ranks.messages import MAX_JOIN_BYTES
from monolith.ranks.tls import Tls, TlsPipe
from monolith.transport.addresses import connect
from monolith.transport.framed_socket import HELLO, FramedSocket, TooLongError, Welcome, hello, peer_uid
from monolith.transport.frames import MAGIC, PROTOCOL_VERSION, Frame, decode
from monolith.transport.server import is_loopback, require_safe
from monolith.transport.sockets import HELLO_SECONDS, connect_nearby, listen, require_welcome, welcome
from monolith.transport.tokens import Token, reveal

__all__ = ["Arrival", "Gate", "MeshConfig", "RankConnection", "dial"]

MAX_STRANGERS = 64
"""Connections that have not said yet what they are for. Further ones are closed."""

_log = logging.getLogger(__name__)


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


class RankConnection(FramedSocket):
    """A connection to another rank. `pipe` encrypts it, if anything does."""

    def __init__(self, connected: socket.socket, *, pipe: TlsPipe | None = None) -> None:
        super().__init__(connected if pipe is None else pipe.near)
        self.pipe = pipe
        self.is_local = self.is_local and pipe is None


class Arrival(NamedTuple):
    """A connection of another rank, and the first message on it."""

    connection: RankConnection
    frame: Frame


class Gate:
    """Listens, and hands over each connection that has sent the token and a first message. Closed with `close`."""

    def __init__(self, config: MeshConfig) -> None:
        require_safe(config)
        self.tls = None if config.tls_cert is None else Tls(config)
        """The certificates, with which connections between machines are encrypted. None: they are not."""
        self.attend: Callable[[Arrival], None] | None = None
        """Called with connections, in threads of their own. None: they wait for `take`."""
        self._token = (reveal(config.token) or "").encode()
        self._arrived: queue.Queue[Arrival] = queue.Queue()
        self._strangers: set[socket.socket] = set()
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
        for connected in strangers:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        while (arrival := self.take(timeout=0.0)) is not None:
            arrival.connection.close()

    def let_go(self) -> None:
        """Close the sockets in a forked child."""
        for listener in self._listeners:
            listener.close()
        for connected in self._strangers:
            connected.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_closed:
            try:
                connected, _ = listener.accept()
            except OSError as error:
                if not self._is_closed:
                    self._warnings.warn("cannot accept a connection of a rank: %s", error.strerror)
                    time.sleep(0.05)
                continue
            with self._lock:
                is_full = len(self._strangers) >= MAX_STRANGERS
                if not is_full:
                    self._strangers.add(connected)
            if is_full:
                self._warnings.warn("closed a connection: %s others have not said what they are for", MAX_STRANGERS)
                connected.close()
                continue
            try:
                threading.Thread(
                    target=self._greet, args=(connected,), name="monolith-ranks-greet", daemon=True
                ).start()
            except RuntimeError as error:
                self._warnings.warn("cannot serve a connection: %s; it was closed", error)
                self._forget(connected)
                connected.close()

    def _forget(self, connected: socket.socket) -> bool:
        """Return whether a stranger was known, that is, not closed meanwhile."""
        with self._lock:
            is_known = connected in self._strangers
            self._strangers.discard(connected)
            return is_known

    def _greet(self, connected: socket.socket) -> None:
        connection = None
        try:
            deadline = time.monotonic() + HELLO_SECONDS
            uid = peer_uid(connected)
            if uid not in (None, 0, os.geteuid()):
                raise AuthenticationError(f"it is of user {uid}, who is neither this user nor root")
            is_encrypted = self.tls is not None and connected.family != socket.AF_UNIX
            pipe = self.tls.accept(connected, timeout=HELLO_SECONDS) if self.tls is not None and is_encrypted else None
            connection = RankConnection(connected, pipe=pipe)
            arrival = None
            if self._is_accepted(connection, deadline):
                data = connection.receive_frame(max_bytes=MAX_JOIN_BYTES, deadline=deadline)
                arrival = Arrival(connection, decode(data))
        except (OSError, MonolithError, TooLongError) as error:
            self._warnings.warn("closed a connection that is not of a rank: %s", error)
            arrival = None
        if self._forget(connected) and arrival is not None and not self._is_closed:
            self._hand_over(arrival)
        else:
            (connection or connected).close()

    def _hand_over(self, arrival: Arrival) -> None:
        if self.attend is None:
            self._arrived.put(arrival)
        else:
            self.attend(arrival)

    def _is_accepted(self, connection: RankConnection, deadline: float) -> bool:
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


def dial(address: str, config: MeshConfig, tls: Tls | None, *, deadline: float) -> RankConnection:
    """Connect to the rank that listens at `address`.

    Raises:
        UnavailableError: nobody answers there.
        AuthenticationError: the token is wrong.
    """
    host, port = split_address(address)
    try:
        connected = connect_nearby(host, port) if config.within_host else None
        pipe = None
        if connected is None:
            left = max(0.001, deadline - time.monotonic())
            connected = connect(host, port, left)
            pipe = None if tls is None else tls.connect(connected, host, timeout=left)
        connection = RankConnection(connected, pipe=pipe)
    except OSError as error:
        hint = ""
        if is_loopback(host):
            hint = (
                "; only its own machine reaches this address: between machines, give each rank a host, a token and TLS"
            )
        raise UnavailableError(f"no rank can be reached at {address}: {error.strerror or error}{hint}") from None
    try:
        connection.send(hello(reveal(config.token)), deadline=deadline)
        require_welcome(connection.receive(HELLO.size, deadline=deadline), address)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError) and not isinstance(error, MonolithError):
            raise UnavailableError(f"the rank at {address} does not answer: {error.strerror or error}") from None
        raise
    return connection
