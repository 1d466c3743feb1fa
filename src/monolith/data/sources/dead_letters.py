"""`DeadLetters`: where bad records go, how many there were, and when there are too many to go on."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from monolith.errors import SchemaError
from monolith.streams import Records, Stream, StreamWriter

__all__ = ["DeadLetters"]

_log = logging.getLogger(__name__)

_WINDOW = 1000
"""Records over which the share of bad ones is taken."""
_LEAST = 100
"""Records before a share is looked at."""
_LOG_SECS = 10.0
_MAX_VALUE_BYTES = 900_000
"""Longer values are cut: a broker takes records of a megabyte."""


class DeadLetters:
    """Counts bad records, logs them at a bounded rate, and writes them to a stream if there is one.

    A dead letter has the key, value, timestamp and headers of the record, and these headers more: `dead-letter.reason`,
    `dead-letter.stream`, `dead-letter.partition`, `dead-letter.offset`, for a single row of a record with many
    `dead-letter.row`, and for a value that was cut `dead-letter.bytes`, its size.
    """

    def __init__(
        self, url: str, letters: Stream | None, *, shard: int, max_bad_share: float, clock: Callable[[], float]
    ) -> None:
        self._url, self._letters, self._shard = url, letters, shard
        self._max_bad_share, self._clock = max_bad_share, clock
        self._writer: StreamWriter | None = None
        self._partition, self._unflushed = 0, False
        self.count = 0
        """Bad records so far."""
        self._seen = 0
        self._recent: deque[tuple[int, int]] = deque()
        self._recent_seen = self._recent_bad = 0
        self._last_reason = ""
        self._next_log, self._unlogged = clock(), 0

    def note_good(self, count: int) -> None:
        """Count records that are not bad."""
        if count:
            self._note(count, 0)

    def add(self, records: Records, index: int, reason: str, *, row: int | None = None) -> None:
        """Count, log and write one bad record, or one bad row of a record.

        Raises:
            SchemaError: too many of the last records were bad.
            StorageError, UnavailableError: it cannot be written.
        """
        self.count += 1
        where = f"{records.partition} offset {records.offsets[index]}{'' if row is None else f' row {row}'}"
        self._last_reason = f"{where}: {reason}"
        self._log_at_bounded_rate()
        self.write(records, index, reason, row=row)
        self._note(1, 1)
        if self._recent_seen >= _LEAST:
            self._require_share(self._recent_bad, self._recent_seen, f"the last {self._recent_seen:,}")

    def require_share_at_end(self) -> None:
        """Raise `SchemaError` if too many of all records were bad: few records never fill the window."""
        if self._seen:
            self._require_share(self.count, self._seen, f"all {self._seen:,}")

    def flush(self) -> None:
        """Return when all dead letters are stored."""
        if self._unflushed and self._writer is not None:
            self._writer.flush()
            self._unflushed = False

    def close(self) -> None:
        """Flush, and release the stream."""
        if self._unlogged:
            self._log()
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _note(self, seen: int, bad: int) -> None:
        self._seen += seen
        self._recent.append((seen, bad))
        self._recent_seen += seen
        self._recent_bad += bad
        while self._recent_seen - self._recent[0][0] >= _WINDOW:
            old_seen, old_bad = self._recent.popleft()
            self._recent_seen -= old_seen
            self._recent_bad -= old_bad

    def _require_share(self, bad: int, seen: int, which: str) -> None:
        if bad <= self._max_bad_share * seen:
            return
        raise SchemaError(
            f"{self._url}: {bad:,} of {which} records are bad, more than max_bad_share {self._max_bad_share:g}; the last one: "
            f"{self._last_reason}. Are columns and format those of the stream? max_bad_share=1 goes on whatever comes"
        )

    def _log_at_bounded_rate(self) -> None:
        self._unlogged += 1
        if self._clock() >= self._next_log:
            self._log()

    def _log(self) -> None:
        where = "left out" if self._letters is None else f"moved to {self._letters.url}"
        what = "1 bad record" if self._unlogged == 1 else f"{self._unlogged:,} bad records"
        _log.warning("%s: %s %s, %s", self._url, what, where, self._last_reason)
        self._unlogged, self._next_log = 0, self._clock() + _LOG_SECS

    def write(self, records: Records, index: int, reason: str, *, row: int | None = None) -> None:
        """Write a record that is not bad, but not wanted."""
        if self._letters is None:
            return
        if self._writer is None:
            # One partition for each shard: in a folder only one process may write it.
            self._partition = self._shard % len(self._letters.partitions())
            self._writer = self._letters.writer([self._partition])
        value, timestamp = records.values[index], records.timestamps[index]
        facts = {
            "reason": reason,
            "stream": self._url,
            "partition": records.partition,
            "offset": str(records.offsets[index]),
        }
        if row is not None:
            facts["row"] = str(row)
        if len(value) > _MAX_VALUE_BYTES:
            facts["bytes"] = str(len(value))
        own = () if records.headers is None else records.headers[index]
        headers = tuple((f"dead-letter.{name}", text.encode()) for name, text in facts.items())
        self._writer.append(
            value[:_MAX_VALUE_BYTES],
            partition=self._partition,
            key=records.keys[index],
            timestamp=None if timestamp < 0 else timestamp,
            headers=(*own, *headers),
        )
        self._unflushed = True
