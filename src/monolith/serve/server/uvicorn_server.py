"""`HttpListener`: uvicorn in a thread, with bounds on connections that send slowly or without end."""

from __future__ import annotations

import asyncio
import socket
import threading
from functools import cache
from typing import Any

from monolith.errors import MissingPackageError, StorageError
from monolith.serve.server.asgi import HttpApp
from monolith.serve.server.config import ServingConfig

__all__ = ["HttpListener", "listening_socket", "require_packages"]

_MAX_HEAD_BYTES = 1 << 16
_HEAD_SECONDS = 30.0


def require_packages() -> None:
    """Raise `MissingPackageError` if a package of the extra `serve` is not installed."""
    try:
        import httptools  # noqa: F401 - uvicorn's other parser takes several times as long
        import orjson  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            f"serving needs the package {error.name}; run pip install 'monolith-torch[serve]'"
        ) from None


@cache
def _bounded_protocol() -> type[asyncio.Protocol]:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class BoundedProtocol(HttpToolsProtocol):
        """Closes connections whose request line and headers are too long or do not come."""

        def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - uvicorn's own
            super().__init__(*arguments, **options)
            self._head_bytes = 0
            self._in_head = True
            self._late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._late = self.loop.call_later(_HEAD_SECONDS, transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel_late()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            self._in_head = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._head_bytes = 0
            if self._late is not None:
                self._cancel_late()
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._in_head or self.transport.is_closing():
                return
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self.send_400_response(f"The headers have more than {_MAX_HEAD_BYTES} bytes.")
            elif self._late is None:
                self._late = self.loop.call_later(_HEAD_SECONDS, self.transport.close)

        def _cancel_late(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return BoundedProtocol


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

    def __init__(self, app: HttpApp, config: ServingConfig) -> None:
        require_packages()
        import uvicorn

        assert config.http_port is not None
        self._socket = listening_socket(config.host, config.http_port)
        self.port: int = self._socket.getsockname()[1]
        tls: dict[str, Any] = {}
        if config.tls_cert is not None:
            tls = {"ssl_certfile": str(config.tls_cert), "ssl_keyfile": str(config.tls_key)}
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=_bounded_protocol(),
                ws="none",
                lifespan="off",
                loop="auto",
                interface="asgi3",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=config.max_connections,
                timeout_keep_alive=75,
                **tls,
            )
        )
        self._failures: list[BaseException] = []
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monolith-http", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failures:
            self._thread.join()
            self._socket.close()
            raise self._failures[0]

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._failures.append(error)
        finally:
            self._started.set()

    async def _serve(self) -> None:
        config = self._server.config
        config.load()
        watch = asyncio.create_task(self._announce())
        await self._server.serve(sockets=[self._socket])
        await watch

    async def _announce(self) -> None:
        while not self._server.started and not self._server.should_exit:
            await asyncio.sleep(0)
        self._started.set()

    def close(self, grace: float) -> bool:
        """Stop listening, finish requests that run, close connections. Returns whether that took at most `grace` seconds."""
        self._server.config.timeout_graceful_shutdown = max(1, round(grace))
        self._server.should_exit = True
        self._thread.join(grace + 2)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(5)
        return not self._thread.is_alive()
