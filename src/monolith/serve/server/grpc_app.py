"""`GrpcApp`: the methods of the Open Inference Protocol v2 over gRPC. It answers calls that `GrpcConnection` has read."""

from __future__ import annotations

import hmac
import math
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from google.protobuf.message import DecodeError, Message

from monolith.errors import AuthenticationError, InvalidArgumentError, MessageTooLargeError, ProtocolError
from monolith.proto import open_inference_pb2 as messages
from monolith.serve.server.failures import RequestFailure, failure_of
from monolith.serve.server.grpc_connection import IncomingCall
from monolith.serve.server.grpc_messages import (
    UsualMessage,
    decode_message,
    encode_message,
    read_infer_message,
    stated_model,
)
from monolith.serve.server.handler import Handler, PendingAnswer
from monolith.serve.server.limits import deadline_of
from monolith.serve.server.scheduling import INLINE_BYTES, PredictionScheduler
from monolith.transport.tokens import reveal

__all__ = ["GrpcApp", "inflated", "timeout_of"]

_SERVICE = "/inference.GRPCInferenceService/"
_PUBLIC = {f"{_SERVICE}ServerLive", f"{_SERVICE}ServerReady"}
_INFER = f"{_SERVICE}ModelInfer"
_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_WINDOW_BITS = {"gzip": 31, "deflate": 15}
"""What zlib calls the encodings of gRPC."""


class _UnknownEncodingError(ProtocolError):
    """A message is compressed in a way that this server does not know."""


def timeout_of(metadata: Mapping[str, str]) -> float:
    """Return the seconds that a client allows for a call.

    Example:
        >>> timeout_of({"grpc-timeout": "250m"})
        0.25
    """
    text = metadata.get("grpc-timeout")
    if text is None:
        return math.inf
    number, unit = text[:-1], _SECONDS.get(text[-1:])
    if unit is None or not (number.isascii() and number.isdecimal() and len(number) <= 8):
        raise InvalidArgumentError(
            f"grpc-timeout: expected up to 8 digits and one of H, M, S, m, u, n, got {text!r:.40}"
        )
    return int(number) * unit


def inflated(call: IncomingCall, limit: int) -> bytes:
    """Return the message of a call, which may be compressed, if it has at most `limit` bytes."""
    data = call.message
    if call.is_compressed:
        encoding = call.metadata.get("grpc-encoding", "identity")
        bits = _WINDOW_BITS.get(encoding)
        if bits is None:
            raise _UnknownEncodingError(
                f"grpc-encoding: expected one of {', '.join(_WINDOW_BITS)} for a compressed message, got {encoding!r:.40}"
            )
        reader = zlib.decompressobj(bits)
        try:
            data = reader.decompress(data, limit + 1)
        except zlib.error as error:
            raise ProtocolError(f"message: is not compressed by {encoding}: {error}") from None
        if len(data) <= limit and not reader.eof:
            raise ProtocolError(f"message: ends within what {encoding} has compressed")
    if len(data) > limit:
        raise MessageTooLargeError(f"message: expected at most {limit:,} bytes")
    return data


@dataclass(frozen=True, slots=True)
class _Method:
    request: type[Message]
    answer: Callable[[Message], Message]


