"""From a request frame to an answer frame: what a parameter server does, without the network around it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from monolith.errors import ProtocolError
from monolith.ps import messages
from monolith.ps.answers import Answer, json_answer, message_of
from monolith.ps.dense_calls import DenseCalls
from monolith.ps.dense_parameters import DenseParameters
from monolith.ps.frame_calls import FrameCalls
from monolith.ps.frames import Frame, allocate
from monolith.ps.messages import Call
from monolith.ps.pushes import PushLedger
from monolith.ps.served_tables import ServedTables
from monolith.ps.table_calls import TableCalls

__all__ = ["Dispatcher"]


class Dispatcher(FrameCalls):
    """Answers frames. `answer` may run in many threads, and never raises: what is wrong comes back as an error frame.

    Example:
        >>> import json
        >>> from monolith.ps.frames import decode, encode
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
        super().__init__(max_frame_bytes=max_frame_bytes)
        self._clock = clock
        self._started = clock()
        self._tables = ServedTables(memory_limit=memory_limit)
        self._dense = DenseParameters(require_room=self._tables.require_room)
        self._pushes: PushLedger[Answer] = PushLedger()
        self._initialised = False
        self._calls = {
            Call.HEALTH: self._health,
            Call.JOIN: self._join,
            Call.IS_INITIALISED: self._is_initialised,
            Call.MARK_INITIALISED: self._mark_initialised,
            Call.MEASURE: self._measure,
            Call.SHUTDOWN: self._shutdown,
            **TableCalls(self._tables, self._pushes).calls(),
            **DenseCalls(self._dense, self._pushes).calls(),
        }

    def _answered(self, frame: Frame) -> np.ndarray:
        # Rows are written into the answer itself.
        return self._lookup(frame) if frame.call == Call.LOOKUP else super()._answered(frame)

    def _known(self) -> list[int]:
        return sorted([*super()._known(), Call.LOOKUP])

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
