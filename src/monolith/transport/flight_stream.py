"""The client's side of Arrow Flight: streams to one server. Imported only where a client is made."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from monolith.errors import AuthenticationError, DeadlineExceededError, OverloadedError, ProtocolError, UnavailableError
from monolith.transport.calls import BasicCall
from monolith.transport.deadlines import Deadlines
from monolith.transport.frames import Frame, call_of, decode

__all__ = ["FlightConnector", "FlightStream", "HEALTH_ACTION", "OVERLOADED"]

HEALTH_ACTION = "health"
"""The action whose body is a health check, and whose result is the answer."""
OVERLOADED = "overloaded: "
"""What is in the message of a server that has as many streams as it takes."""

Result = TypeVar("Result")

_DEADLINES = Deadlines()


class FlightStream:
    """One exchange with a server, opened with the first request: a request is sent, then its answer received.

    A health check is sent as an action, which needs no exchange: a server answers it while all its streams are in use.
    """

    is_open = True  # that a server has ended an exchange is found out by using it

    def __init__(self, client: flight.FlightClient, address: str, headers: list[tuple[bytes, bytes]]) -> None:
        self._client, self._address, self._headers = client, address, headers
        self._exchange: tuple[flight.FlightStreamWriter, flight.FlightStreamReader] | None = None
        self._health: Frame | None = None

    def send(self, *pieces: np.ndarray, deadline: float) -> None:
        """Send the bytes of a request."""
        frame = np.concatenate(pieces)
        if call_of(frame) == BasicCall.HEALTH:
            self._health = decode(self._in_time(lambda: self._act(frame, deadline), deadline))
        else:
            self._in_time(lambda: self._opened()[0].write_metadata(pa.py_buffer(frame)), deadline)

    def receive(self, request: int, *, deadline: float) -> Frame:
        """The answer to `request`; answers to others, which somebody delivered twice, are skipped."""
        health, self._health = self._health, None
        if health is not None:
            return health
        while True:
            chunk = self._in_time(lambda: self._opened()[1].read_chunk(), deadline)
            if chunk.app_metadata is None:
                raise ProtocolError(f"the server at {self._address} sent a message that is no frame")
            frame = decode(chunk.app_metadata)
            # Requests are numbered from 1; 0 answers a frame whose number could not be read.
            if frame.request in (0, request):
                return frame

    def close(self) -> None:
        """Let go of the stream, whatever state it is in."""
        if self._exchange is None:
            return
        writer, reader = self._exchange
        try:
            reader.cancel()
            writer.close()
        except (pa.ArrowException, OSError):
            return

    def _opened(self) -> tuple[flight.FlightStreamWriter, flight.FlightStreamReader]:
        if self._exchange is None:
            descriptor = flight.FlightDescriptor.for_command(b"monolith")
            options = flight.FlightCallOptions(headers=self._headers)
            self._exchange = self._client.do_exchange(descriptor, options)
        return self._exchange

    def _act(self, frame: np.ndarray, deadline: float) -> pa.Buffer:
        options = flight.FlightCallOptions(timeout=max(0.001, deadline - time.monotonic()), headers=self._headers)
        action = flight.Action(HEALTH_ACTION, pa.py_buffer(frame))
        return next(iter(self._client.do_action(action, options))).body

    def _cancel(self) -> None:
        if self._exchange is not None:
            self._exchange[1].cancel()

    def _in_time(self, call: Callable[[], Result], deadline: float) -> Result:
        with _DEADLINES.watch(deadline, self._cancel) as late:
            try:
                return call()
            except StopIteration:
                raise UnavailableError(f"the server at {self._address} closed the stream") from None
            except flight.FlightUnauthenticatedError:
                raise AuthenticationError(
                    f"the server at {self._address} asks for a token, and none or another one was sent; give token=, "
                    "or take RunnerConfig.from_env().client in a script that monolith launch runs"
                ) from None
            except (pa.ArrowException, OSError) as error:
                if OVERLOADED in _first_line(error):
                    raise OverloadedError(f"the server at {self._address}: {_first_line(error)}") from None
                if late.is_set() or isinstance(error, flight.FlightTimedOutError):
                    raise DeadlineExceededError(f"the server at {self._address} did not answer in time") from None
                raise UnavailableError(f"the server at {self._address}: {_first_line(error)}") from None


class FlightConnector:
    """One connection, over which all streams go."""

    def __init__(
        self, address: str, *, connect_timeout: float, token: str | None, tls_root_certs: bytes | None
    ) -> None:
        self._address = address
        scheme = "grpc" if tls_root_certs is None else "grpc+tls"
        self._client = flight.connect(
            f"{scheme}://{address}",
            tls_root_certs=tls_root_certs,
            generic_options=[
                # Two stores of one process must not share a connection that one of them has broken.
                ("grpc.use_local_subchannel_pool", 1),
                # A server that comes back is noticed at once; our own waiting grows between attempts.
                ("grpc.initial_reconnect_backoff_ms", 50),
                ("grpc.max_reconnect_backoff_ms", 1000),
                # In spite of its name, how long one attempt to connect may take; opening a stream waits for it.
                ("grpc.min_reconnect_backoff_ms", round(1000 * min(connect_timeout, 20))),
            ],
        )
        self._headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]

    def open(self, *, deadline: float) -> FlightStream:
        """A new stream. Whether there is a server, and whether it accepts the token, shows with the first request."""
        return FlightStream(self._client, self._address, self._headers)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
