"""Reading key, time and type out of the JSON records of the inputs, and adding columns to them (`with_columns`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from monolith.data.join.config import ActionInput, ImpressionInput
from monolith.streams.stream import Records

__all__ = ["ActionParser", "BAD_RECORDS", "ImpressionParser", "MAX_KEY_BYTES", "RefusedRecord", "with_columns"]

MAX_KEY_BYTES = 256
"""Longest key of an impression."""

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
_OPEN_BRACE, _BRACE, _SPACE = b"{} "
Fields = Mapping[str, Any]


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
    """What the parsers of both inputs share: fields of key and time, and bounds."""

    def __init__(self, source: ImpressionInput | ActionInput, *, max_bytes: int, max_future_ms: int) -> None:
        self._key_fields, self._key_of = source.key, _key_reader(source.key or ())
        self._time_field, self._scale = source.time, 1000 if source.time_unit == "s" else 1
        self._max_bytes, self._max_future_ms = max_bytes, max_future_ms

    def _parsed(
        self, records: Records, now_ms: int, refused: list[RefusedRecord]
    ) -> Iterator[tuple[bytes, int, int, bytes, Fields]]:
        """Yield key, event time in milliseconds, offset, value and fields of each record, and append others to `refused`."""
        newest, max_bytes = min(now_ms + self._max_future_ms, _MAX_TIME_MS), self._max_bytes
        loads, key_of, field, scale = orjson.loads, self._key_of, self._time_field, self._scale
        has_key = self._key_fields is None
        only = self._key_fields[0] if self._key_fields is not None and len(self._key_fields) == 1 else ""
        for offset, timestamp, key, value in zip(
            records.offsets, records.timestamps, records.keys, records.values, strict=True
        ):
            try:
                if not 0 < len(value) <= max_bytes:
                    raise _BadRecordError("too_large" if value else "empty")
                record = loads(value)
                if type(record) is not dict:
                    raise _BadRecordError("not_json")
                time = timestamp if field is None else record.get(field)
                if type(time) is float and math.isfinite(time):
                    time = round(time * scale)
                elif type(time) is not int:
                    raise _BadRecordError("time")
                elif field is not None:
                    time *= scale
                if not 0 < time <= newest:
                    raise _BadRecordError("future" if time > 0 else "time")
                if has_key:
                    joined = key
                elif type(text := record.get(only)) is str and only:  # nearly always
                    joined = text.encode()
                else:
                    joined = key_of(record)
                if not joined or len(joined) > MAX_KEY_BYTES:
                    raise _BadRecordError("key")
                yield joined, time, offset, value, record
            except _BadRecordError as error:
                refused.append(RefusedRecord(error.args[0], records.partition, offset, key, value))
            except orjson.JSONDecodeError:
                refused.append(RefusedRecord("not_json", records.partition, offset, key, value))


class ImpressionParser(_InputParser):
    """Parses impressions."""

    def __init__(
        self, source: ImpressionInput, added: Mapping[str, str], *, max_bytes: int, max_future_ms: int
    ) -> None:
        super().__init__(source, max_bytes=max_bytes, max_future_ms=max_future_ms)
        self._added = frozenset(added)

    def parse(self, records: Records, now_ms: int, refused: list[RefusedRecord]) -> list[tuple[bytes, int, int, bytes]]:
        """Return key, event time, offset and value of each impression, and append the others to `refused`."""
        found, added = [], self._added
        for key, time, offset, value, record in self._parsed(records, now_ms, refused):
            if added.isdisjoint(record):
                found.append((key, time, offset, value))
            else:
                refused.append(RefusedRecord("column", records.partition, offset, key, value))
        return found


class ActionParser(_InputParser):
    """Parses actions."""

    def __init__(self, source: ActionInput, *, max_bytes: int, max_future_ms: int) -> None:
        super().__init__(source, max_bytes=max_bytes, max_future_ms=max_future_ms)
        self._type_field = source.type

    def parse(
        self, records: Records, now_ms: int, refused: list[RefusedRecord]
    ) -> list[tuple[bytes, int, int, bytes, str]]:
        """Return key, event time, offset, value and type of each action, and append the others to `refused`."""
        found, field = [], self._type_field
        for key, time, offset, value, record in self._parsed(records, now_ms, refused):
            type_ = record.get(field)
            if type(type_) is str or type(type_) is int:
                found.append((key, time, offset, value, str(type_)))
            else:
                refused.append(RefusedRecord("type", records.partition, offset, key, value))
        return found


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


def with_columns(value: bytes, columns: bytes, start: int = 0) -> bytes:
    """Return the JSON object in `value` from `start` on with `columns`, such as `b'"a":1,"b":2'`, as further fields.

    It is not parsed again.

    Example:
        >>> with_columns(b'{"user": 7} ', b'"clicked":1.0'), with_columns(b"{ }", b'"clicked":1.0')
        (b'{"user": 7,"clicked":1.0}', b'{"clicked":1.0}')
    """
    if value[-1] == _BRACE and value[-2] > _SPACE and value[-2] != _OPEN_BRACE:
        return b"%b,%b}" % (value[start:-1], columns)
    body = value[start : value.rindex(b"}")].rstrip()
    return b"%b%b%b}" % (body, b"" if body.endswith(b"{") else b",", columns)
