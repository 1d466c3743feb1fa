"""Frames over Arrow Flight, which can encrypt: both ends. Imported only where Flight is used."""

from __future__ import annotations

import functools
import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from monolith.console import RareWarnings
from monolith.errors import AuthenticationError, DeadlineExceededError, OverloadedError, ProtocolError, UnavailableError
from monolith.process_bound import let_go_in_children
from monolith.transport.calls import BasicCall, FrameCalls
from monolith.transport.frames import Frame, call_of, decode
from monolith.transport.tokens import NO_TOKEN

if TYPE_CHECKING:
    from monolith.transport.server import ListenConfig

__all__ = ["Deadlines", "FlightConnector", "FlightService", "FlightStream", "HEALTH_ACTION", "OVERLOADED"]

_log = logging.getLogger(__name__)


class Deadlines:
    """Calls a function if a block has not ended in time. One sleeping thread serves the whole process.

    Example:
        >>> with Deadlines().watch(time.monotonic() + 60, lambda: print("too late")) as late:
        ...     pass
        >>> late.is_set()
        False
    """

    def __init__(self) -> None:
        self._watched: dict[int, tuple[float, Callable[[], None], threading.Event]] = {}
        self._changed = threading.Condition()
        self._wakes_at = float("inf")
        self._next = 0
        self._is_running = False
        let_go_in_children(self)

    def let_go(self) -> None:
        """Reset in a forked child, which has none of the parent's threads."""
        self._watched, self._changed = {}, threading.Condition()
        self._wakes_at, self._is_running = float("inf"), False

    @contextmanager
    def watch(self, at: float, expire: Callable[[], None]) -> Iterator[threading.Event]:
        """Call `expire` in another thread if the block still runs at `at` (of `time.monotonic`). The event is set then."""
        late = threading.Event()
        with self._changed:
            self._start()
            self._next += 1
            number = self._next
            self._watched[number] = (at, expire, late)
            # Wake the thread only if it would sleep too long. Blocks that have ended are removed when it wakes.
            if at < self._wakes_at:
                self._changed.notify()
        try:
            yield late
        finally:
            with self._changed:
                self._watched.pop(number, None)

    def _start(self) -> None:
        if not self._is_running:
            self._is_running = True
            threading.Thread(target=self._run, name="monolith-deadlines", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                over = [number for number, (at, _, _) in self._watched.items() if at <= now]
                expired = [self._watched.pop(number) for number in over]
                if not expired:
                    self._wakes_at = min((at for at, _, _ in self._watched.values()), default=float("inf"))
                    self._changed.wait(None if self._wakes_at == float("inf") else self._wakes_at - now)
                    self._wakes_at = 0.0
            for _, expire, late in expired:
                late.set()
                try:
                    expire()
                except Exception:
                    # The thread must survive: without it no deadline would ever expire.
                    _log.exception("could not end a call that has passed its deadline")


HEALTH_ACTION = "health"
"""The action whose body is a health check, and whose result is the answer."""
OVERLOADED = "overloaded: "
"""Begins the message of a server that has reached its limit of streams."""

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")

_DEADLINES = Deadlines()


class FlightStream:
    """One exchange with a server, opened with the first request: a request is sent, then its answer received.

    A health check is sent as an action, which needs no exchange: a server answers it while all its streams are in use.
    """

    is_open = True  # only using an exchange shows that the server has ended it

    def __init__(self, client: flight.FlightClient, address: str, headers: list[tuple[bytes, bytes]]) -> None:
        self._client, self._address, self._headers = client, address, headers
        self._exchange: tuple[flight.FlightStreamWriter, flight.FlightStreamReader] | None = None
        self._health: Frame | None = None

    def send(self, *parts: np.ndarray, deadline: float) -> None:
        """Send the bytes of a request."""
        frame = np.concatenate(parts)
        if call_of(frame) == BasicCall.HEALTH:
            self._health = decode(self._in_time(lambda: self._act(frame, deadline), deadline))
        else:
            self._in_time(lambda: self._opened()[0].write_metadata(pa.py_buffer(frame)), deadline)

    def receive(self, request: int, *, deadline: float) -> Frame:
        """Return the answer to `request`. Answers to other requests, delivered twice by the network, are skipped."""
        health, self._health = self._health, None
        if health is not None:
            return health
        while True:
            chunk = self._in_time(lambda: self._opened()[1].read_chunk(), deadline)
            if chunk.app_metadata is None:
                raise ProtocolError(f"the server at {self._address} sent a message that is not a frame")
            frame = decode(chunk.app_metadata)
            # Requests are numbered from 1. 0 answers a frame whose number could not be read.
            if frame.request in (0, request):
                return frame

    def close(self) -> None:
        """Close the stream in any state."""
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
                raise AuthenticationError(f"the server at {self._address} {NO_TOKEN}") from None
            except (pa.ArrowException, OSError) as error:
                if OVERLOADED in _first_line(error):
                    raise OverloadedError(f"the server at {self._address}: {_first_line(error)}") from None
                if late.is_set() or isinstance(error, flight.FlightTimedOutError):
                    raise DeadlineExceededError(f"the server at {self._address} did not answer in time") from None
                raise UnavailableError(f"the server at {self._address}: {_first_line(error)}") from None


class FlightConnector:
    """Opens streams over one shared connection."""

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
                # Notice quickly that a server is back. Our own retries back off.
                ("grpc.initial_reconnect_backoff_ms", 50),
                ("grpc.max_reconnect_backoff_ms", 1000),
                # In spite of its name, the time limit of one attempt to connect. Opening a stream waits for it.
                ("grpc.min_reconnect_backoff_ms", round(1000 * min(connect_timeout, 20))),
            ],
        )
        self._headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]

    def open(self, *, deadline: float) -> FlightStream:
        """Return a new stream. Only its first request shows whether there is a server and whether it accepts the token."""
        return FlightStream(self._client, self._address, self._headers)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


