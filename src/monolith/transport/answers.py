"""Answers of a parameter server, before they have the number of the request."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from monolith.config import Config
from monolith.transport.frames import Frame

__all__ = ["Answer", "Calls", "json_answer", "message_of"]

Message = TypeVar("Message", bound=Config)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a call returns."""

    text: str = "{}"
    arrays: tuple[np.ndarray, ...] = ()


Calls = dict[int, Callable[[Frame], Answer]]
"""What is called for the number of a `Call`."""


def json_answer(**fields: object) -> Answer:
    """An answer without arrays.

    Example:
        >>> json_answer(created=True).text
        '{"created": true}'
    """
    return Answer(text=json.dumps(fields))


def message_of(kind: type[Message], frame: Frame) -> Message:
    """The text of a request as what it must be; `ConfigError` names the field that is wrong."""
    return kind.from_json(frame.text)
