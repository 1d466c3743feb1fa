"""`Listener`: an event loop in a thread that accepts the connections of one protocol."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Collection
from typing import Protocol

from monolith.errors import ConfigError, StorageError
from monolith.optional_packages import import_extra
from monolith.serve.server.config import ServingConfig

__all__ = ["Connection", "Connections", "LINGER_SECONDS", "Listener", "listening_socket", "require_packages"]

LINGER_SECONDS = 5.0
"""How long a connection that is closed early is still read, so that the client gets to see why instead of a reset."""
_BACKLOG = 2048
_HANDSHAKE_SECONDS = 30.0


class Connection(Protocol):
    """One connection."""

    @property
    def is_busy(self) -> bool:
        """Whether a request is being read or answered."""

    def abort(self) -> None:
        """Close the connection at once."""


class Connections(Protocol):
    """All connections of a listener. Used in the thread of its event loop."""

    @property
    def open(self) -> Collection[Connection]:
        """Those that are not closed."""

    def accept(self) -> asyncio.Protocol:
        """Return what reads the next connection."""

    def sweep(self, now: float) -> None:
        """Close connections that have waited too long for their client. Called every second or more often."""

    def stop(self) -> None:
        """Close connections without a request, and the others after it."""


def require_packages() -> None:
    """Raise `MissingPackageError` if a package of the extra `serve` is not installed."""
    import_extra("httptools", extra="serve", purpose="serving")
    import_extra("uvloop", extra="serve", purpose="serving")


def listening_socket(host: str, port: int, name: str) -> socket.socket:
    """Return a socket that is bound to an address. An error names the option of the port, `name`.

    Raises:
        StorageError: the operating system refused it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StorageError(f"host: {host!r} is not an address of this machine: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise StorageError(f"{name}: cannot listen on {host}:{port}: {error.strerror}") from error
    return bound


class Listener:
    """Serves connections until `close`. It has started when the constructor returns.

    Args:
        connections: Reads and answers them.
        config: Where to listen, and TLS.
        port: The port. 0 takes a free one.
        protocol: The name of the protocol, as in the option of its port.
        alpn: How TLS calls it, if clients ask for it.
    """

    def __init__(
        self, connections: Connections, config: ServingConfig, port: int, protocol: str, *, alpn: str | None = None
    ) -> None:
        require_packages()
        self._tls = _tls_context(config, alpn)
        self._connections = connections
        self._socket = listening_socket(config.host, port, f"{protocol}_port")
        self.port: int = self._socket.getsockname()[1]
        # Waiting clients are noticed by the second, and earlier if requests may take less.
        self._sweep_secs = min(1.0, max(0.05, config.deadline_secs / 4))
        self._failures: list[BaseException] = []
        self._started = threading.Event()
        self._stop_asked: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._grace = 0.0
        self._clean = False
        self._thread = threading.Thread(target=self._run, name=f"monolith-{protocol}", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failures:
            self._thread.join()
            self._socket.close()
            raise self._failures[0]

    def _run(self) -> None:
        uvloop = import_extra("uvloop", extra="serve", purpose="serving")
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._failures.append(error)
        finally:
            self._started.set()

    async def _serve(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        self._stop_asked = asyncio.Event()
        server = await loop.create_server(
            self._connections.accept,
            sock=self._socket,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE_SECONDS,
            backlog=_BACKLOG,
        )
        self._started.set()
        while not await _is_set(self._stop_asked, self._sweep_secs):
            self._connections.sweep(time.monotonic())
        server.close()
        self._clean = await self._drain(time.monotonic() + self._grace)

    async def _drain(self, end: float) -> bool:
        """Let requests finish that are being read or answered. Returns whether all did before `end`."""
        connections = self._connections
        connections.stop()
        while any(connection.is_busy for connection in connections.open) and time.monotonic() < end:
            await asyncio.sleep(0.005)
            connections.sweep(time.monotonic())
        clean = not any(connection.is_busy for connection in connections.open)
        connections.stop()
        flushed = time.monotonic() + 1.0
        while connections.open and time.monotonic() < flushed:  # the last answers are on their way
            await asyncio.sleep(0.005)
        for connection in tuple(connections.open):
            connection.abort()
        await asyncio.sleep(0)
        return clean

    def close(self, grace: float) -> bool:
        """Stop listening, finish requests that run, close connections. Returns whether that took at most `grace` seconds."""
        if self._thread.is_alive():
            assert self._loop is not None
            assert self._stop_asked is not None
            self._grace = grace
            self._loop.call_soon_threadsafe(self._stop_asked.set)
            self._thread.join(grace + 5)
        return self._clean and not self._thread.is_alive()


async def _is_set(event: asyncio.Event, timeout: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), timeout)
    except TimeoutError:
        return False
    return True


def _tls_context(config: ServingConfig, alpn: str | None) -> ssl.SSLContext | None:
    if config.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls_cert: {config.tls_cert} and {config.tls_key} are not a certificate and its key: {error}"
        ) from None
    if alpn is not None:
        context.set_alpn_protocols([alpn])
    return context
