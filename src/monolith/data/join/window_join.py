"""`WindowJoin`: joins impressions and actions of one unit by key, in event time. It reads no clock, file or stream."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

import orjson

from monolith import _core
from monolith.data.join.config import JoinConfig, NegativeSampling
from monolith.data.join.records import Action, Impression, RefusedRecord
from monolith.data.join.state import Windows, due_of
from monolith.streams.stream import Headers

__all__ = ["ACTIONS_HEADER", "Example", "ORIGIN_HEADER", "Published", "WindowJoin", "bucket_ms", "is_kept"]

ORIGIN_HEADER = "origin"
"""Header with input partition, offset and ordinal of what a record was made of, such as `impressions/3:1207:0`. The ordinal is 0
for the first example of an impression. Others of it have larger ones, no two the same."""
ACTIONS_HEADER = "actions"
"""Header with the types of the actions that an example knows of, such as `click,buy`. Without any there is no such header."""
_CORRECTION = ("correction", b"1")
# Header of examples that replace an earlier one.

_EARLY, _OPEN, _DONE = 0, 1, 2
"""Status of an entry: actions without an impression, an impression whose example is not emitted, and one whose example was."""
_HEADER = struct.Struct("<BqQqHq")  # status, due, actions, event time, partition, offset. The value follows
_EARLY_HEADER = struct.Struct("<Bq")  # status, due
_EARLY_ACTION = struct.Struct("<qBHqI")  # event time, bit, partition, offset, length of the value that follows
_MAX_EARLY_BYTES = 64 << 10
_CLOSES_PER_WINDOW = 128
_MAX_BUCKET_MS = 60_000
_MIN_BUCKET_MS = 10
_CLOSED_AT_ONCE = 1024
# So many entries are fetched from the disk together.


class Example(NamedTuple):
    """What is written to the output for an impression: a `NewRecord` of a stream."""

    value: bytes
    """The impression with its labels."""
    key: bytes
    time: int
    """Event time of the impression, milliseconds."""
    headers: Headers
    """Where it comes from, and which actions it knows of."""


@dataclass(slots=True)
class Published:
    """What the output already has of an impression, although the state does not say so."""

    time: int
    """Event time of the impression."""
    actions: int = 0
    """Bits of all actions that its examples know of."""
    ordinal: int = 0
    """Of its last example. Those with smaller ordinals were written before it, or are negatives that are not kept."""


def bucket_ms(window_ms: int) -> int:
    """Return the range of event time within which windows are closed together.

    Example:
        >>> bucket_ms(1_800_000), bucket_ms(100), bucket_ms(10**10)
        (14062, 10, 60000)
    """
    return min(max(window_ms // _CLOSES_PER_WINDOW, _MIN_BUCKET_MS), _MAX_BUCKET_MS)


def is_kept(key: bytes, sampling: NegativeSampling) -> bool:
    """Return whether a negative is kept. It depends on nothing but its key, the rate and the seed.

    Example:
        >>> sampling = NegativeSampling(rate=0.1)
        >>> sum(is_kept(b"%d" % key, sampling) for key in range(10_000))
        980
    """
    if sampling.rate >= 1:
        return True
    digest = blake2b(key, digest_size=8, salt=sampling.seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") < sampling.rate * 2.0**64


class WindowJoin:
    """Turns impressions and actions into examples.

    Whatever the order in which they come, an impression has the actions between `lead_secs` before and `window_secs` after it.
    `take` returns what is to be written since it was last called.

    Example:
        >>> from monolith.data.join import JoinConfig
        >>> config = JoinConfig.from_json('''{
        ...     "impressions": {"stream": "a"}, "actions": {"stream": "b"}, "output": {"stream": "c"}, "window_secs": 60,
        ...     "labels": [{"name": "clicked", "actions": {"click": 1}}], "state": {"folder": "d"}}''')
        >>> join = WindowJoin(config, Windows(bucket_ms=bucket_ms(60_000), limit=1 << 20), partitions=["a/0", "b/0"])
        >>> join.add_actions(1, [(b"k", 20_000, 0, b"", "click")])  # comes first, happened later
        >>> join.add_impressions(0, [(b"k", 5_000, 0, b'{"user":7}')])
        >>> join.close_windows(66_000)
        >>> join.take()[0][0].value
        b'{"user":7,"clicked":1.0,"sample_rate":1.0}'
    """

    def __init__(
        self, config: JoinConfig, windows: Windows, *, partitions: Sequence[str], types: Iterable[str] = ()
    ) -> None:
        """Join into `windows`.

        Args:
            config: what counts, and when examples are emitted.
            windows: where open windows are.
            partitions: names of the input partitions, by index.
            types: the types of actions that entries of `windows` have bits for.
        """
        self.config, self.windows, self.partitions = config, windows, partitions
        self.types = tuple(dict.fromkeys((*types, *config.types)))
        self.counts: Counter[str] = Counter()
        self.published: dict[tuple[int, int], Published] = {}
        """What is in the output although the state does not say so, by partition and offset of the impression."""
        bits = {name: 1 << index for index, name in enumerate(self.types)}
        self._bits = {name: bits[name] for name in config.types}
        self._window_ms, self._lead_ms = round(config.window_secs * 1000), round(config.lead_secs * 1000)
        self._keep_ms = config.keep_ms
        self._is_fast = config.emit == "fast"
        emit_on = config.types if config.emit_on is None else config.emit_on
        self._emit_on = 0 if config.emit == "window_end" else sum(bits[name] for name in emit_on)
        positive = config.types if config.sampling.positive is None else config.sampling.positive
        self._positive = sum(bits[name] for name in positive)
        self._drops_negatives = config.sampling.rate < 1
        self._keeps_values = config.late == "correction"
        self._forms: dict[int, tuple[bytes, tuple[str, bytes] | None, bool]] = {}
        # By actions: columns that are added, header with their types, whether they make a positive.
        self._origins = [f"{name}:".encode() for name in partitions]
        self._closer = _core.WindowCloser(
            example=Example,
            forms=self._forms,
            origins=self._origins,
            keeps=partial(is_kept, sampling=config.sampling) if self._drops_negatives else None,
            remember_ms=self._window_ms + self._keep_ms,
            keeps_values=self._keeps_values,
        )
        self._examples: list[Example] = []
        self._refused: list[RefusedRecord] = []

    def take(self) -> tuple[list[Example], list[RefusedRecord]]:
        """Return examples and refused records since the last call."""
        taken = self._examples, self._refused
        self._examples, self._refused = [], []
        return taken

    def refuse(self, refused: Iterable[RefusedRecord]) -> None:
        """Add records that could not be parsed to what `take` returns."""
        self._refused.extend(refused)

    def add_impressions(self, partition: int, impressions: list[Impression]) -> None:
        """Add impressions of the input partition with this index."""
        windows, number = self.windows, 0
        absent = windows.fetch(key for key, *_ in impressions)
        # Before this time a window is closed already.
        closed = windows.first_open * windows.bucket_ms - self._window_ms
        while number < len(impressions):
            if not self._is_fast:
                start = number
                number, size = _core.open_windows(
                    windows.table(), absent, impressions, start, partition, self._window_ms, closed
                )
                windows.note_growth(number - start, size)
                if number == len(impressions):
                    return
            # The core leaves the first one that is not simply the next of a new key.
            key, time, offset, value = impressions[number]
            number += 1
            before = windows.get(key)
            if before is None or before[0] == _EARLY:
                self._add_impression(key, time, partition, offset, value, before)
            else:
                self.counts["duplicate_impressions"] += 1

    def _add_impression(
        self, key: bytes, time: int, partition: int, offset: int, value: bytes, early: bytes | None
    ) -> None:
        """Add an impression that is late, has actions already, or is emitted at once."""
        due, bucket, first_open = time + self._window_ms, self.windows.bucket_ms, self.windows.first_open
        if (due + self._keep_ms) // bucket < first_open:
            self.counts["expired_impressions"] += 1
            self._refused.append(RefusedRecord("expired", self.partitions[partition], offset, key, value))
            return
        actions = 0
        for at, bit, its_partition, its_offset, its_value in _early_actions(early or b""):
            if time - self._lead_ms <= at <= due:
                actions |= 1 << bit
            else:
                self._not_joined("outside_actions", key, its_partition, its_offset, its_value)
        entry = _HEADER.pack(_OPEN, due, actions, time, partition, offset) + value
        if self._is_fast:
            self._emit(key, entry, 0, time, partition, offset, 0)
        if due // bucket < first_open:
            self.counts["late_impressions"] += 1
            self._close(key, entry)
        elif actions & self._emit_on:
            self._close(key, entry)
        else:
            self.windows.put(key, entry, due)

    def add_actions(self, partition: int, actions: Iterable[Action]) -> None:
        """Add actions of the input partition with this index."""
        get, bits, counts = self.windows.get, self._bits, self.counts
        for key, time, offset, value, type_ in actions:
            bit = bits.get(type_)
            if bit is None:
                counts["other_actions"] += 1
                continue
            entry = get(key)
            if entry is None or entry[0] == _EARLY:
                self._keep_early(key, time, bit, partition, offset, value, entry)
                continue
            status, due, known, shown, of, its_offset = _HEADER.unpack_from(entry)
            if not shown - self._lead_ms <= time <= shown + self._window_ms:
                self._not_joined("outside_actions", key, partition, offset, value)
            elif known & bit:
                counts["duplicate_actions"] += 1
            elif status == _DONE:
                self._late(key, entry, bit, partition, offset, value)
            else:
                changed = _HEADER.pack(_OPEN, due, known | bit, shown, of, its_offset) + entry[_HEADER.size :]
                if bit & self._emit_on:
                    self._close(key, changed)
                else:
                    self.windows.update(key, changed)

    def _keep_early(
        self, key: bytes, time: int, bit: int, partition: int, offset: int, value: bytes, entry: bytes | None
    ) -> None:
        """Keep an action that has no impression yet for as long as one that it belongs to may come."""
        number = bit.bit_length() - 1
        expires = time + self._lead_ms + self._window_ms + self._keep_ms
        if expires // self.windows.bucket_ms < self.windows.first_open:
            self._not_joined("unmatched_actions", key, partition, offset, value)
            return
        kept = value if self.config.late == "dead_letter" else b""
        if entry is not None:
            if any(at == time and its == number for at, its, *_ in _early_actions(entry)):
                self.counts["duplicate_actions"] += 1
                return
            if len(entry) + len(kept) > _MAX_EARLY_BYTES:
                self._not_joined("unmatched_actions", key, partition, offset, value)
                return
            expires = max(expires, _EARLY_HEADER.unpack_from(entry)[1])
        self.counts["early_actions"] += 1
        action = _EARLY_ACTION.pack(time, number, partition, offset, len(kept)) + kept
        before = b"" if entry is None else entry[_EARLY_HEADER.size :]
        self.windows.put(key, _EARLY_HEADER.pack(_EARLY, expires) + before + action, expires)

    def close_windows(self, watermark: int) -> None:
        """Close what is due below `watermark`, milliseconds."""
        while self.close_next(watermark):
            pass

    def close_next(self, watermark: int) -> bool:
        """Close the first bucket below `watermark`. Returns False if there was none."""
        windows = self.windows
        keys = windows.take_due(watermark // windows.bucket_ms)
        if keys is None:
            return False
        end = windows.first_open * windows.bucket_ms
        for first in range(0, len(keys), _CLOSED_AT_ONCE):
            self._close_due(keys[first : first + _CLOSED_AT_ONCE], end)
        return True

    def _close_due(self, keys: list[bytes], end: int) -> None:
        """Close those of these windows that are due before `end`, and forget keys that are remembered no longer."""
        windows, number = self.windows, 0
        absent = windows.fetch(keys)
        while number < len(keys):
            if not self._is_fast and not self.published:
                before = len(self._examples)
                number, size, removed, positives, sampled_out = self._closer.close(
                    windows.table(), absent, keys, number, end, self._examples
                )
                windows.note_growth(-removed, size)
                for name, more in (
                    ("positives", positives),
                    ("negatives", len(self._examples) - before - positives),
                    ("sampled_out", sampled_out),
                ):
                    if more:
                        self.counts[name] += more
                if number == len(keys):
                    return
            key = keys[number]
            number += 1
            entry = windows.get(key)
            # It may be gone, or have been moved to a later bucket.
            if entry is None or due_of(entry) >= end:
                continue
            if entry[0] == _OPEN:
                self._close(key, entry)
                continue
            windows.remove(key)
            if entry[0] == _EARLY:
                for _, _, partition, offset, value in _early_actions(entry):
                    self._not_joined("unmatched_actions", key, partition, offset, value)

    def forget_published(self) -> None:
        """Forget what was published of impressions of which nothing can be emitted any more."""
        oldest = self.windows.first_open * self.windows.bucket_ms - self._window_ms - self._keep_ms
        self.published = {origin: known for origin, known in self.published.items() if known.time >= oldest}

    def _close(self, key: bytes, entry: bytes) -> None:
        """Emit the example of an entry, and remember its key."""
        _, _, actions, time, partition, offset = _HEADER.unpack_from(entry)
        known = actions
        if actions or not self._is_fast:
            is_new = self._emit(key, entry, actions, time, partition, offset, int(self._is_fast))
            known = actions if is_new else 0
        if self.published and (published := self.published.get((partition, offset))) is not None:
            known |= published.actions
        due = time + self._window_ms + self._keep_ms
        done = _HEADER.pack(_DONE, due, known, time, partition, offset)
        if self._keeps_values:
            done += entry[_HEADER.size :]
        if due >= self.windows.first_open * self.windows.bucket_ms:
            self.windows.put(key, done, due)
        else:
            self.windows.remove(key)
        if late := actions & ~known:
            # The example was written by a joiner that had not seen them yet, and was then killed.
            for bit in (1 << number for number in range(late.bit_length()) if late >> number & 1):
                self._late(key, self.windows.get(key) or done, bit, partition, offset, b"")

    def _late(self, key: bytes, entry: bytes, bit: int, partition: int, offset: int, value: bytes) -> None:
        """Treat an action that counts, but whose example was emitted without it."""
        self._not_joined("late_actions", key, partition, offset, value)
        if self.config.late != "correction":
            return
        _, due, known, time, of, its_offset = _HEADER.unpack_from(entry)
        actions = known | bit
        changed = _HEADER.pack(_DONE, due, actions, time, of, its_offset) + entry[_HEADER.size :]
        if self.windows.get(key) is not None:
            self.windows.update(key, changed)
        # The number of actions rises with each correction of an impression, so no two have one ordinal.
        self._emit(key, changed, actions, time, of, its_offset, 1 + actions.bit_count(), corrects=True)

    def _not_joined(self, counter: str, key: bytes, partition: int, offset: int, value: bytes) -> None:
        self.counts[counter] += 1
        if self.config.late == "dead_letter":
            self._refused.append(RefusedRecord(counter, self.partitions[partition], offset, key, value))

    def _emit(
        self,
        key: bytes,
        entry: bytes,
        actions: int,
        time: int,
        partition: int,
        offset: int,
        ordinal: int,
        *,
        corrects: bool = False,
    ) -> bool:
        """Emit an example, unless it is a negative that is not kept. Returns False if the output had it."""
        if self.published:
            known = self.published.get((partition, offset))
            if known is not None and ordinal <= known.ordinal:
                self.counts["repeated_examples"] += 1
                return False
        suffix, types, is_positive = self._form_of(actions)
        if not is_positive and self._drops_negatives and not is_kept(key, self.config.sampling):
            self.counts["sampled_out"] += 1
            return True
        self.counts["corrections" if corrects else "positives" if is_positive else "negatives"] += 1
        value = _core.with_columns(entry, suffix, _HEADER.size)
        headers: list[tuple[str, bytes]] = [(ORIGIN_HEADER, b"%b%d:%d" % (self._origins[partition], offset, ordinal))]
        if types is not None:
            headers.append(types)
        if corrects:
            headers.append(_CORRECTION)
        self._examples.append(Example(value, key, time, tuple(headers)))
        return True

    def _form_of(self, actions: int) -> tuple[bytes, tuple[str, bytes] | None, bool]:
        form = self._forms.get(actions)
        if form is None:
            names = [name for index, name in enumerate(self.types) if actions >> index & 1]
            types = (ACTIONS_HEADER, ",".join(names).encode()) if names else None
            form = self._forms[actions] = self._columns_of(actions), types, bool(actions & self._positive)
        return form

    def _columns_of(self, actions: int) -> bytes:
        """Return the columns that are added to an impression with these actions, as JSON without braces."""
        config, columns = self.config, dict[str, float]()
        for label in config.labels:
            values = (value for type_, value in label.actions.items() if actions & self._bits[type_])
            columns[label.name] = float(next(values, label.default))
        sampling = config.sampling
        if sampling.rate_column is not None:
            columns[sampling.rate_column] = float(sampling.rate)
        if sampling.weight_column is not None:
            columns[sampling.weight_column] = 1.0 if actions & self._positive else 1.0 / sampling.rate
        return orjson.dumps(columns)[1:-1]


def _early_actions(entry: bytes) -> Iterator[tuple[int, int, int, int, bytes]]:
    """Yield event time, number of the bit, partition, offset and value of the actions of an early entry."""
    at, head = _EARLY_HEADER.size, _EARLY_ACTION.size
    while at < len(entry):
        time, number, partition, offset, length = _EARLY_ACTION.unpack_from(entry, at)
        yield time, number, partition, offset, entry[at + head : at + head + length]
        at += head + length
