"""`ParameterServer`: tables and dense parameters for many workers, over streams that stay open."""

from __future__ import annotations

import ipaddress
import threading
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

from pydantic import Field

from monolith.config import Config
from monolith.errors import ConfigError, StorageError
from monolith.ps.dispatch import Dispatcher
from monolith.ps.services import start_service
from monolith.ps.stream_pool import Transport

__all__ = ["ParameterServer", "ServerConfig"]


class ServerConfig(Config):
    """Where a server listens, whom it lets in, and how much it takes.

    Example:
        >>> ServerConfig(memory_limit=8 * 2**30).host
        '127.0.0.1'
    """

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """The address to listen on; one that other machines can reach needs TLS and a token."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """0 takes a free one."""
    tls_cert: Path | None = None
    """The server's certificate chain, PEM."""
    tls_key: Path | None = None
    """Its private key, PEM."""
    token: Annotated[str | None, Field(repr=False)] = None
    """What a client must send with every stream; at least 16 characters."""
    memory_limit: Annotated[int | None, Field(gt=0)] = None
    """Bytes that tables and dense parameters may take; a push beyond is refused. None: no limit."""
    max_message_bytes: Annotated[int, Field(ge=4096, lt=2**31)] = 2**28
    """Larger requests are refused, and those whose answer would be larger. Flight has read a request when it is refused, so a
    client can make the server take as much memory as it sends, and no more."""
    transport: Transport | None = None
    """How frames travel: "socket", or "flight", which can encrypt; None: Flight with TLS, sockets without."""
    folder: Path | None = None
    """Where it keeps what it holds: a log of the changes, snapshots and checkpoints, on a disk that survives it. A server that is
    started on a folder with a log restores itself from it. None: in memory only."""
    log_flush_secs: Annotated[float | None, Field(ge=0)] = None
    """Seconds between two commits to the log in `folder`, which is what a crash costs at most. 0: nothing that was acknowledged
    is ever lost; a push is answered when it is durable. None: the log is written with checkpoints only."""
    take_over: bool = False
    """Take `folder` from a process that still holds it, such as one that hangs; that one is fenced and ends."""
    max_streams: Annotated[int, Field(gt=0)] = 256
    """Streams open at the same time; a worker has one for each of its threads that call. Further ones are turned away."""


class ParameterServer:
    """Serves until `close`. It has started when the constructor returns.

    Requests are handled by gRPC's threads, which unpack arrays and call the core; nothing else runs here.

    Example:
        >>> from monolith.ps import ParameterServer, RemoteStore
        >>> from monolith.testing import sgd_table_config
        >>> with ParameterServer() as server, RemoteStore(server.address) as store:
        ...     store.declare([sgd_table_config(2, name="item")])
        ...     store.stats()["item"].rows
        0
    """

    def __init__(self, config: ServerConfig | None = None) -> None:
        self.config = config or ServerConfig()
        _require_safe(self.config)
        self._dispatcher = Dispatcher(
            memory_limit=self.config.memory_limit,
            max_frame_bytes=self.config.max_message_bytes,
            folder=self.config.folder,
            log_flush_secs=self.config.log_flush_secs,
            take_over=self.config.take_over,
        )
        try:
            self._service = start_service(
                self._dispatcher,
                transport=self.config.transport,
                host=self.config.host,
                port=self.config.port,
                certificate=self._certificate(),
                token=self.config.token,
                max_streams=self.config.max_streams,
                max_message_bytes=self.config.max_message_bytes,
            )
        except BaseException:
            self._dispatcher.close()
            raise

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._service.port)

    @property
    def address(self) -> str:
        """host:port, as `RemoteStore` takes it."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"{host}:{self.port}"

    @property
    def instance(self) -> int:
        """Which life of the server this is: a number that no other process of the same server has."""
        return self._dispatcher.instance

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until a client asks the server to end, or `ask_to_stop` is called; whether one did."""
        return self._dispatcher.stop_asked.wait(timeout)

    def ask_to_stop(self) -> None:
        """Let `wait` return. Safe in a signal handler."""
        self._dispatcher.stop_asked.set()

    def close(self, *, grace: float = 5.0) -> bool:
        """Finish what is under way, refuse what comes, stop listening; whether all ended within `grace` seconds.

        A stream whose client neither sends nor closes cannot be ended from here: it goes with the process.
        """
        idle = self._dispatcher.stop(grace=grace)
        ended = threading.Thread(target=self._service.shutdown, name="monolith-ps-shutdown", daemon=True)
        ended.start()
        ended.join(grace)
        self._dispatcher.close()
        return idle and not ended.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ParameterServer({self.address!r})"

    def _certificate(self) -> tuple[bytes, bytes] | None:
        if self.config.tls_cert is None or self.config.tls_key is None:
            return None
        return _read(self.config.tls_cert, "tls_cert"), _read(self.config.tls_key, "tls_key")


def _require_safe(config: ServerConfig) -> None:
    # Not by pydantic, whose message would show all fields, and so the token, to whoever reads the log.
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("ServerConfig: tls_cert and tls_key belong together; give both or none")
    if config.token is not None and (len(config.token) < 16 or not config.token.isascii() or " " in config.token):
        raise ConfigError("ServerConfig.token: expected at least 16 ASCII characters without spaces")
    if not is_loopback(config.host) and (config.tls_cert is None or config.token is None):
        raise ConfigError(
            f"ServerConfig.host: {config.host!r} can be reached from other machines; that needs tls_cert, tls_key and a token, "
            "or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost may mean anything, so it counts as public."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(path: Path, name: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"{name}: cannot read {path}: {error.strerror}") from error
    if b"-----BEGIN " not in data:
        raise ConfigError(f"{name}: expected a PEM file, {path} is none")
    return data
