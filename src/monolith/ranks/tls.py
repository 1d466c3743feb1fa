"""TLS between ranks: a thread per connection encrypts what it reads from a local socket, and decrypts what comes back."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from monolith.errors import ConfigError
from monolith.process_bound import let_go_in_children
from monolith.transport.server import read_pem

if TYPE_CHECKING:
    from monolith.ranks.peers import MeshConfig

__all__ = ["Tls", "TlsPipe"]

_CHUNK = 2**18
_LOCAL_BUFFER = 2**20


class Tls:
    """The certificates of a rank, loaded."""

    def __init__(self, config: MeshConfig) -> None:
        assert config.tls_cert is not None
        assert config.tls_key is not None
        if config.tls_root_certs is None:
            raise ConfigError(
                "MeshConfig.tls_root_certs: expected the CA bundle that signed the certificates of the ranks, as tls_cert is "
                "given: every rank also connects to others"
            )
        for path, name, is_secret in (
            (config.tls_cert, "tls_cert", False),
            (config.tls_key, "tls_key", True),
            (config.tls_root_certs, "tls_root_certs", False),
        ):
            read_pem(path, name, is_secret=is_secret)
        self._server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            self._server.load_cert_chain(config.tls_cert, config.tls_key)
            self._client.load_verify_locations(config.tls_root_certs)
        except ssl.SSLError as error:
            raise ConfigError(f"MeshConfig.tls_cert, tls_key, tls_root_certs: they cannot be used: {error}") from None

    def accept(self, connected: socket.socket, *, timeout: float) -> TlsPipe:
        """Encrypt a connection that another rank has opened. Errors are those of sockets."""
        connected.settimeout(timeout)
        return TlsPipe(self._server.wrap_socket(connected, server_side=True))

    def connect(self, connected: socket.socket, host: str, *, timeout: float) -> TlsPipe:
        """Encrypt a connection to `host`, whose certificate is checked. Errors are those of sockets."""
        connected.settimeout(timeout)
        return TlsPipe(self._client.wrap_socket(connected, server_hostname=host))


class TlsPipe:
    """A thread between an encrypted connection and a local socket, `near`, which is used in its place.

    When one of the two is closed, what was sent before is passed on and the other is closed too.
    """

    def __init__(self, far: ssl.SSLSocket) -> None:
        self._far = far
        self.near, self._inner = socket.socketpair()
        for one in (self._far, self._inner):
            one.setblocking(False)
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._inner.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_BUFFER)
        self._thread = threading.Thread(target=self._run, name="monolith-ranks-tls", daemon=True)
        self._thread.start()
        let_go_in_children(self)

    def drain(self, *, timeout: float) -> bool:
        """After `near` was closed, wait until everything is sent. Returns whether that happened in time."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def let_go(self) -> None:
        """Close the sockets in a forked child. The connection stays open in the parent."""
        for one in (self._far, self._inner, self.near):
            one.close()

    def _run(self) -> None:
        with suppress(OSError):
            self._pass_on()
        self._inner.close()
        with suppress(OSError):
            # A reset would discard what the other end has not read yet.
            self._far.shutdown(socket.SHUT_WR)
        self._far.close()

    def _pass_on(self) -> None:
        out = into = memoryview(b"")
        is_ended = is_over = False
        while not (is_ended and not out) and not (is_over and not into):
            moved, wants = False, 0
            if not out and not is_ended:
                with suppress(BlockingIOError):
                    out = memoryview(self._inner.recv(_CHUNK))
                    is_ended, moved = not out, True
            if out:
                try:
                    out, moved = out[self._far.send(out) :], True
                except ssl.SSLWantWriteError:
                    wants |= select.POLLOUT
                except ssl.SSLWantReadError:
                    pass
            if not into and not is_over:
                try:
                    into = memoryview(self._far.recv(_CHUNK))
                    is_over, moved = not into, True
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLWantWriteError:
                    wants |= select.POLLOUT
            if into:
                with suppress(BlockingIOError):
                    into, moved = into[self._inner.send(into) :], True
            if not moved:
                self._wait(reads=not out and not is_ended, writes=bool(into), wants=wants)

    def _wait(self, *, reads: bool, writes: bool, wants: int) -> None:
        ready = select.poll()
        # While the local end does not read, neither is the other end read: it has to wait as with a plain connection.
        ready.register(self._far, wants | (0 if writes else select.POLLIN))
        ready.register(self._inner, (select.POLLIN if reads else 0) | (select.POLLOUT if writes else 0))
        ready.poll()
