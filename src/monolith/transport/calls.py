"""`FrameCalls`: answers request frames by the number of their call."""

from __future__ import annotations

import json
import logging
import math
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Annotated, TypeVar, cast

import numpy as np
from pydantic import AfterValidator, Field

from monolith.config import Config
from monolith.errors import MonolithError, OverloadedError, ProtocolError, ServerRestartedError, UnavailableError
from monolith.transport.errors import encode_error
from monolith.transport.frames import Frame, decode, encode, own, request_of

__all__ = [
    "Answer",
    "BasicCall",
    "CallNumber",
    "FrameCalls",
    "FrameMemory",
    "Handlers",
    "WireInt",
    "WireName",
    "json_answer",
    "message_of",
]

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


WireName = Annotated[str, Field(min_length=1, max_length=255), AfterValidator(_no_path)]
"""A name in a message. It can be used as a relative path."""
WireInt = Annotated[int, Field(ge=0, lt=2**63)]
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


SMALL = 4096
"""Bytes of the largest frame that is always accepted, such as a health check."""


class FrameMemory:
    """Counts the bytes of frames that are being received, processed or sent.

    A frame is accepted if it fits in addition to the others, and always if it is small or the only one, so that a refused
    frame is accepted later.

    Args:
        always: bytes that frames may always take.
        most: returns the bytes that they may take now. Called only beyond `always`.

    Example:
        >>> memory = FrameMemory(always=100_000)
        >>> memory.take(80_000), memory.take(30_000), memory.take(100), memory.in_use
        (True, False, True, 80100)
        >>> memory.give_back(80_100)
        >>> memory.take(1_000_000)
        True
    """

    def __init__(self, always: float = math.inf, most: Callable[[], float] | None = None) -> None:
        self._always, self._most = always, most
        self._in_use = 0
        self._lock = threading.Lock()

    @property
    def in_use(self) -> int:
        """Bytes of all frames that were taken and not given back."""
        return self._in_use

    def fits(self, size: int) -> bool:
        """Whether a frame of `size` bytes fits in addition to those in memory."""
        together = self._in_use + size
        if size <= SMALL or not self._in_use or together <= self._always:
            return True
        return self._most is not None and together <= self._most()

    def take(self, size: int) -> bool:
        """Count a frame of `size` bytes until `give_back`. Returns False, and counts nothing, if it does not fit."""
        with self._lock:
            fits = self.fits(size)
            self._in_use += size * fits
            return fits

    @contextmanager
    def lent(self) -> Iterator[Callable[[int], bool]]:
        """Yield `take` for a block. What was taken is given back at the end of the block."""
        taken = 0

        def take(size: int) -> bool:
            nonlocal taken
            fits = self.take(size)
            taken += size * fits
            return fits

        try:
            yield take
        finally:
            self.give_back(taken)

    def give_back(self, size: int) -> None:
        """Stop counting a frame of `size` bytes."""
        with self._lock:
            self._in_use -= size


_logger = logging.getLogger(__name__)


class FrameCalls:
    """Answers frames by their call. `answer` may run in many threads, and never raises.

    Subclasses add the functions that answer their calls to `_handlers`.
    """

    read_in_place: frozenset[int] = frozenset()
    """Calls whose floats may be read from memory that the client can still write to: they are neither checked nor kept."""

    def __init__(self, *, max_frame_bytes: int) -> None:
        self.instance = secrets.randbits(63) | 1
        """The incarnation of the server: a number above 0 that is drawn by every process."""
        self.stop_asked = threading.Event()
        """Set when the server is asked to stop."""
        self.max_requests = sys.maxsize
        """Concurrent requests. Further ones are answered with `OverloadedError`, apart from health checks."""
        self.frames = FrameMemory()
        """Requests and answers in memory. Those that do not fit are answered with `OverloadedError`."""
        self._max_frame_bytes = max_frame_bytes
        self._handlers: Handlers = {BasicCall.SHUTDOWN: self._shutdown}
        self._stopping = False
        self._running = 0
        self._idle = threading.Condition()

    def answer(
        self, data: bytes | memoryview | np.ndarray, *, is_shared: bool = False, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the bytes of the answer to the request in `data`.

        Args:
            data: a frame.
            is_shared: the client can still write to `data`.
            out: where a large answer may be written.
        """
        with self._idle:
            self._running += 1
        try:
            return self._answer(data, is_shared, out)
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()

    def answer_health_only(self, data: bytes | memoryview | np.ndarray, *, why: str) -> np.ndarray:
        """Return the bytes of the answer to a health check. Any other request is answered with `OverloadedError` and `why`."""
        try:
            frame = decode(data, max_bytes=self._max_frame_bytes)
            if frame.call != BasicCall.HEALTH:
                raise OverloadedError(why)
        except MonolithError as error:
            return self._error(request_of(data), error)
        return self.answer(data)

    def refused(self, head: np.ndarray, error: MonolithError) -> np.ndarray:
        """Return the answer to a request that was too long to be read, given its first bytes."""
        return self._error(request_of(head), error)

    def stop(self, *, grace: float) -> bool:
        """Refuse new requests and wait at most `grace` seconds for running ones. Returns whether all have ended."""
        with self._idle:
            self._stopping = True
            return self._idle.wait_for(lambda: self._running == 0, timeout=grace)

    def _answer(self, data: bytes | memoryview | np.ndarray, is_shared: bool, out: np.ndarray | None) -> np.ndarray:
        try:
            frame = decode(data, max_bytes=self._max_frame_bytes)
            if is_shared:
                frame = own(frame, but_floats=frame.call in self.read_in_place)
        except MonolithError as error:
            return self._error(request_of(data), error)
        try:
            if self._stopping:
                raise UnavailableError("the server is stopping")
            if self._running > self.max_requests and frame.call != BasicCall.HEALTH:
                raise OverloadedError(
                    f"{self.max_requests} requests are running, no more are accepted; try again later"
                )
            self._require_mine(frame)
            return self._answered(frame, out)
        except Exception as error:
            if not isinstance(error, MonolithError):
                _logger.exception("call %s failed", frame.call)
            return self._error(frame.request, error)

    def _answered(self, frame: Frame, out: np.ndarray | None) -> np.ndarray:
        """Return the bytes of the answer to a request for this incarnation of the server."""
        answer = self._called(frame)
        return encode(
            call=frame.call,
            request=frame.request,
            instance=self.instance,
            text=answer.text,
            arrays=answer.arrays,
            out=out,
        )

    def _called(self, frame: Frame) -> Answer:
        handler = self._handlers.get(cast(CallNumber, frame.call))  # an IntEnum equals its number
        if handler is None:
            known = ", ".join(f"{call:d} {call.name.lower()}" for call in self._known())
            raise ProtocolError(f"call: {frame.call} is not known; known are {known}")
        return handler(frame)

    def _known(self) -> list[CallNumber]:
        return sorted(self._handlers)

    def _shutdown(self, frame: Frame) -> Answer:
        self.stop_asked.set()
        return Answer()

    def _require_mine(self, frame: Frame) -> None:
        if frame.instance not in (0, self.instance):
            raise ServerRestartedError("the server was started again and has lost its state; restore it, then rejoin()")

    def _error(self, request: int, error: BaseException) -> np.ndarray:
        text = encode_error(error).model_dump_json()
        return encode(call=BasicCall.ERROR, request=request, instance=self.instance, text=text)
