"""`RequestLog`: writes what a server has predicted, with its features, to a stream: impressions to join actions with.

A thread of its own encodes and writes. Answers never wait for it: when it cannot keep up, requests are left out and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import orjson
from pydantic import Field
from torch import Tensor

from monolith.config import Config
from monolith.console import RareWarnings
from monolith.errors import MonolithError
from monolith.features import Ragged
from monolith.features.batch import IdMatrix
from monolith.optional_packages import import_extra
from monolith.serve.rollout.plan import split_point
from monolith.serve.server.routing import Answered

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from monolith.streams import Stream, StreamWriter

__all__ = ["OWN_FIELDS", "RequestLog", "RequestLogConfig", "encode_rows"]

_log = logging.getLogger(__name__)
OWN_FIELDS = ("request_id", "row", "model", "version", "step", "sequence", "time_ms")
"""Fields of a record that are not columns. Predictions are `prediction.HEAD`."""
_REQUEST_BYTES = 2048
"""What a request takes that waits, besides its columns."""
_FLUSH_SECS = 1.0
_LINGER_SECS = 0.05
"""How long the thread lets requests gather. If each woke it, it would take the interpreter from the threads that answer."""
_MAX_BACK_OFF_SECS = 30.0


class RequestLogConfig(Config):
    """What is written of the requests of a server.

    Example:
        >>> RequestLogConfig(share=0.1, without=("user_id",)).max_pending_bytes
        67108864
    """

    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of requests. Chosen by a hash of the id, so that every server chooses the same."""
    without: tuple[str, ...] = ()
    """Columns that are not written, such as those that identify a person."""
    max_pending_bytes: Annotated[int, Field(ge=1 << 16)] = 1 << 26
    """Of requests that wait to be written. Further ones are left out and counted."""
    close_secs: Annotated[float, Field(ge=0)] = 10.0
    """How long `close` waits for the stream."""


@dataclass(frozen=True, slots=True)
class _Pending:
    answered: Answered
    time_ms: int
    size: int


class RequestLog:
    """Writes the rows of every request that was predicted, or of a share of them. An `Observer` of a server.

    Requests without an id cannot be joined with anything, so `Handler.assigns_ids` gives each of them one.

    Args:
        stream: Where records go, with the id of their request as key. One log at a time may write to a stream in a folder.
        config: What is written.
        now: Seconds since 1970.

    Raises:
        StorageError: the stream cannot be written to.

    Example:
        >>> import tempfile
        >>> from monolith.streams import open_stream
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = RequestLog(open_stream(f"{folder}/served", partitions=1))
        ...     log.close()
        >>> log.counts()
        {'written': 0, 'dropped': 0, 'failed': 0}
    """

    def __init__(
        self, stream: Stream, config: RequestLogConfig | None = None, *, now: Callable[[], float] = time.time
    ) -> None:
        self._stream, self._config, self._now = stream, config or RequestLogConfig(), now
        self._without = frozenset(self._config.without)
        self._lock = threading.Lock()
        self._pending: deque[_Pending] = deque()
        self._pending_bytes = 0
        self._counts: Counter[str] = Counter()
        self._unflushed = 0
        self._writer: StreamWriter | None = stream.writer()
        self._warnings = RareWarnings(_log, seconds=60)
        self._changed, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="monolith-request-log", daemon=True)
        self._thread.start()

    def answered(self, answered: Answered) -> None:
        """Take a request that was predicted. Never waits."""
        if answered.status != "ok" or answered.shadow or not answered.rows or not answered.outputs:
            return
        share = self._config.share
        if share < 1 and split_point(f"log of {answered.model}", 0, answered.request_id) >= share:
            return
        size = _REQUEST_BYTES + _bytes_of(answered.columns)
        pending = _Pending(answered, round(self._now() * 1000), size)
        with self._lock:
            if self._pending_bytes + size > self._config.max_pending_bytes or self._stop.is_set():
                self._counts["dropped"] += _rows(answered)
                is_dropped = True
            else:
                self._pending_bytes += size
                self._pending.append(pending)
                is_dropped = False
        if is_dropped:
            self._warnings.warn(
                "%s does not take what is served quickly enough; requests are left out", self._stream.url
            )
        elif not self._changed.is_set():
            self._changed.set()

    def counts(self) -> dict[str, int]:
        """Return the rows that were written durably, dropped because others waited, and lost because writing failed."""
        with self._lock:
            return {name: self._counts[name] for name in ("written", "dropped", "failed")}

    def close(self) -> None:
        """Write what waits, for at most `close_secs`. Calling it twice is harmless."""
        self._stop.set()
        self._changed.set()
        self._thread.join(self._config.close_secs)
        if self._thread.is_alive():
            _log.error("%s did not take the last requests in time; they may be lost", self._stream.url)

    def collect(self) -> Iterator[Metric]:
        """Yield metrics, for `ServingMetrics.collectors`."""
        core = import_extra("prometheus_client.metrics_core", extra="serve", purpose="/metrics")
        rows = core.CounterMetricFamily(
            "monolith_request_log_rows", "Rows of served requests by what became of them", labels=("state",)
        )
        for state, number in self.counts().items():
            rows.add_metric((state,), number)
        yield rows
        pending = core.GaugeMetricFamily("monolith_request_log_pending_bytes", "Requests that wait to be written")
        pending.add_metric((), self._pending_bytes)
        yield pending

    # The thread

    def _run(self) -> None:
        back_off, flushed = 0.1, time.monotonic()
        while True:
            self._changed.wait(_FLUSH_SECS)
            self._stop.wait(_LINGER_SECS)
            self._changed.clear()
            stopping = self._stop.is_set()
            try:
                while self._pending:
                    self._write_next()
                    if time.monotonic() - flushed >= _FLUSH_SECS:
                        self._flush()
                        flushed = time.monotonic()
                if stopping or time.monotonic() - flushed >= _FLUSH_SECS:
                    self._flush()
                    flushed = time.monotonic()
                back_off = 0.1
            except Exception as error:
                self._fail(error)
                if not stopping:
                    self._stop.wait(back_off)
                    back_off = min(2 * back_off, _MAX_BACK_OFF_SECS)
            if stopping:
                break
        self._close_writer()
        self._count("failed", sum(_rows(left.answered) for left in self._pending))
        self._pending.clear()

    def _write_next(self) -> None:
        with self._lock:
            pending = self._pending.popleft()
            self._pending_bytes -= pending.size
        answered = pending.answered
        try:
            rows = encode_rows(answered, pending.time_ms, self._without)
        except Exception:
            _log.exception("a request of model %r cannot be written as JSON", answered.model)
            self._count("failed", _rows(answered))
            return
        self._unflushed += len(rows)
        if self._writer is None:
            self._writer = self._stream.writer()
        key = answered.request_id.encode()
        for row in rows:
            self._writer.append(row, key=key, timestamp=pending.time_ms)

    def _flush(self) -> None:
        if self._unflushed and self._writer is not None:
            self._writer.flush(self._config.close_secs or None)
            self._count("written", self._unflushed)
            self._unflushed = 0

    def _fail(self, error: Exception) -> None:
        """Count what is lost, and begin again with another writer."""
        self._warnings.warn("%s: what was served could not be written: %s", self._stream.url, error)
        if not isinstance(error, MonolithError):
            _log.error("the log of requests failed", exc_info=error)
        self._count("failed", self._unflushed)
        self._unflushed = 0
        self._close_writer()

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        except MonolithError as error:
            self._warnings.warn("%s: a writer could not be closed: %s", self._stream.url, error)

    def _count(self, name: str, number: int) -> None:
        with self._lock:
            self._counts[name] += number


