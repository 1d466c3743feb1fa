"""What a client learns about an error, in the words of HTTP and gRPC."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from monolith.errors import (
    AuthenticationError,
    DeadlineExceededError,
    InvalidArgumentError,
    MessageTooLargeError,
    ModelNotFoundError,
    MonolithError,
    OverloadedError,
    ProtocolError,
    UnavailableError,
)
from monolith.serve.server.routing import AnswerStatus
from monolith.transport.errors import encode_error

__all__ = ["RequestFailure", "failure_of"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """How a request failed."""

    http: int
    """The status of HTTP."""
    grpc: str
    """The name of the status of gRPC."""
    status: AnswerStatus
    error: str
    """The name of a class of `monolith.errors`."""
    message: str


_KNOWN: tuple[tuple[type[MonolithError], int, str, AnswerStatus], ...] = (
    (MessageTooLargeError, 413, "RESOURCE_EXHAUSTED", "invalid"),
    (ModelNotFoundError, 404, "NOT_FOUND", "invalid"),
    (InvalidArgumentError, 400, "INVALID_ARGUMENT", "invalid"),
    (ProtocolError, 400, "INVALID_ARGUMENT", "invalid"),
    (AuthenticationError, 401, "UNAUTHENTICATED", "invalid"),
    (OverloadedError, 503, "RESOURCE_EXHAUSTED", "overloaded"),
    (UnavailableError, 503, "UNAVAILABLE", "overloaded"),
    (DeadlineExceededError, 504, "DEADLINE_EXCEEDED", "deadline"),
)


def failure_of(error: Exception) -> RequestFailure:
    """Return how `error` is told to a client. What is not its fault is logged with a traceback, which it does not get.

    Example:
        >>> failure = failure_of(ModelNotFoundError("model 'x': there is no such model"))
        >>> failure.http, failure.grpc, failure.status
        (404, 'NOT_FOUND', 'invalid')
    """
    told = encode_error(error)
    for kind, http, grpc, status in _KNOWN:
        if isinstance(error, kind):
            return RequestFailure(http, grpc, status, told.error, told.message)
    _log.error("a request failed", exc_info=error)
    return RequestFailure(500, "INTERNAL", "error", told.error, told.message)
