"""The client's side of the socket transport."""

from __future__ import annotations

import logging
import os
import socket
import time

import numpy as np

from monolith.errors import (
    AuthenticationError,
    DeadlineExceededError,
    MonolithError,
    OverloadedError,
    ProtocolError,
    UnavailableError,
)
from monolith.transport.addresses import connect
from monolith.transport.framed_socket import HELLO, FramedSocket, Welcome, hello, local_name, peer_uid
from monolith.transport.frames import MAGIC, VERSION, Frame, decode

__all__ = ["SocketConnector", "SocketStream"]

_logger = logging.getLogger(__name__)


class SocketStream:
    """One connection, over which one request at a time goes."""

    def __init__(self, connection: FramedSocket, address: str) -> None:
        self._connection = connection
        self._address = address

    def send(self, *pieces: np.ndarray, deadline: float) -> None:
        """Send the bytes of a request."""
        try:
            self._connection.send_frame(*pieces, deadline=deadline)
        except OSError as error:
            raise _failure(self._address, error) from None

    def receive(self, request: int, *, deadline: float) -> Frame:
        """The answer to `request`; answers to others, which somebody delivered twice, are skipped."""
        while True:
            try:
                data = self._connection.receive_frame(deadline=deadline)
            except OSError as error:
                raise _failure(self._address, error) from None
            room = self._connection.room
            # The server may write there again as soon as the next request is under way.
            frame = decode(data.copy() if room is not None and room.is_incoming(data) else data)
            # Requests are numbered from 1; 0 answers a frame whose number could not be read.
            if frame.request in (0, request):
                return frame

    @property
    def is_open(self) -> bool:
        """Whether the server has not closed it. Between requests, nothing but the end of the stream can arrive."""
        return not self._connection.is_readable()

    def close(self) -> None:
        """Let go of the stream, whatever state it is in."""
        self._connection.close()


class SocketConnector:
    """Opens connections to one server."""

    def __init__(self, address: str, *, token: str | None) -> None:
        self._address = address
        host, _, port = address.rpartition(":")
        self._place = (host.strip("[]"), int(port))
        self._name = local_name(*self._place)
        self._hello = hello(token)

    def open(self, *, deadline: float) -> SocketStream:
        """A connection that the server has welcomed."""
        try:
            connection = FramedSocket(
                self._nearby() or connect(*self._place, max(0.001, deadline - time.monotonic())), makes_room=True
            )
        except OSError as error:
            raise _failure(self._address, error) from None
        try:
            connection.send(self._hello, deadline=deadline)
            _require_welcome(connection.receive(HELLO.size, deadline=deadline), self._address)
        except BaseException as error:
            connection.close()
            raise (_failure(self._address, error) if isinstance(error, OSError) else error) from None
        return SocketStream(connection, self._address)

    def close(self) -> None:
        """Nothing is shared by the connections."""

    def _nearby(self) -> socket.socket | None:
        """A connection within this machine, if the server is on it."""
        if self._name is None or not hasattr(socket, "SO_PEERCRED"):
            return None
        local = socket.socket(socket.AF_UNIX)
        # Where many wait to be accepted it would wait behind them without an end; TCP does so within the deadline.
        local.setblocking(False)
        try:
            local.connect(self._name)
            user = peer_uid(local)
        except OSError:
            local.close()
            return None
        if user != os.geteuid():
            # Any user can take a name that no server has yet. Over TCP nobody sees our memory.
            _logger.debug("%s: on this machine a process of user %s listens; TCP is used", self._address, user)
            local.close()
            return None
        return local


def _require_welcome(answer: np.ndarray, address: str) -> None:
    magic, version, said = HELLO.unpack(answer.data)
    if magic != MAGIC:
        raise ProtocolError(
            f"the server at {address} does not speak frames over plain sockets; if it speaks Flight, "
            "give ClientConfig(transport='flight'), and tls_root_certs if it has TLS"
        )
    if said == Welcome.WRONG_TOKEN:
        raise AuthenticationError(
            f"the server at {address} asks for a token, and none or another one was sent; give token=, "
            "or take RunnerConfig.from_env().client in a script that monolith launch runs"
        )
    if said == Welcome.TOO_MANY_STREAMS:
        raise OverloadedError(f"the server at {address}: as many streams are open as it allows")
    if said != Welcome.COME_IN:
        raise ProtocolError(f"the server at {address} speaks version {version}, not {VERSION}; upgrade the older side")


def _failure(address: str, error: OSError) -> MonolithError:
    if isinstance(error, MonolithError):
        return error
    if isinstance(error, TimeoutError):
        return DeadlineExceededError(f"the server at {address} did not answer in time")
    return UnavailableError(f"the server at {address}: {error.strerror or error}")
