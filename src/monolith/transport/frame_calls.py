"""From a request frame to an answer frame, for any set of calls: what is wrong becomes an answer too."""

from __future__ import annotations

import logging
import secrets
import sys
import threading
from typing import cast

import numpy as np

from monolith.errors import MonolithError, OverloadedError, ProtocolError, ServerRestartedError, UnavailableError
from monolith.transport.calls import Answer, BasicCall, CallNumber, Handlers
from monolith.transport.frame_memory import FrameMemory
from monolith.transport.frames import Frame, decode, encode, own, request_of
from monolith.transport.remote_errors import described

__all__ = ["FrameCalls"]

_logger = logging.getLogger(__name__)


class FrameCalls:
    """Answers frames by their call. `answer` may run in many threads, and never raises.

    Subclasses add the functions that answer their calls to `_handlers`.
    """

    read_in_place: frozenset[int] = frozenset()
    """Calls whose floats may be read from memory that the client can still write to: they are neither checked nor kept."""

    def __init__(self, *, max_frame_bytes: int) -> None:
        self.instance = secrets.randbits(63) | 1
        """Which life of the server this is: not 0, and new in every process."""
        self.stop_asked = threading.Event()
        """Set when the server is asked to end."""
        self.max_requests = sys.maxsize
        """Requests under way at the same time. Further ones are answered with `OverloadedError`, apart from health checks."""
        self.frames = FrameMemory()
        """Requests and answers in memory. Those that do not fit are answered with `OverloadedError`."""
        self._max_frame_bytes = max_frame_bytes
        self._handlers: Handlers = {BasicCall.SHUTDOWN: self._shutdown}
        self._stopping = False
        self._under_way = 0
        self._idle = threading.Condition()

    def answer(
        self, data: bytes | memoryview | np.ndarray, *, is_shared: bool = False, out: np.ndarray | None = None
    ) -> np.ndarray:
        """The bytes of the answer to the request in `data`.

        Args:
            data: a frame.
            is_shared: the client can write to `data` meanwhile.
            out: where a large answer may be written.
        """
        with self._idle:
            self._under_way += 1
        try:
            return self._answer(data, is_shared, out)
        finally:
            with self._idle:
                self._under_way -= 1
                self._idle.notify_all()

    def answer_health_only(self, data: bytes | memoryview | np.ndarray, *, why: str) -> np.ndarray:
        """The bytes of the answer to a health check. Any other request is answered with `OverloadedError` and `why`."""
        try:
            frame = decode(data, max_bytes=self._max_frame_bytes)
            if frame.call != BasicCall.HEALTH:
                raise OverloadedError(why)
        except MonolithError as error:
            return self._error(request_of(data), error)
        return self.answer(data)

    def refused(self, head: np.ndarray, error: MonolithError) -> np.ndarray:
        """The answer to a request of which only the beginning is at hand: it was too long to be read."""
        return self._error(request_of(head), error)

    def stop(self, *, grace: float) -> bool:
        """Refuse what comes from now on and wait, `grace` seconds at most, until nothing is under way; whether that is so."""
        with self._idle:
            self._stopping = True
            return self._idle.wait_for(lambda: self._under_way == 0, timeout=grace)

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
            if self._under_way > self.max_requests and frame.call != BasicCall.HEALTH:
                raise OverloadedError(
                    f"{self.max_requests} requests are under way, no more are accepted; try again later"
                )
            self._require_mine(frame)
            return self._answered(frame, out)
        except Exception as error:
            if not isinstance(error, MonolithError):
                _logger.exception("call %s failed", frame.call)
            return self._error(frame.request, error)

    def _answered(self, frame: Frame, out: np.ndarray | None) -> np.ndarray:
        """The bytes of the answer to a request that is meant for this server."""
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
            raise ServerRestartedError(
                "the server was started again and has lost what it held; restore its tables, then rejoin()"
            )

    def _error(self, request: int, error: BaseException) -> np.ndarray:
        text = described(error).model_dump_json()
        return encode(call=BasicCall.ERROR, request=request, instance=self.instance, text=text)
