"""`HttpListener`: an event loop in a thread that accepts the connections of HTTP."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time

from monolith.errors import ConfigError, StorageError
from monolith.optional_packages import import_extra
from monolith.serve.server.config import ServingConfig
from monolith.serve.server.http_connection import HttpApplication, HttpConnection, OpenConnections

__all__ = ["HttpListener", "listening_socket", "require_packages"]

_BACKLOG = 2048
_HANDSHAKE_SECONDS = 30.0


def require_packages() -> None:
    """Raise `MissingPackageError` if a package of the extra `serve` is not installed."""
    import_extra("grpc", extra="serve", purpose="serving")
    import_extra("httptools", extra="serve", purpose="serving")
    import_extra("uvloop", extra="serve", purpose="serving")


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address.

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
        raise StorageError(f"http_port: cannot listen on {host}:{port}: {error.strerror}") from error
    return bound


class HttpListener:
    """Serves an application until `close`. It has started when the constructor returns."""

    def __init__(self, application: HttpApplication, config: ServingConfig) -> None:
        require_packages()
        assert config.http_port is not None
        self._tls = _tls_context(config)
        self._socket = listening_socket(config.host, config.http_port)
        self.port: int = self._socket.getsockname()[1]
        # Waiting clients are noticed by the second, and earlier if requests may take less.
        self._sweep_secs = min(1.0, max(0.05, config.deadline_secs / 4))
        self._shared = OpenConnections(application=application, config=config)
        self._failures: list[BaseException] = []
        self._started = threading.Event()
        self._stop_asked: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._grace = 0.0
        self._clean = False
        self._thread = threading.Thread(target=self._run, name="monolith-http", daemon=True)
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
            lambda: HttpConnection(self._shared),
            sock=self._socket,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE_SECONDS,
            backlog=_BACKLOG,
        )
        self._started.set()
        while not await _is_set(self._stop_asked, self._sweep_secs):
            self._shared.sweep(time.monotonic())
        server.close()
        self._clean = await self._drain(time.monotonic() + self._grace)

    async def _drain(self, end: float) -> bool:
        """Let requests finish that are being read or answered. Returns whether all did before `end`."""
        shared = self._shared
        shared.stop()
        while any(connection.is_busy for connection in shared.open) and time.monotonic() < end:
            await asyncio.sleep(0.005)
            shared.sweep(time.monotonic())
        clean = not any(connection.is_busy for connection in shared.open)
        shared.stop()
        flushed = time.monotonic() + 1.0
        while shared.open and time.monotonic() < flushed:  # the last answers are on their way
            await asyncio.sleep(0.005)
        for connection in tuple(shared.open):
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


def _tls_context(config: ServingConfig) -> ssl.SSLContext | None:
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
    return context