def encode_rows(answered: Answered, time_ms: int, without: frozenset[str] = frozenset()) -> list[bytes]:
    """Return one JSON object for each row that was answered. A column with the name of an own field is left out.

    Example:
        >>> import torch
        >>> answered = Answered(
        ...     model="clicks", version=3, protocol="grpc", rows=1, seconds=0.002, status="ok", request_id="r-1",
        ...     columns={"user": torch.tensor([7])}, outputs={"ctr": torch.tensor([0.25])},
        ... )
        >>> encode_rows(answered, 1_700_000_000_000)[0]
        b'{"request_id":"r-1","row":0,"model":"clicks","version":3,"time_ms":1700000000000,"user":7,"prediction.ctr":0.25}'
    """
    own: dict[str, Any] = {"request_id": answered.request_id, "row": 0}
    own |= {"model": answered.model, "version": answered.version}
    for name in ("step", "sequence"):
        if f"monolith_{name}" in answered.parameters:
            own[name] = answered.parameters[f"monolith_{name}"]
    own["time_ms"] = time_ms
    values = {
        name: column
        for name, column in _lists_of(answered.columns)
        if name not in without and name not in OWN_FIELDS and not name.startswith("prediction.")
    }
    values |= {f"prediction.{head}": output.tolist() for head, output in answered.outputs.items()}
    names = (*own, *values)
    columns = list(values.values())
    numbers = range(answered.rows) if answered.shown is None else answered.shown
    fixed = list(own.values())
    return [
        orjson.dumps(dict(zip(names, (fixed[0], row, *fixed[2:], *(column[row] for column in columns)), strict=True)))
        for row in numbers
    ]


def _lists_of(columns: Mapping[str, object]) -> Iterable[tuple[str, list[Any]]]:
    if isinstance(columns, IdMatrix):
        return zip(columns.names, columns.ids.tolist(), strict=True)
    return ((name, _lists(column)) for name, column in columns.items())


def _lists(column: object) -> list[Any]:
    if isinstance(column, Ragged):
        return column.to_lists()
    assert isinstance(column, Tensor)
    found: list[Any] = column.tolist()
    return found


def _rows(answered: Answered) -> int:
    return answered.rows if answered.shown is None else len(answered.shown)


def _bytes_of(columns: Mapping[str, object]) -> int:
    return columns.ids.nbytes if isinstance(columns, IdMatrix) else sum(map(_bytes, columns.values()))


def _bytes(column: object) -> int:
    if isinstance(column, Ragged):
        return column.values.nbytes + column.offsets.nbytes
    return column.nbytes if isinstance(column, Tensor) else 0