class GrpcApp:
    """Answers calls, in the thread of the event loop.

    Args:
        handler: Makes the answers.
        pool: Threads for requests that would hold up the event loop.
    """

    def __init__(self, handler: Handler, pool: Executor) -> None:
        self._handler = handler
        self._scheduler = PredictionScheduler(handler, pool)
        token = reveal(handler.config.token)
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._methods = {
            f"{_SERVICE}{name}": _Method(getattr(messages, f"{name}Request"), getattr(self, f"_{name}"))
            for name in (
                "ServerLive",
                "ServerReady",
                "ModelReady",
                "ServerMetadata",
                "ModelMetadata",
                "RepositoryIndex",
            )
        }

    def answer(self, call: IncomingCall) -> None:
        """Answer now, or later in the same thread."""
        try:
            if self._authorization is not None and call.path not in _PUBLIC:
                self._check_token(call.metadata)
            if call.path == _INFER:
                self._scheduler.submit(_Prediction(self._handler, call))
            else:
                call.respond(self._answer(call))
        except Exception as error:
            call.respond(_refined(error, failure_of(error)))

    def _answer(self, call: IncomingCall) -> bytes | RequestFailure:
        method = self._methods.get(call.path)
        if method is None:
            return _unimplemented(f"{call.path!r:.200}: there is no such method")
        data = inflated(call, INLINE_BYTES)
        try:
            message = method.request.FromString(data)
        except DecodeError as error:
            raise ProtocolError(f"{method.request.__name__}: {error}") from None
        return method.answer(message).SerializeToString()

    def _check_token(self, metadata: Mapping[str, str]) -> None:
        assert self._authorization is not None
        if not hmac.compare_digest(metadata.get("authorization", "").encode(), self._authorization):
            raise AuthenticationError("authorization: expected the token of this server, as in 'Bearer TOKEN'")

    def _ServerLive(self, message: Message) -> Message:  # noqa: N802 - the protocol's name
        return messages.ServerLiveResponse(live=True)

    def _ServerReady(self, message: Message) -> Message:  # noqa: N802
        return messages.ServerReadyResponse(ready=self._handler.ready)

    def _ModelReady(self, message: messages.ModelReadyRequest) -> Message:  # noqa: N802
        return messages.ModelReadyResponse(ready=self._handler.model_ready(message.name, message.version))

    def _ServerMetadata(self, message: Message) -> Message:  # noqa: N802
        return messages.ServerMetadataResponse(**self._handler.server_metadata())  # type: ignore[arg-type]

    def _ModelMetadata(self, message: messages.ModelMetadataRequest) -> Message:  # noqa: N802
        found = self._handler.model_metadata(message.name, message.version)
        return messages.ModelMetadataResponse(**found)  # type: ignore[arg-type]

    def _RepositoryIndex(self, message: messages.RepositoryIndexRequest) -> Message:  # noqa: N802
        return messages.RepositoryIndexResponse(models=self._handler.repository_index())


class _Prediction:
    """A request for predictions over gRPC."""

    __slots__ = ("_call", "_handler", "_limit", "deadline", "is_small", "model")

    def __init__(self, handler: Handler, call: IncomingCall) -> None:
        self._handler, self._call = handler, call
        # What is compressed may be any size.
        self.is_small = len(call.message) <= INLINE_BYTES and not call.is_compressed
        self.model = stated_model(call.message) if self.is_small else ""
        self._limit = min(handler.config.deadline_secs, timeout_of(call.metadata))
        self.deadline = call.arrived + self._limit

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._call.is_abandoned

    def answer(self) -> bytes | RequestFailure:
        """Read the request and predict."""
        call, handler = self._call, self._handler
        exchange = PendingAnswer("grpc", call.arrived, self.model)
        try:
            message = read_infer_message(inflated(call, handler.config.max_message_bytes))
            exchange.model = message.model_name
            if isinstance(message, UsualMessage):
                request, raw = message.request, message.raw
            else:
                request, raw = decode_message(message), bool(message.raw_input_contents)
            deadline = deadline_of(call.arrived, self._limit, request.parameters.get("timeout"))
            response = handler.infer(exchange, request, message.model_version, deadline)
            return encode_message(response, raw=raw or request.binary_output).SerializeToString()
        except Exception as error:
            return _refined(error, handler.failure(exchange, error))
        finally:
            handler.observe(exchange)

    def failed(self, error: Exception) -> RequestFailure:
        """Return the answer to a request that was not predicted."""
        exchange = PendingAnswer("grpc", self._call.arrived, self.model)
        failure = self._handler.failure(exchange, error)
        self._handler.observe(exchange)
        return failure

    def respond(self, answer: bytes | RequestFailure) -> None:
        """Send the answer."""
        self._call.respond(answer)


def _refined(error: Exception, failure: RequestFailure) -> RequestFailure:
    """Return the failure with the status that gRPC has for an error of gRPC alone."""
    return _unimplemented(failure.message) if isinstance(error, _UnknownEncodingError) else failure


def _unimplemented(message: str) -> RequestFailure:
    return RequestFailure(501, "UNIMPLEMENTED", "invalid", "ProtocolError", message)
