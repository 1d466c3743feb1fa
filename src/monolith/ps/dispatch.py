"""From a request frame to an answer frame: what a parameter server does, without the network around it."""

from __future__ import annotations

import json
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np

from monolith.config import Config
from monolith.errors import MonolithError, ProtocolError, ServerRestartedError, UnavailableError
from monolith.ps import messages
from monolith.ps.dense_parameters import DenseParameters
from monolith.ps.frames import Frame, allocate, decode, encode, request_of
from monolith.ps.messages import Call
from monolith.ps.pushes import PushLedger
from monolith.ps.remote_errors import described
from monolith.ps.served_tables import ServedTables, require_count

__all__ = ["Dispatcher"]

_logger = logging.getLogger(__name__)

Message = TypeVar("Message", bound=Config)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a call returns, before it has the number of the request."""

    text: str = "{}"
    arrays: tuple[np.ndarray, ...] = ()


class Dispatcher:
    """Answers frames. `answer` may run in many threads, and never raises: what is wrong comes back as an error frame.

    Example:
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
        self._calls: dict[int, Callable[[Frame], Answer]] = {
            Call.HEALTH: self._health,
            Call.JOIN: self._join,
            Call.DECLARE_TABLES: self._declare_tables,
            Call.CONFIGS: self._configs,
            Call.APPLY_GRADIENTS: self._apply_gradients,
            Call.ASSIGN: self._assign,
            Call.ASSIGN_ADD: self._assign_add,
            Call.REINITIALIZE: self._reinitialize,
            Call.EVICT: self._evict,
            Call.STATS: self._stats,
            Call.DECLARE_DENSE: self._declare_dense,
            Call.READ_DENSE: self._read_dense,
            Call.APPLY_DENSE: self._apply_dense,
            Call.ASSIGN_DENSE: self._assign_dense,
            Call.IS_INITIALISED: self._is_initialised,
            Call.MARK_INITIALISED: self._mark_initialised,
            Call.MEASURE: self._measure,
            Call.SHUTDOWN: self._shutdown,
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
        return _json(
            tables=len(self._tables.declared()),
            dense=len(self._dense),
            bytes=self._tables.nbytes + self._dense.nbytes,
            initialised=self._initialised,
            seconds=self._clock() - self._started,
        )

    def _join(self, frame: Frame) -> Answer:
        self._pushes.join(_text(messages.Join, frame))
        return Answer()

    def _declare_tables(self, frame: Frame) -> Answer:
        self._tables.declare(_text(messages.DeclareTables, frame).tables)
        return Answer()

    def _configs(self, frame: Frame) -> Answer:
        return Answer(text=messages.DeclareTables(tables=tuple(self._tables.declared())).model_dump_json())

    def _lookup(self, frame: Frame) -> np.ndarray:
        lookup = _text(messages.Lookup, frame)
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

    def _apply_gradients(self, frame: Frame) -> Answer:
        apply = _text(messages.Apply, frame)

        def action() -> Answer:
            self._tables.apply(apply, frame.arrays)
            return Answer()

        return self._pushes.once(apply.push, action)

    def _assign(self, frame: Frame) -> Answer:
        return self._write(frame, add=False)

    def _assign_add(self, frame: Frame) -> Answer:
        return self._write(frame, add=True)

    def _write(self, frame: Frame, *, add: bool) -> Answer:
        write = _text(messages.TableWrite, frame)

        def action() -> Answer:
            require_count(frame.arrays, 2)
            ids, values = frame.arrays
            table = self._tables.writable(write.table, ids)
            (table.assign_add if add else table.assign)(ids, values, event_time=write.event_time)
            return Answer()

        return self._pushes.once(write.push, action)

    def _reinitialize(self, frame: Frame) -> Answer:
        write = _text(messages.TableWrite, frame)

        def action() -> Answer:
            require_count(frame.arrays, 1)
            (ids,) = frame.arrays
            existed = self._tables.writable(write.table, ids).reinitialize(ids, event_time=write.event_time)
            return Answer(arrays=(existed.numpy(),))

        return self._pushes.once(write.push, action)

    def _evict(self, frame: Frame) -> Answer:
        evict = _text(messages.Evict, frame)
        return self._pushes.once(evict.push, lambda: _json(evicted=self._tables.evict(evict.now)))

    def _stats(self, frame: Frame) -> Answer:
        return _json(tables={name: asdict(stats) for name, stats in self._tables.stats().items()})

    def _declare_dense(self, frame: Frame) -> Answer:
        declare = _text(messages.DeclareDense, frame)
        return _json(created=self._dense.declare(declare.names, frame.arrays, declare.optimizer))

    def _read_dense(self, frame: Frame) -> Answer:
        return Answer(arrays=tuple(self._dense.read(_text(messages.ReadDense, frame).names)))

    def _apply_dense(self, frame: Frame) -> Answer:
        apply = _text(messages.ApplyDense, frame)

        def action() -> Answer:
            self._dense.apply(apply.names, frame.arrays, apply.learning_rate)
            return Answer()

        return self._pushes.once(apply.push, action)

    def _assign_dense(self, frame: Frame) -> Answer:
        assign = _text(messages.AssignDense, frame)

        def action() -> Answer:
            self._dense.assign(assign.names, frame.arrays, add=assign.add)
            return Answer()

        return self._pushes.once(assign.push, action)

    def _is_initialised(self, frame: Frame) -> Answer:
        return _json(initialised=self._initialised)

    def _mark_initialised(self, frame: Frame) -> Answer:
        self._initialised = True
        return Answer()

    def _measure(self, frame: Frame) -> Answer:
        from monolith.ps.benchmark import spin

        return _json(throughput=spin(_text(messages.Measure, frame).seconds, clock=self._clock))

    def _shutdown(self, frame: Frame) -> Answer:
        self.stop_asked.set()
        return Answer()


def _json(**fields: object) -> Answer:
    return Answer(text=json.dumps(fields))


def _text(kind: type[Message], frame: Frame) -> Message:
    return kind.from_json(frame.text)