_logger = logging.getLogger(__name__)


def _without_traceback(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Keep tracebacks on the server: Flight would send that of any exception but its own to the client."""

    @functools.wraps(call)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return call(*args, **kwargs)
        except flight.FlightError:
            raise
        except (pa.ArrowException, OSError) as error:
            # The client has disconnected, or speaks another protocol.
            _logger.debug("a call over Flight ended: %s", error)
            raise flight.FlightServerError("the call was cut off") from None
        except Exception as error:
            _logger.exception("a call over Flight failed")
            raise flight.FlightServerError(f"the server failed: {type(error).__name__}; its log has more") from None

    return wrapped


class FlightService(flight.FlightServerBase):  # type: ignore[misc] # pyarrow is not typed
    """Passes each frame of a `DoExchange` stream to `calls` and sends the answer back."""

    def __init__(
        self, calls: FrameCalls, config: ListenConfig, *, certificate: tuple[bytes, bytes] | None, token: str | None
    ) -> None:
        self._calls = calls
        self._free = threading.Semaphore(config.max_streams)
        self._max_streams = config.max_streams
        make = flight.Location.for_grpc_tcp if certificate is None else flight.Location.for_grpc_tls
        try:
            super().__init__(
                make(config.host, config.port),
                tls_certificates=None if certificate is None else [flight.CertKeyPair(*certificate)],
                middleware={} if token is None else {"token": _TokenCheck(token)},
            )
        except (pa.ArrowException, OSError) as error:
            raise UnavailableError(f"cannot listen on {config.host}:{config.port}: {error}") from None

    @_without_traceback
    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Serve one stream until its client closes it."""
        if not self._free.acquire(blocking=False):
            raise flight.FlightUnavailableError(
                f"{OVERLOADED}{self._max_streams} streams are open, no more are allowed"
            )
        try:
            self._serve(reader, writer)
        finally:
            self._free.release()

    @_without_traceback
    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[flight.Result]:
        """Answer a health check. It needs no stream, so it is answered while all of them are taken."""
        why = f"expected a health check as the action {HEALTH_ACTION!r}, got {action.type!r}"
        return [flight.Result(pa.py_buffer(self._calls.answer_health_only(action.body, why=why)))]

    def _refuse(self, *arguments: object) -> NoReturn:
        raise flight.FlightServerError("the server offers exchanges and the action of health checks only")

    do_get = do_put = get_flight_info = get_schema = list_actions = list_flights = _refuse

    def _serve(self, reader: flight.MetadataRecordBatchReader, writer: flight.MetadataRecordBatchWriter) -> None:
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
            # A message without application metadata is not a frame. It is refused as an empty one.
            data = b"" if chunk.app_metadata is None else chunk.app_metadata
            # Arrow has read the request already. Count it, so that requests over sockets and stored rows leave memory for it.
            with self._calls.frames.lent() as take:
                if take(len(data)):
                    answer = self._calls.answer(data)
                else:
                    why = f"requests and answers of {self._calls.frames.in_use:,} bytes are in memory; try again later"
                    answer = self._calls.answer_health_only(data, why=why)
                writer.write_metadata(pa.py_buffer(answer))


class _TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc] # pyarrow is not typed
    """Refuses every call without the token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()
        self._warnings = RareWarnings(_logger)

    @_without_traceback
    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str | bytes]]) -> None:
        sent = headers.get("authorization", [""])[0]
        given = sent if isinstance(sent, bytes) else sent.encode()
        if not hmac.compare_digest(given, self._expected):
            self._warnings.warn("refused a client: its token is missing or wrong")
            raise flight.FlightUnauthenticatedError("the token is missing or wrong")
