"""From a request frame to an answer frame: what a parameter server does, without the network around it."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable

import numpy as np

from monolith.errors import MonolithError, ProtocolError, ServerRestartedError, UnavailableError
from monolith.ps import messages
from monolith.ps.answers import Answer, Calls, json_answer, message_of
from monolith.ps.dense_calls import DenseCalls
from monolith.ps.dense_parameters import DenseParameters
from monolith.ps.frames import Frame, allocate, decode, encode, request_of
from monolith.ps.messages import Call
from monolith.ps.pushes import PushLedger
from monolith.ps.remote_errors import described
from monolith.ps.served_tables import ServedTables
from monolith.ps.table_calls import TableCalls

__all__ = ["Dispatcher"]

_logger = logging.getLogger(__name__)


class Dispatcher:
    """Answers frames. `answer` may run in many threads, and never raises: what is wrong comes back as an error frame.

    Example:
        >>> import json
        >>> dispatcher = Dispatcher()
        >>> answer = decode(dispatcher.answer(encode(call=Call.HEALTH, request=1, text="{}")))
        >>> json.loads(answer.text)["tables"]
        0
    """

    def __init__(
        self,
        *,
        memory_limit: int | None = None,
        max_frame_bytes: int = 2**28,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.instance = secrets.randbits(63) | 1
        """Which life of the server this is: not 0, and new in every process."""
        self.stop_asked = threading.Event()
        """Set by the call `SHUTDOWN`."""
        self._max_frame_bytes = max_frame_bytes
        self._clock = clock
        self._started = clock()
        self._tables = ServedTables(memory_limit=memory_limit)
        self._dense = DenseParameters(require_room=self._tables.require_room)
        self._pushes: PushLedger[Answer] = PushLedger()
        self._initialised = False
        self._stopping = False
        self._under_way = 0
        self._idle = threading.Condition()
        self._calls: Calls = {
            Call.HEALTH: self._health,
            Call.JOIN: self._join,
            Call.IS_INITIALISED: self._is_initialised,
            Call.MARK_INITIALISED: self._mark_initialised,
            Call.MEASURE: self._measure,
            Call.SHUTDOWN: self._shutdown,
            **TableCalls(self._tables, self._pushes).calls(),
            **DenseCalls(self._dense, self._pushes).calls(),
        }

    def answer(self, data: bytes | memoryview | np.ndarray) -> np.ndarray:
        """The bytes of the answer to the request in `data`."""
        with self._idle:
            self._under_way += 1
        try:
            return self._answer(data)
        finally:
            with self._idle:
                self._under_way -= 1
                self._idle.notify_all()

    def stop(self, *, grace: float) -> bool:
        """Refuse what comes from now on and wait, `grace` seconds at most, until nothing is under way; whether that is so."""
        with self._idle:
            self._stopping = True
            return self._idle.wait_for(lambda: self._under_way == 0, timeout=grace)

    def _answer(self, data: bytes | memoryview | np.ndarray) -> np.ndarray:
        try:
            frame = decode(data, max_bytes=self._max_frame_bytes)
        except MonolithError as error:
            return self._error(request_of(data), error)
        try:
            self._require_mine(frame)
            if frame.call == Call.LOOKUP:
                return self._lookup(frame)
            answer = self._called(frame)
        except Exception as error:
            if not isinstance(error, MonolithError):
                _logger.exception("call %s failed", frame.call)
            return self._error(frame.request, error)
        return encode(
            call=frame.call, request=frame.request, instance=self.instance, text=answer.text, arrays=answer.arrays
        )

    def _called(self, frame: Frame) -> Answer:
        if frame.call not in self._calls:
            known = ", ".join(f"{call} {Call(call).name.lower()}" for call in sorted([*self._calls, Call.LOOKUP]))
            raise ProtocolError(f"call: {frame.call} is not known; known are {known}")
        return self._calls[frame.call](frame)

    def _require_mine(self, frame: Frame) -> None:
        if self._stopping:
            raise UnavailableError("the server is stopping")
        if frame.instance not in (0, self.instance):
            raise ServerRestartedError(
                "the server was started again and has lost what it held; restore its tables, then rejoin()"
            )

    def _error(self, request: int, error: BaseException) -> np.ndarray:
        text = described(error).model_dump_json()
        return encode(call=Call.ERROR, request=request, instance=self.instance, text=text)

    def _health(self, frame: Frame) -> Answer:
        return json_answer(
            tables=len(self._tables.declared()),
            dense=len(self._dense),
            bytes=self._tables.nbytes + self._dense.nbytes,
            initialised=self._initialised,
            seconds=self._clock() - self._started,
        )

    def _join(self, frame: Frame) -> Answer:
        self._pushes.join(message_of(messages.Join, frame))
        return Answer()

    def _lookup(self, frame: Frame) -> np.ndarray:
        lookup = message_of(messages.Lookup, frame)
        shapes = self._tables.lookup_shapes(lookup, frame.arrays)
        size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in shapes)
        if size > self._max_frame_bytes:
            raise ProtocolError(
                f"lookup: the answer would have {size:,} bytes, the limit is {self._max_frame_bytes:,}; ask for fewer ids"
            )
        buffer, views = allocate(
            call=Call.LOOKUP, request=frame.request, instance=self.instance, text="{}", shapes=shapes
        )
        self._tables.lookup(lookup, frame.arrays, views)
        return buffer

    def _is_initialised(self, frame: Frame) -> Answer:
        return json_answer(initialised=self._initialised)

    def _mark_initialised(self, frame: Frame) -> Answer:
        self._initialised = True
        return Answer()

    def _measure(self, frame: Frame) -> Answer:
        from monolith.ps.benchmark import spin

        return json_answer(throughput=spin(message_of(messages.Measure, frame).seconds, clock=self._clock))

    def _shutdown(self, frame: Frame) -> Answer:
        self.stop_asked.set()
        return Answer()
