"""Reading key, time and type out of the JSON records of the inputs (`ImpressionParser`, `ActionParser`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from monolith import _core
from monolith.data.join.config import ActionInput, ImpressionInput
from monolith.streams.stream import Records

__all__ = ["Action", "ActionParser", "BAD_RECORDS", "Impression", "ImpressionParser", "RefusedRecord"]

BAD_RECORDS = {
    "empty": "it has no value",
    "too_large": "it is larger than max_record_bytes",
    "not_json": "it is not a JSON object",
    "key": "a field of the key is missing, empty, too long, or neither a string nor an integer",
    "time": "the event time is missing, or not a positive number",
    "future": "the event time is too far ahead of the clock",
    "column": "it has a field with the name of a label or another column that the joiner adds",
    "type": "the type of the action is missing, or neither a string nor an integer",
    "expired": "it came after its window and the time for which keys are remembered",
    "parquet": "it does not fit the columns of the Parquet files",
}
"""Why a record is refused, with the text for people."""

_MAX_TIME_MS = 1 << 52
Fields = Mapping[str, Any]

Impression = tuple[bytes, int, int, bytes]
"""Key, event time in milliseconds, offset and value."""
Action = tuple[bytes, int, int, bytes, str]
"""Key, event time in milliseconds, offset, value and type."""


@dataclass(frozen=True, slots=True)
class RefusedRecord:
    """A record that is not joined."""

    reason: str
    """A name of `BAD_RECORDS`, or of a counter of actions that were not joined."""
    partition: str
    offset: int
    key: bytes | None
    """Of the record, or of the impression if it is known."""
    value: bytes


class _BadRecordError(Exception):
    """Its only argument is a name of `BAD_RECORDS`."""


class _InputParser:
    """What the parsers of both inputs share: fields of key and time, and bounds.

    The core reads nearly all records. Those that it leaves are read here, which also says what is wrong with them.
    """

    def __init__(
        self,
        source: ImpressionInput | ActionInput,
        *,
        type_field: str | None = None,
        absent: Collection[str] = (),
        max_bytes: int,
        max_future_ms: int,
    ) -> None:
        self._key_fields, self._key_of = source.key, _key_reader(source.key or ())
        self._time_field, self._scale = source.time, 1000 if source.time_unit == "s" else 1
        self._type_field, self._absent = type_field, frozenset(absent)
        self._max_bytes, self._max_future_ms = max_bytes, max_future_ms
        self._core = _core.EventParser(
            key=source.key or (),
            time=source.time,
            time_scale=self._scale,
            type=type_field,
            absent=list(absent),
            max_bytes=max_bytes,
        )

    def _parsed(self, records: Records, now_ms: int, refused: list[RefusedRecord]) -> list[Any]:
        """Return key, event time in milliseconds, offset and value of each record, and its type if it has one.

        Others are appended to `refused`.
        """
        newest = min(now_ms + self._max_future_ms, _MAX_TIME_MS)
        offsets, timestamps = list(records.offsets), list(records.timestamps)
        keys, values = list(records.keys), list(records.values)
        found: list[tuple[object, ...]] = []
        number = 0
        while (number := self._core.parse(offsets, timestamps, keys, values, number, newest, found)) < len(values):
            offset, key, value = offsets[number], keys[number], values[number]
            try:
                found.append(self._parsed_slowly(offset, timestamps[number], key, value, newest))
            except _BadRecordError as error:
                refused.append(RefusedRecord(error.args[0], records.partition, offset, key, value))
            number += 1
        return found

    def _parsed_slowly(
        self, offset: int, timestamp: int, key: bytes | None, value: bytes, newest: int
    ) -> tuple[object, ...]:
        if not 0 < len(value) <= self._max_bytes:
            raise _BadRecordError("too_large" if value else "empty")
        try:
            record = orjson.loads(value)
        except orjson.JSONDecodeError:
            raise _BadRecordError("not_json") from None
        if type(record) is not dict:
            raise _BadRecordError("not_json")
        time = timestamp if self._time_field is None else record.get(self._time_field)
        if type(time) is float and math.isfinite(time):
            time = round(time * self._scale)
        elif type(time) is not int:
            raise _BadRecordError("time")
        elif self._time_field is not None:
            time *= self._scale
        if not 0 < time <= newest:
            raise _BadRecordError("future" if time > 0 else "time")
        joined = key if self._key_fields is None else self._key_of(record)
        if not joined or len(joined) > _core.MAX_KEY_BYTES:
            raise _BadRecordError("key")
        if not self._absent.isdisjoint(record):
            raise _BadRecordError("column")
        if self._type_field is None:
            return joined, time, offset, value
        type_ = record.get(self._type_field)
        if type(type_) is str or type(type_) is int:
            return joined, time, offset, value, str(type_)
        raise _BadRecordError("type")


class ImpressionParser(_InputParser):
    """Parses impressions."""

    def __init__(self, source: ImpressionInput, added: Collection[str], *, max_bytes: int, max_future_ms: int) -> None:
        super().__init__(source, absent=added, max_bytes=max_bytes, max_future_ms=max_future_ms)

    def parse(self, records: Records, now_ms: int, refused: list[RefusedRecord]) -> list[Impression]:
        """Return the impressions, and append other records to `refused`."""
        return self._parsed(records, now_ms, refused)


class ActionParser(_InputParser):
    """Parses actions."""

    def __init__(self, source: ActionInput, *, max_bytes: int, max_future_ms: int) -> None:
        super().__init__(source, type_field=source.type, max_bytes=max_bytes, max_future_ms=max_future_ms)

    def parse(self, records: Records, now_ms: int, refused: list[RefusedRecord]) -> list[Action]:
        """Return the actions, and append other records to `refused`."""
        return self._parsed(records, now_ms, refused)


def _key_reader(fields: tuple[str, ...]) -> Callable[[Fields], bytes]:
    """Return a function from a record to the key of the impression that several fields, or one, make."""

    def of_fields(record: Fields) -> bytes:
        texts = [_text(record.get(name)) for name in fields]
        # As JSON, so that ("a", "bc") and ("ab", "c") are different keys.
        return texts[0].encode() if len(texts) == 1 else orjson.dumps(texts)

    return of_fields


def _text(value: object) -> str:
    if type(value) is str and value:
        return value
    if type(value) is int:
        return str(value)
    raise _BadRecordError("key")
