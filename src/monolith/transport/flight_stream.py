"""The client's side of Arrow Flight: streams to one server. Imported only where a client is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from monolith.errors import AuthenticationError, DeadlineExceededError, ProtocolError, UnavailableError
from monolith.transport.deadlines import Deadlines
from monolith.transport.frames import Frame, decode

__all__ = ["FlightConnector", "FlightStream"]

Result = TypeVar("Result")

_DEADLINES = Deadlines()


class FlightStream:
    """One open exchange with a server: a request is sent, then its answer received."""

    def __init__(self, client: flight.FlightClient, address: str, options: flight.FlightCallOptions) -> None:
        self._address = address
        descriptor = flight.FlightDescriptor.for_command(b"monolith")
        self._writer, self._reader = client.do_exchange(descriptor, options)

    def send(self, *pieces: np.ndarray, deadline: float) -> None:
        """Send the bytes of a request."""
        frame = np.concatenate(pieces)
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
                    f"the server at {self._address} asks for a token, and none or another one was sent; give token=, "
                    "or take RunnerConfig.from_env().client in a script that monolith launch runs"
                ) from None
            except (pa.ArrowException, OSError) as error:
                if late.is_set():
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
        headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        self._options = flight.FlightCallOptions(headers=headers)

    def open(self, *, deadline: float) -> FlightStream:
        """A new stream; whether there is a server at all is found out here, who may come in only by the first answer."""
        try:
            return FlightStream(self._client, self._address, self._options)
        except (pa.ArrowException, OSError) as error:
            raise UnavailableError(f"the server at {self._address}: {_first_line(error)}") from None

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
