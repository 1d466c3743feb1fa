"""`FrameServer`: something that answers frames, on an address of this machine, safe by default."""

from __future__ import annotations

import ipaddress
import threading
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

from pydantic import Field

from monolith.config import Config
from monolith.errors import ConfigError, StorageError
from monolith.process_bound import ProcessBound
from monolith.transport.frame_calls import FrameCalls
from monolith.transport.services import StreamLimits, start_service
from monolith.transport.stream_pool import Transport
from monolith.transport.tokens import Token, read_secret_file, reveal
from monolith.transport.turns import short_turns

__all__ = ["FrameServer", "ListenConfig", "is_loopback", "read_pem", "require_safe"]


class ListenConfig(Config):
    """Where a server listens, whom it lets in, and how much it takes.

    Example:
        >>> ListenConfig(port=7100).host
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
    token: Token = None
    """What a client must send with every stream; at least 16 characters."""
    max_message_bytes: Annotated[int, Field(ge=4096, lt=2**31)] = 2**28
    """Larger requests are refused, and those whose answer would be larger. Sockets skip them; Flight has read a request when it
    is refused, so there a client can make the server take as much memory as it sends, and no more."""
    transport: Transport | None = None
    """How frames travel: "socket", or "flight", which can encrypt; None: Flight with TLS, sockets without."""
    max_streams: Annotated[int, Field(gt=0)] = 256
    """Streams open at the same time. A client has one for each of its threads that call. Requests on further ones are answered
    with `OverloadedError`, apart from health checks. One from the same machine can take up to 8 MiB for large frames."""
    max_requests: Annotated[int | None, Field(gt=0)] = None
    """Requests under way at the same time. Further ones are answered with `OverloadedError` at once, apart from health checks.
    None: one for each stream."""
    idle_secs: Annotated[float, Field(gt=0)] = 900.0
    """Seconds after which a stream without a request is closed. A client opens another when it needs one. Sockets only: Arrow
    Flight cannot end the stream of a client that is silent."""
    min_bytes_per_sec: Annotated[int, Field(gt=0)] = 65536
    """A stream whose request comes in, or whose answer is read, more slowly than this for ten seconds and more is closed. Sockets
    only."""


class FrameServer:
    """Serves `calls` until `close`. It has started when the constructor returns."""

    def __init__(self, config: ListenConfig, calls: FrameCalls) -> None:
        require_safe(config)
        self._listens, self._calls = config, calls
        self._bound = ProcessBound("the server")
        self._service = start_service(
            calls,
            transport=config.transport,
            host=config.host,
            port=config.port,
            certificate=_certificate(config),
            token=reveal(config.token),
            limits=StreamLimits(
                max_streams=config.max_streams,
                max_message_bytes=config.max_message_bytes,
                idle_secs=config.idle_secs,
                min_bytes_per_sec=config.min_bytes_per_sec,
            ),
        )
        if config.max_requests is not None:
            calls.max_requests = config.max_requests

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._service.port)

    @property
    def address(self) -> str:
        """host:port, as clients take it."""
        host = f"[{self._listens.host}]" if ":" in self._listens.host else self._listens.host
        return f"{host}:{self.port}"

    @property
    def instance(self) -> int:
        """Which life of the server this is: a number that no other process of the same server has."""
        return self._calls.instance

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until a client asks the server to end, or `ask_to_stop` is called; whether one did."""
        with short_turns():
            return self._calls.stop_asked.wait(timeout)

    def ask_to_stop(self) -> None:
        """Let `wait` return. Safe in a signal handler."""
        self._calls.stop_asked.set()

    def close(self, *, grace: float = 5.0) -> bool:
        """Finish what is under way, refuse what comes, stop listening; whether all ended within `grace` seconds.

        A Flight stream whose client neither sends nor closes cannot be ended from here, nor a socket whose client does not read
        its answer: they go with the process. A forked child leaves the server of its parent alone.
        """
        if not self._bound.is_here:
            return True
        idle = self._calls.stop(grace=grace)
        ended = threading.Thread(target=self._service.shutdown, name="monolith-server-shutdown", daemon=True)
        ended.start()
        ended.join(grace)
        return idle and not ended.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"


def require_safe(config: ListenConfig) -> None:
    """Raise `ConfigError` if strangers could get in."""
    name = type(config).__name__
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError(f"{name}: tls_cert and tls_key belong together; give both or none")
    token = reveal(config.token)
    if token is not None and (len(token) < 16 or not token.isascii() or " " in token):
        raise ConfigError(f"{name}.token: expected at least 16 ASCII characters without spaces")
    if not is_loopback(config.host) and (config.tls_cert is None or token is None):
        raise ConfigError(
            f"{name}.host: {config.host!r} can be reached from other machines; that needs tls_cert, tls_key and a token, "
            "or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost may mean anything, so it counts as public.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
        (True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _certificate(config: ListenConfig) -> tuple[bytes, bytes] | None:
    if config.tls_cert is None or config.tls_key is None:
        return None
    return read_pem(config.tls_cert, "tls_cert"), read_pem(config.tls_key, "tls_key", is_secret=True)


def read_pem(path: Path, name: str, *, is_secret: bool = False) -> bytes:
    """Return the bytes of a certificate or, with `is_secret`, of a key. An error names the option it was given by."""
    try:
        data = read_secret_file(path, name) if is_secret else path.read_bytes()
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{name}: cannot read {path}: {error.strerror}") from error
    if b"-----BEGIN " not in data:
        raise ConfigError(f"{name}: expected a PEM file, {path} is none")
    return data
