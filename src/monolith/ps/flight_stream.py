"""The client's side of Arrow Flight: streams to one server. Imported only where a client is made."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from monolith.errors import AuthenticationError, DeadlineExceededError, ProtocolError, UnavailableError
from monolith.ps.deadlines import Deadlines
from monolith.ps.frames import Frame, decode

__all__ = ["FlightStream", "StreamPool"]

Result = TypeVar("Result")

_DEADLINES = Deadlines()


class FlightStream:
    """One open exchange with a server: a request is sent, then its answer received."""

    def __init__(self, client: flight.FlightClient, address: str, options: flight.FlightCallOptions) -> None:
        self._address = address
        descriptor = flight.FlightDescriptor.for_command(b"monolith")
        self._writer, self._reader = client.do_exchange(descriptor, options)

    def send(self, frame: np.ndarray, *, deadline: float) -> None:
        """Send the bytes of a request."""
        self._in_time(lambda: self._writer.write_metadata(pa.py_buffer(frame)), deadline)

    def receive(self, request: int, *, deadline: float) -> Frame:
        """The answer to `request`; answers to others, which somebody delivered twice, are skipped."""
        while True:
            chunk = self._in_time(self._reader.read_chunk, deadline)
            if chunk.app_metadata is None:
                raise ProtocolError(f"the server at {self._address} sent a message that is no frame")
            frame = decode(chunk.app_metadata)
            # Requests are numbered from 1; 0 answers a frame whose number could not be read.
            if frame.request in (0, request):
                return frame

    def close(self) -> None:
        """Let go of the stream, whatever state it is in."""
        try:
            self._reader.cancel()
            self._writer.close()
        except (pa.ArrowException, OSError):
            return

    def _in_time(self, call: Callable[[], Result], deadline: float) -> Result:
        with _DEADLINES.watch(deadline, self._reader.cancel) as late:
            try:
                return call()
            except StopIteration:
                raise UnavailableError(f"the server at {self._address} closed the stream") from None
            except flight.FlightUnauthenticatedError:
                raise AuthenticationError(
                    f"the server at {self._address} asks for a token, and none or another one was sent; give token="
                ) from None
            except (pa.ArrowException, OSError) as error:
                if late.is_set():
                    raise DeadlineExceededError(f"the server at {self._address} did not answer in time") from None
                raise UnavailableError(f"the server at {self._address}: {_first_line(error)}") from None


class StreamPool:
    """Streams to one server, opened as threads need them and kept for the next.

    A thread that finds all of them taken waits for one.
    """

    def __init__(
        self,
        address: str,
        *,
        connect_timeout: float,
        token: str | None = None,
        tls_root_certs: bytes | None = None,
        max_streams: int = 4,
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
        headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        self._options = flight.FlightCallOptions(headers=headers)
        self._idle: list[FlightStream] = []
        self._open = 0
        self._max_streams = max_streams
        self._changed = threading.Condition()

    def take(self, *, deadline: float) -> FlightStream:
        """A stream for the caller alone, until `give_back` or `discard`."""
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._idle or self._open < self._max_streams, timeout=max(0.0, deadline - time.monotonic())
            )
            if not free:
                raise DeadlineExceededError(
                    f"the server at {self._address}: all {self._max_streams} streams were in use until the deadline"
                )
            if self._idle:
                return self._idle.pop()
            self._open += 1
        try:
            return FlightStream(self._client, self._address, self._options)
        except (pa.ArrowException, OSError) as error:
            self._closed()
            raise UnavailableError(f"the server at {self._address}: {_first_line(error)}") from None

    def give_back(self, stream: FlightStream) -> None:
        """Keep a stream on which nothing is under way for the next caller."""
        with self._changed:
            self._idle.append(stream)
            self._changed.notify()

    def discard(self, stream: FlightStream) -> None:
        """Close a stream that failed, or on which an answer may still come."""
        stream.close()
        self._closed()

    def close(self) -> None:
        """Close the streams nobody uses, and the connection."""
        with self._changed:
            idle, self._idle = self._idle, []
        for stream in idle:
            self.discard(stream)
        self._client.close()

    def _closed(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
