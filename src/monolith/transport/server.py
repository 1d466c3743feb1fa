"""`FrameServer`: answers frames on an address of this machine. It is closed to strangers by default."""

from __future__ import annotations

import ipaddress
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Annotated, Protocol, Self

from pydantic import Field, SecretStr

from monolith.config import Config
from monolith.errors import ConfigError, StorageError
from monolith.process_bound import ProcessBound
from monolith.transport.calls import FrameCalls
from monolith.transport.link import Transport
from monolith.transport.tokens import Token, read_secret_file, reveal

__all__ = [
    "FrameServer",
    "ListenConfig",
    "is_loopback",
    "read_pem",
    "require_safe",
    "short_switch_interval",
]


class ListenConfig(Config):
    """Where a server listens, which clients it accepts, and its limits.

    Example:
        >>> ListenConfig(port=7100).host
        '127.0.0.1'
    """

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """The address to listen on. One that other machines can reach needs TLS and a token."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """0 takes a free one."""
    tls_cert: Path | None = None
    """The server's certificate chain, PEM."""
    tls_key: Path | None = None
    """Its private key, PEM."""
    token: Token = None
    """The secret that a client must send with every stream, at least 16 characters."""
    max_message_bytes: Annotated[int, Field(ge=4096, lt=2**31)] = 2**28
    """Larger requests are refused, and those whose answer would be larger. Sockets skip such a request without storing it.
    Flight has read a request before it is refused, so it takes as much memory as the client sends."""
    transport: Transport | None = None
    """How frames travel: "socket", or "flight", which can encrypt. None: Flight with TLS, sockets without."""
    max_streams: Annotated[int, Field(gt=0)] = 256
    """Open streams. A client has one for each thread that calls. Requests on further ones are answered
    with `OverloadedError`, apart from health checks. One from the same machine can take up to 8 MiB for large frames."""
    max_requests: Annotated[int | None, Field(gt=0)] = None
    """Concurrent requests. Further ones are answered with `OverloadedError` at once, apart from health checks.
    None: one for each stream."""
    idle_secs: Annotated[float, Field(gt=0)] = 900.0
    """Seconds after which a stream without a request is closed. A client opens another when it needs one. Sockets only: Arrow
    Flight cannot end the stream of a client that is silent."""
    min_bytes_per_sec: Annotated[int, Field(gt=0)] = 65536
    """A stream is closed if its request is sent, or its answer read, more slowly than this for more than ten seconds. Sockets
    only."""


class Service(Protocol):
    """Listens, passes frames to `FrameCalls.answer` and sends the answers back."""

    port: int

    def shutdown(self) -> None:
        """Stop listening, send the answers of running requests, and wait until every stream has ended."""


class FrameServer:
    """Serves `calls` until `close`. It has started when the constructor returns."""

    def __init__(self, config: ListenConfig, calls: FrameCalls) -> None:
        require_safe(config)
        self._listens, self._calls = config, calls
        self._bound = ProcessBound("the server")
        self._service = _start_service(calls, config)
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
        """The incarnation of the server: a number that no other process of the same server has."""
        return self._calls.instance

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until a client asks the server to stop or `ask_to_stop` is called. Returns whether that happened in time."""
        with short_switch_interval():
            return self._calls.stop_asked.wait(timeout)

    def ask_to_stop(self) -> None:
        """Let `wait` return. Safe in a signal handler."""
        self._calls.stop_asked.set()

    def close(self, *, grace: float = 5.0) -> bool:
        """Refuse new requests, finish running ones, stop listening. Returns whether all ended within `grace` seconds.

        A Flight stream whose client neither sends nor closes cannot be ended, nor a socket whose client does not read its
        answer: they end with the process. In a forked child it does nothing.
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


SWITCH_INTERVAL = 1e-4
"""Seconds between two switches of Python threads. A request waits that long whenever a call into the core or the kernel returns
while another thread computes. With Python's own 5 ms a lookup takes twelve times as long as alone, with this 1.5 times."""


class _SwitchInterval:
    """Counts the servers of a process, so that the last one to stop restores the interval, not the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._before = 0.0

    def shorten(self) -> None:
        with self._lock:
            if not self._wanted:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(SWITCH_INTERVAL)
            self._wanted += 1

    def restore(self) -> None:
        with self._lock:
            self._wanted -= 1
            if not self._wanted:
                sys.setswitchinterval(self._before)


_switch_interval = _SwitchInterval()


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Switch between the threads of this process quickly during the block, for processes that answer requests.

    Example:
        >>> with short_switch_interval():
        ...     sys.getswitchinterval() < 0.001
        True
    """
    _switch_interval.shorten()
    try:
        yield
    finally:
        _switch_interval.restore()


def _start_service(calls: FrameCalls, config: ListenConfig) -> Service:
    certificate = _certificate(config)
    if (config.transport or ("socket" if certificate is None else "flight")) == "socket":
        from monolith.transport.sockets import SocketService

        if certificate is not None:
            raise ConfigError(
                "transport: plain sockets cannot encrypt; leave out transport='socket', or tls_cert and tls_key"
            )
        return SocketService(calls, config, token=reveal(config.token))
    from monolith.transport.flight import FlightService

    flight: Service = FlightService(calls, config, certificate=certificate, token=reveal(config.token))
    return flight


class Listens(Protocol):
    """What decides whether an address is safe to listen on. See `ListenConfig`."""

    @property
    def host(self) -> str:
        """The address."""

    @property
    def token(self) -> str | SecretStr | None:
        """The secret that clients must send."""

    @property
    def tls_cert(self) -> Path | None:
        """The certificate chain."""

    @property
    def tls_key(self) -> Path | None:
        """The private key."""


def require_safe(config: Listens) -> None:
    """Raise `ConfigError` if unauthenticated clients of other machines could connect."""
    name = type(config).__name__
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError(f"{name}: give both tls_cert and tls_key, or none")
    token = reveal(config.token)
    if token is not None and (len(token) < 16 or not token.isascii() or " " in token):
        raise ConfigError(f"{name}.token: expected at least 16 ASCII characters without spaces")
    if not is_loopback(config.host) and (config.tls_cert is None or token is None):
        raise ConfigError(
            f"{name}.host: {config.host!r} can be reached from other machines; that needs tls_cert, tls_key and a token "
            "(--tls-cert, --tls-key and --token-file of a command), or listen on 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. Names other than localhost count as public.

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
    """Return the bytes of a certificate or, with `is_secret`, of a key. An error names the option, `name`."""
    try:
        data = read_secret_file(path, name) if is_secret else path.read_bytes()
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{name}: cannot read {path}: {error.strerror}") from error
    if b"-----BEGIN " not in data:
        raise ConfigError(f"{name}: expected a PEM file, {path} is not one")
    return data
