"""The server's side of Arrow Flight: streams of frames in, streams of frames out. Imported only where a server is made."""

from __future__ import annotations

import functools
import hmac
import logging
import threading
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

from monolith.console import RareWarnings
from monolith.errors import UnavailableError
from monolith.transport.flight_stream import HEALTH_ACTION, OVERLOADED
from monolith.transport.frame_calls import FrameCalls

__all__ = ["FlightService"]

_logger = logging.getLogger(__name__)


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _without_traceback(call: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Keep tracebacks here: Flight sends the one of any exception but its own to the client."""

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
    """Hands each frame of a `DoExchange` stream to `dispatcher` and sends its answer back."""

    def __init__(
        self,
        dispatcher: FrameCalls,
        *,
        host: str,
        port: int,
        certificate: tuple[bytes, bytes] | None,
        token: str | None,
        max_streams: int,
    ) -> None:
        self._dispatcher = dispatcher
        self._free = threading.Semaphore(max_streams)
        self._max_streams = max_streams
        make = flight.Location.for_grpc_tcp if certificate is None else flight.Location.for_grpc_tls
        try:
            super().__init__(
                make(host, port),
                tls_certificates=None if certificate is None else [flight.CertKeyPair(*certificate)],
                middleware={} if token is None else {"token": _TokenCheck(token)},
            )
        except (pa.ArrowException, OSError) as error:
            raise UnavailableError(f"cannot listen on {host}:{port}: {error}") from None

    @_without_traceback
    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """One stream, until its client closes it."""
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
        return [flight.Result(pa.py_buffer(self._dispatcher.answer_health_only(action.body, why=why)))]

    def _refuse(self, *arguments: object) -> NoReturn:
        raise flight.FlightServerError("the server offers exchanges and the action of health checks only")

    do_get = do_put = get_flight_info = get_schema = list_actions = list_flights = _refuse

    def _serve(self, reader: flight.MetadataRecordBatchReader, writer: flight.MetadataRecordBatchWriter) -> None:
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
            # A message without application metadata is no frame, whatever else is in it: the empty one is refused as such.
            data = b"" if chunk.app_metadata is None else chunk.app_metadata
            # Arrow has read the request already; counted, it holds up what comes by sockets and what is stored.
            with self._dispatcher.frames.lent() as take:
                if take(len(data)):
                    answer = self._dispatcher.answer(data)
                else:
                    why = f"requests and answers of {self._dispatcher.frames.in_use:,} bytes are in memory; try again later"
                    answer = self._dispatcher.answer_health_only(data, why=why)
                writer.write_metadata(pa.py_buffer(answer))


class _TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc] # pyarrow is not typed
    """Turns away every call, of whatever kind, that does not bring the token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()
        self._warnings = RareWarnings(_logger)

    @_without_traceback
    def start_call(self, info: flight.CallInfo, headers: dict[str, list[str | bytes]]) -> None:
        sent = headers.get("authorization", [""])[0]
        given = sent if isinstance(sent, bytes) else sent.encode()
        if not hmac.compare_digest(given, self._expected):
            self._warnings.warn("turned away a client: its token is missing or wrong")
            raise flight.FlightUnauthenticatedError("the token is missing or wrong")
