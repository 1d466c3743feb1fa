"""Errors that servers send to clients: the name of a class of `monolith.errors` and a message, never a pickled object."""

from __future__ import annotations

from monolith import errors
from monolith.config import Config
from monolith.errors import (
    CheckpointMismatchError,
    ConfigError,
    CorruptFileError,
    InvalidArgumentError,
    LogGapError,
    MonolithError,
    ProtocolError,
    SchemaError,
    ServerError,
    StorageError,
)

__all__ = ["RemoteError", "decode_error", "encode_error"]

_CLASSES: dict[str, type[MonolithError]] = {name: getattr(errors, name) for name in errors.__all__}

_SENT = (
    ServerError,
    InvalidArgumentError,
    ConfigError,
    CheckpointMismatchError,
    LogGapError,
    CorruptFileError,
    SchemaError,
    StorageError,
)
"""Errors that keep their class: those of servers, of requests, and of the files that a request reads."""


_TRACEBACK = "Traceback (most recent call last)"
_LONGEST_REASON = 500


class RemoteError(Config):
    """The text of an answer that is an error."""

    error: str
    """The name of a class of `monolith.errors`."""
    message: str


def encode_error(error: BaseException) -> RemoteError:
    """Return what a client learns about `error`: its own mistake, or that the server failed. Never a traceback.

    Example:
        >>> encode_error(ZeroDivisionError("division by zero")).message
        'the server failed: ZeroDivisionError: division by zero; its log has more'
    """
    if isinstance(error, MonolithError):
        return RemoteError(error=type(error).__name__, message=str(error).partition(_TRACEBACK)[0])
    if isinstance(error, MemoryError):
        return RemoteError(error="MemoryLimitError", message="the server has no memory left for this call")
    reason = str(error).partition("\n")[0][:_LONGEST_REASON]
    message = f"the server failed: {type(error).__name__}: {reason}; its log has more"
    return RemoteError(error="ServerError", message=message)


def decode_error(text: str, address: str) -> MonolithError:
    """Return the error that an answer of the server at `address` describes. An unknown class becomes `ServerError`.

    Example:
        >>> decode_error('{"error": "InvalidArgumentError", "message": "ids: expected int64"}', "10.0.0.1:7000")
        InvalidArgumentError('ids: expected int64 (the server at 10.0.0.1:7000)')
    """
    try:
        answer = RemoteError.from_json(text)
    except ConfigError as error:
        return ProtocolError(f"the server at {address} sent an error that cannot be read: {error}")
    known = _CLASSES.get(answer.error, ServerError)
    # Other classes, such as the base of all errors, do not say whether the client or the server is at fault.
    kind = known if issubclass(known, _SENT) else ServerError
    return kind(f"{answer.message} (the server at {address})")
