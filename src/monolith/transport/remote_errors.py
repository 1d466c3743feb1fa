"""Errors between server and client: a class of `monolith.errors` by its name, and a message. Never an object."""

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

__all__ = ["RemoteError", "described", "raised"]

_CLASSES: dict[str, type[MonolithError]] = {name: getattr(errors, name) for name in errors.__all__}

_TOLD = (
    ServerError,
    InvalidArgumentError,
    ConfigError,
    CheckpointMismatchError,
    LogGapError,
    CorruptFileError,
    SchemaError,
    StorageError,
)
"""Errors that keep their class: those of servers, of what was asked for, and of the files that were read for it."""


_TRACEBACK = "Traceback (most recent call last)"
_LONGEST_REASON = 500


class RemoteError(Config):
    """The text of an answer that is an error."""

    error: str
    """The name of a class of `monolith.errors`."""
    message: str


def described(error: BaseException) -> RemoteError:
    """What is sent to a client about `error`: what it did wrong, or that the server is at fault. Never a traceback.

    Example:
        >>> described(ZeroDivisionError("division by zero")).message
        'the server failed: ZeroDivisionError: division by zero; its log has more'
    """
    if isinstance(error, MonolithError):
        return RemoteError(error=type(error).__name__, message=str(error).partition(_TRACEBACK)[0])
    if isinstance(error, MemoryError):
        return RemoteError(error="MemoryLimitError", message="the server has no memory left for this call")
    reason = str(error).partition("\n")[0][:_LONGEST_REASON]
    message = f"the server failed: {type(error).__name__}: {reason}; its log has more"
    return RemoteError(error="ServerError", message=message)


def raised(text: str, address: str) -> MonolithError:
    """The error that an answer of the server at `address` describes; a class that is not known becomes `ServerError`.

    Example:
        >>> raised('{"error": "InvalidArgumentError", "message": "ids: expected int64"}', "10.0.0.1:7000")
        InvalidArgumentError('ids: expected int64 (the server at 10.0.0.1:7000)')
    """
    try:
        answer = RemoteError.from_json(text)
    except ConfigError as error:
        return ProtocolError(f"the server at {address} sent an error that cannot be read: {error}")
    known = _CLASSES.get(answer.error, ServerError)
    # Read-only texts of ours that belong to no call, such as the base of all errors, say nothing about whose fault it is.
    kind = known if issubclass(known, _TOLD) else ServerError
    return kind(f"{answer.message} (the server at {address})")
