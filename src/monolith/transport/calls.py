"""Calls and their answers: what any kind of server needs to say, whatever its calls mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Annotated, TypeVar

import numpy as np
from pydantic import AfterValidator, Field

from monolith.config import Config
from monolith.transport.frames import Frame

__all__ = ["Answer", "BasicCall", "CallNumber", "Handlers", "Name", "Whole", "json_answer", "message_of"]

Message = TypeVar("Message", bound=Config)


class CallNumber(IntEnum):
    """The calls of one kind of server, by number. Subclasses list them. A number never changes its meaning.

    No two subclasses share a number, so a frame that reaches the wrong kind of server is refused.
    """

    @property
    def changes_state(self) -> bool:
        """Whether the call changes what the server holds, so that an attempt that failed may have changed it."""
        return False


class BasicCall(CallNumber):
    """The calls of every server."""

    ERROR = 0
    """Only in answers: `{"error": class, "message": text}`."""
    HEALTH = 1
    SHUTDOWN = 51


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a handler returns, before it has the number of the request."""

    text: str = "{}"
    arrays: tuple[np.ndarray, ...] = ()


Handlers = dict[CallNumber, Callable[[Frame], Answer]]
"""The function that answers each call."""


@lru_cache(maxsize=4096)
def _no_path(name: str) -> str:
    """Names end up in files one day: none may lead out of a folder."""
    if not name.isprintable() or "\\" in name or not all(part.strip(".") for part in name.split("/")):
        raise ValueError(
            "its name must be printable, without backslashes and without '.', '..' or nothing between slashes"
        )
    return name


Name = Annotated[str, Field(min_length=1, max_length=255), AfterValidator(_no_path)]
"""A name in a message. It can be used as a relative path."""
Whole = Annotated[int, Field(ge=0, lt=2**63)]
"""A whole number in a message."""


def json_answer(**fields: object) -> Answer:
    """Return an answer without arrays.

    Example:
        >>> json_answer(created=True).text
        '{"created": true}'
    """
    return Answer(text=json.dumps(fields))


def message_of(kind: type[Message], frame: Frame) -> Message:
    """Return the text of a request as a message. Raises `ConfigError`, which names the field that is wrong."""
    return kind.from_json(frame.text)
