"""`LabelStream`: labels of served predictions from a stream, such as the examples that a joiner writes."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from monolith.console import RareWarnings
from monolith.durable import write_durably
from monolith.errors import (
    ConfigError,
    CorruptFileError,
    InvalidArgumentError,
    MonolithError,
    StorageError,
    StreamGapError,
)
from monolith.optional_packages import import_extra
from monolith.serve.rollout.labels import ServedLabel
from monolith.streams import END, START

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from monolith.streams import Stream

__all__ = ["LabelStream", "labels_of_record"]

_log = logging.getLogger(__name__)
_MAX_RECORDS = 5000
_POLL_SECS = 0.5
_SAVE_SECS = 1.0
_PARTITION_SECS = 10.0
_MAX_BACK_OFF_SECS = 30.0
_FIELDS = ("request_id", "row", "model", "head")


def labels_of_record(value: bytes, columns: Mapping[str, str | None]) -> list[ServedLabel]:
    """Return the labels in a record: a JSON object with `request_id`, `row` and `model` where needed, and columns of labels.

    Args:
        value: The record. Other fields are ignored, so it may be an example that a joiner wrote.
        columns: The head that each column is a label of. None: the record says it as `head`, or the model has one.

    Raises:
        InvalidArgumentError: it is not such an object, or it comes from a sample of negatives, which would falsify every number.

    Example:
        >>> record = b'{"request_id": "r-1", "row": 2, "user": 7, "clicked": 1.0}'
        >>> [(label.row, label.label, label.head) for label in labels_of_record(record, {"clicked": "ctr"})]
        [(2, 1.0, 'ctr')]
    """
    try:
        tree = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise InvalidArgumentError(f"JSON: {error}") from None
    if not isinstance(tree, dict):
        raise InvalidArgumentError(f"expected a JSON object, got {type(tree).__name__}")
    rate = tree.get("sample_rate", 1)
    if rate != 1:
        raise InvalidArgumentError(f"sample_rate: expected 1, of a stream with all negatives, got {rate!r:.40}")
    named: dict[str, Any] = {name: tree[name] for name in _FIELDS if tree.get(name) is not None}
    found = []
    for column, head in columns.items():
        if column not in tree:
            continue
        label = tree[column]
        given = {**named, "label": tuple(label) if isinstance(label, list) else label}
        if head is not None:
            given["head"] = head
        try:
            found.append(ServedLabel(**given))
        except ConfigError as error:
            raise InvalidArgumentError(str(error)) from None
    if not found:
        raise InvalidArgumentError(f"expected one of the columns {', '.join(map(repr, columns))}")
    return found


class LabelStream:
    """Reads labels in a thread of its own, and remembers in a file how far it has come.

    It begins at the end of the stream, because labels of what was served before cannot be joined any more, and later where it
    stopped. A record that was taken before a crash may be read again, and then counts as repeated.

    Args:
        stream: Its records are JSON objects, see `labels_of_record`.
        add: Takes labels, such as `RolloutRouter.add_labels`.
        file: Where the positions are kept.
        columns: See `labels_of_record`.

    Raises:
        CorruptFileError: the file is damaged.

    Example:
        >>> import tempfile
        >>> from monolith.streams import open_stream
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stream = open_stream(f"{folder}/examples", partitions=1)
        ...     labels = LabelStream(stream, lambda labels: {}, Path(folder, "labels.json"))
        ...     labels.close()
        >>> labels.counts()
        {'read': 0, 'bad': 0, 'lost_positions': 0}
    """

    def __init__(
        self,
        stream: Stream,
        add: Callable[[Sequence[ServedLabel]], object],
        file: Path,
        *,
        columns: Mapping[str, str | None] | None = None,
    ) -> None:
        self._stream, self._add, self._file = stream, add, file
        self._columns = columns or {"label": None}
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._behind = 0
        self._warnings = RareWarnings(_log, seconds=60)
        self._positions = self._read_positions()
        self._reader = stream.reader()
        self._stop = threading.Event()
        self._assign()
        self._thread = threading.Thread(target=self._run, name="monolith-label-stream", daemon=True)
        self._thread.start()

    def counts(self) -> dict[str, int]:
        """Return the records that were read, those of them without a valid label, and how often a position was gone."""
        with self._lock:
            return {name: self._counts[name] for name in ("read", "bad", "lost_positions")}

    def close(self) -> None:
        """Stop reading. Calling it twice is harmless."""
        self._stop.set()
        if self._thread.is_alive():
            self._reader.wake()
            self._thread.join()

    def collect(self) -> Iterator[Metric]:
        """Yield metrics, for `ServingMetrics.collectors`."""
        core = import_extra("prometheus_client.metrics_core", extra="serve", purpose="/metrics")
        records = core.CounterMetricFamily(
            "monolith_label_stream_records", "Records of the stream of labels", labels=("state",)
        )
        for state, number in self.counts().items():
            records.add_metric((state,), number)
        yield records
        behind = core.GaugeMetricFamily("monolith_label_stream_records_behind", "Records that are not read yet")
        behind.add_metric((), self._behind)
        yield behind

    def _read_positions(self) -> dict[str, int]:
        try:
            tree = json.loads(self._file.read_bytes())
            found = {str(name): int(offset) for name, offset in tree["partitions"].items()}
            url = str(tree["stream"])
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptFileError(
                f"{self._file}: is not a file of positions ({error!r}); remove it to begin at the end of the stream"
            ) from None
        if url != self._stream.url:
            _log.warning("%s: has positions of %s; reading begins at the end of %s", self._file, url, self._stream.url)
            return {}
        return found

    def _save(self) -> None:
        tree = {"stream": self._stream.url, "partitions": self._positions}
        try:
            write_durably(self._file, json.dumps(tree).encode())
        except OSError as error:
            raise StorageError(f"{self._file}: positions cannot be saved: {error}") from error

    def _assign(self) -> None:
        """Read all partitions there are, from where reading stopped. New ones are read from their beginning."""
        is_first = not self._positions
        self._partitions = self._stream.partitions()
        wanted = {name: self._positions.get(name, END if is_first else START) for name in self._partitions}
        try:
            self._reader.assign(wanted)
        except StreamGapError as error:
            self._begin_again(error)
        if is_first:
            self._positions = dict(self._reader.ends())

    def _begin_again(self, error: StreamGapError) -> None:
        """Read what the stream still has. Labels that were taken before count as repeated."""
        _log.warning("%s: labels were removed before they were read: %s", self._stream.url, error)
        self._count("lost_positions", 1)
        self._reader.assign(dict.fromkeys(self._partitions, START))

    def _run(self) -> None:
        saved = looked = time.monotonic()
        back_off, is_dirty, is_assigned = 0.1, True, True
        while not self._stop.is_set():
            try:
                now = time.monotonic()
                if now - looked >= _PARTITION_SECS:
                    looked = now
                    is_assigned = is_assigned and self._stream.partitions() == self._partitions
                if not is_assigned:
                    self._assign()
                    is_assigned = True
                is_dirty = self._take() or is_dirty
                if is_dirty and now - saved >= _SAVE_SECS:
                    self._save()
                    saved, is_dirty = now, False
                back_off = 0.1
            except StreamGapError as error:
                self._begin_again(error)
            except Exception as error:
                self._warnings.warn("%s: labels cannot be read: %s", self._stream.url, error)
                if not isinstance(error, MonolithError):
                    _log.error("reading labels failed", exc_info=error)
                is_assigned = False  # what was read and not taken is read again
                self._stop.wait(back_off)
                back_off = min(2 * back_off, _MAX_BACK_OFF_SECS)
        try:
            if is_dirty:
                self._save()
        except StorageError as error:
            _log.error("%s", error)
        self._reader.close()

    def _take(self) -> bool:
        """Add the labels that have come. Returns whether there were any records."""
        batches = self._reader.poll(_MAX_RECORDS, _POLL_SECS)
        labels: list[ServedLabel] = []
        for records in batches:
            for offset, value in zip(records.offsets, records.values, strict=True):
                try:
                    labels += labels_of_record(value, self._columns)
                except InvalidArgumentError as error:
                    self._count("bad", 1)
                    self._warnings.warn("a record is no label: %s at %d of %s", error, offset, records.partition)
            self._count("read", len(records))
        if labels:
            self._add(labels)
        for records in batches:
            self._positions[records.partition] = records.next_offset
        ends = self._reader.ends()
        self._behind = sum(max(0, end - self._positions.get(name, end)) for name, end in ends.items())
        return bool(batches)

    def _count(self, name: str, number: int) -> None:
        with self._lock:
            self._counts[name] += number
