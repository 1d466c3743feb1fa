"""`RedisStream`: a partition is one Redis stream, the key `topic:0`, `topic:1`, and so on.

The id of an entry, milliseconds and a sequence number, is its offset: milliseconds * 2**20 + sequence number. How durable a
record is depends on the server: with `appendonly no` a restart loses it. A writer logs what the server says.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from types import TracebackType
from typing import Any, NoReturn, Self

from pydantic import Field

from monolith.config import Config
from monolith.errors import (
    AuthenticationError,
    CorruptFileError,
    InvalidArgumentError,
    StorageError,
    StreamGapError,
    UnavailableError,
)
from monolith.optional_packages import import_extra
from monolith.process_bound import ProcessBound
from monolith.streams.batching_writer import BatchingWriter
from monolith.streams.locations import refuse_secrets, resolved_settings
from monolith.streams.stream import END, START, Headers, NewRecord, Offset, Records

__all__ = ["RedisReader", "RedisSettings", "RedisStream"]

_logger = logging.getLogger(__name__)

_SEQUENCE_BITS = 20
_WAIT_MS = 20
_LOG_SECS = 10.0
_RETRY_SECS = 0.1
_SIZES = struct.Struct("<HI")


class RedisSettings(Config):
    """Settings of a stream on Redis that are not in its URL. `NAME.file` and `NAME.env` say where the value of NAME is.

    Example:
        >>> RedisSettings(username="me", password="abc")
        RedisSettings(username='me', ca_file=None, retention_records=None, retention_secs=None)
    """

    username: str | None = None
    """Name of the user, if the server has several."""
    password: str | None = Field(default=None, repr=False)
    """Password of the user, or of the server."""
    ca_file: str | None = None
    """Certificates that signed the server's, for `rediss://`. None: those of the system."""
    retention_records: int | None = Field(default=None, ge=1)
    """Number of records of a partition beyond which the oldest are removed, about. None keeps all."""
    retention_secs: float | None = Field(default=None, gt=0)
    """Records that are older are removed when others are written, about. None keeps all."""


class RedisStream:
    """One topic on a Redis server. Made by `open_stream("redis://host:6379/0/topic")`, or `rediss://` for TLS.

    `first_offset_at` goes by the time at which the server stored a record, whatever timestamp its writer has given.

    Example:
        >>> RedisStream("redis://localhost:6379/0/clicks").url
        'redis://localhost:6379/0/clicks'
    """

    def __init__(self, url: str, settings: Mapping[str, str] | None = None, partitions: int | None = None) -> None:
        refuse_secrets(url)
        self.url = url
        server, self._topic = _parsed(url)
        self._settings = RedisSettings.from_texts(resolved_settings(settings))
        self._api = import_extra("redis", extra="redis", purpose="a stream on Redis")
        given = self._settings
        more = {"ssl_ca_certs": given.ca_file} if given.ca_file is not None else {}
        self._client = self._api.Redis.from_url(
            server,
            username=given.username,
            password=given.password,
            socket_connect_timeout=10,
            socket_timeout=30,
            **more,
        )
        if partitions is not None:
            self._create(partitions)

    def partitions(self) -> list[str]:
        """As of every stream."""
        present = self.counted()
        if not present:
            raise InvalidArgumentError(
                f"{self.url}: there is no stream. Make one with `monolith stream create {self.url} --partitions 4`, or with "
                f"open_stream({self.url!r}, partitions=4)"
            )
        return [f"{self._topic}/{number}" for number in range(present)]

    def add_partitions(self, more: int) -> None:
        """Add `more` partitions, for readers and writers that are made from then on."""
        if more < 1:
            raise InvalidArgumentError(f"more: expected 1 or more, got {more}")
        present = self.counted()
        self._make(range(present, present + more))

    def bounds(self) -> dict[str, tuple[int, int]]:
        """As of every stream."""
        states = {name: self.state(name) for name in self.partitions()}
        return {name: (state.start, state.end) for name, state in states.items()}

    def first_offset_at(self, timestamp: int) -> dict[str, int]:
        """As of every stream, by the time at which the server stored a record."""
        first = max(timestamp, 0)
        offsets = {}
        for name in self.partitions():
            found = self.asked(self._client.xrange, self.key(name), f"{first}-0", count=1)
            offsets[name] = offset_of(found[0][0]) if found else self.state(name).end
        return offsets

    def reader(self) -> RedisReader:
        """As of every stream."""
        return RedisReader(self, self._client, self._api)

    def writer(self, partitions: Sequence[int] | None = None) -> BatchingWriter:
        """As of every stream. A partition may have several writers."""
        present = len(self.partitions())
        wanted = list(dict.fromkeys(range(present) if partitions is None else partitions))
        wrong = [number for number in wanted if not 0 <= number < present]
        if wrong or not wanted:
            raise InvalidArgumentError(
                f"partitions: expected some of 0 to {present - 1} of {self.url}, got {wrong[0] if wrong else 'none'}"
            )
        self._log_durability()
        sinks = {number: _Sink(self, self._client, f"{self._topic}/{number}", self._settings) for number in wanted}
        return BatchingWriter(sinks, linger_secs=0.001, max_pending_bytes=64 << 20)

    def last(self, partition: str) -> Records | None:
        """As of every stream."""
        self.require([partition])
        key = self.key(partition)
        found = self.asked(self._client.xrevrange, key, count=1)
        return _records(partition, found) if found else None

    def __repr__(self) -> str:
        return f"RedisStream({self.url!r})"

    def key(self, name: str) -> str:
        """Return the key of a partition."""
        return f"{self._topic}:{name.rpartition('/')[2]}"

    def require(self, names: Iterable[str]) -> None:
        """Raise if the stream does not have one of these partitions."""
        present = self.partitions()
        unknown = sorted(set(names) - set(present))
        if unknown:
            raise InvalidArgumentError(f"positions: expected some of {', '.join(present)}, got {unknown[0]!r}")

    def counted(self) -> int:
        """Return the number of partitions, 0 if there is no stream."""
        return next(n for n in count() if not self.asked(self._client.exists, f"{self._topic}:{n}"))

    def state(self, name: str) -> _State:
        """Return the borders of a partition."""
        return _State(self.asked(self._client.xinfo_stream, self.key(name)))

    def asked(self, ask: Callable[..., Any], *given: object, **named: object) -> Any:  # noqa: ANN401 - what `ask` returns
        """Call the client. Raises our errors for its own."""
        try:
            return ask(*given, **named)
        except self._api.RedisError as error:
            raise self.error(error) from None

    def error(self, error: Exception) -> AuthenticationError | UnavailableError | StorageError:
        """Return our exception for an error of the client. None of them has a password in its text."""
        text = f"{self.url}: {error}"
        errors = self._api.exceptions
        if isinstance(error, errors.AuthenticationError | errors.NoPermissionError | errors.AuthorizationError):
            return AuthenticationError(text)
        if isinstance(error, errors.ResponseError) and not isinstance(error, errors.ConnectionError):
            return StorageError(text)
        return UnavailableError(text)

    def _create(self, partitions: int) -> None:
        present = self.counted()
        if present == 0:
            self._make(range(partitions))
        elif present < partitions:
            raise InvalidArgumentError(
                f"partitions: {self.url} exists with {present}, fewer than {partitions}; add some with "
                f"`monolith stream add-partitions {self.url} {partitions - present}`"
            )

    def _make(self, numbers: range) -> None:
        for number in numbers:
            key = f"{self._topic}:{number}"
            # A group makes an empty stream, which stays when it is removed.
            self.asked(self._client.xgroup_create, key, "monolith-create", mkstream=True)
            self.asked(self._client.xgroup_destroy, key, "monolith-create")

    def _log_durability(self) -> None:
        try:
            found = self._client.config_get("appendonly", "appendfsync")
        except self._api.RedisError as error:
            _logger.warning("%s: cannot ask how durable records are (%s): the server decides", self.url, error)
            return
        appendonly, fsync = (found.get(name, "?") for name in ("appendonly", "appendfsync"))
        if appendonly == "yes" and fsync == "always":
            return
        lost = "what was written since its last snapshot" if appendonly == "no" else "about the last second"
        _logger.warning(
            "%s: the server has appendonly %s and appendfsync %s: if it fails, %s may be lost, flushed or not",
            self.url,
            appendonly,
            fsync,
            lost,
        )


class RedisReader:
    """Reads partitions on Redis. Made by `RedisStream.reader`. Used by one thread, except for `wake`.

    Example:
        >>> reader = RedisStream("redis://localhost:6379/0/clicks").reader()
        >>> reader.ends()
        {}
        >>> reader.close()
    """

    def __init__(self, stream: RedisStream, client: Any, api: Any) -> None:  # noqa: ANN401 - of the client library
        self._stream, self._client, self._api = stream, client, api
        self._positions: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._removed: dict[str, int] = {}
        self._woken = threading.Event()
        self._lost_at = self._logged = 0.0
        self._bound = ProcessBound("the reader of a stream")
        self._closed = False

    def assign(self, positions: Mapping[str, Offset]) -> None:
        """As of every reader."""
        self._require_open("assign")
        self._stream.require(positions)
        assigned, removed, ends = {}, {}, {}
        for name, offset in positions.items():
            state = self._stream.state(name)
            at = state.start if offset == START else state.end if offset == END else offset
            if at > state.end or at < 0:
                raise StreamGapError(
                    f"{self._stream.url}: {name}: has never had a record {at}: its next one is {state.end} or later. Was the "
                    f"stream removed and made again, or has the server lost records?"
                )
            if state.removed and not self._nothing_lost(name, at, state):
                self._refuse_gap(name, at, state)
            assigned[name], removed[name], ends[name] = at, state.removed, state.end
        self._positions, self._removed, self._ends = assigned, removed, ends

    def poll(self, max_records: int, timeout: float) -> list[Records]:
        """As of every reader."""
        self._bound.require()
        self._require_open("poll")
        if max_records < 1:
            raise InvalidArgumentError(f"max_records: expected 1 or more, got {max_records}")
        deadline = time.monotonic() + timeout
        while True:
            found = self._try(self._read, max_records) or []
            left = deadline - time.monotonic()
            if found or self._woken.is_set() or left <= 0:
                self._woken.clear() if not found else None
                return found
            milliseconds = max(1, min(_WAIT_MS, int(1000 * left)))
            if not self._positions:
                self._woken.wait(milliseconds / 1000)
            else:
                self._try(self._client.xread, self._behind(), count=1, block=milliseconds)

    def ends(self) -> dict[str, int]:
        """As of every reader. As of the last `poll`."""
        return dict(self._ends)

    def commit(self, positions: Mapping[str, int]) -> None:
        """Do nothing: positions are kept with what was trained."""

    def wake(self) -> None:
        """As of every reader."""
        self._woken.set()

    def close(self) -> None:
        """As of every reader. Calling it twice is harmless."""
        self._closed = True
        self._positions = {}
        self._ends = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise InvalidArgumentError(f"{what}: the reader is closed")

    def _read(self, max_records: int) -> list[Records]:
        """Return what is there, after a check that nothing before it was removed."""
        names = list(self._positions)
        if not names:
            return []
        share = -(-max_records // len(names))
        behind = self._behind()
        # In one transaction, so that nothing is removed between reading and the check.
        pipeline = self._client.pipeline(transaction=True)
        for name in names:
            pipeline.xrange(self._stream.key(name), f"({behind[self._stream.key(name)]}", count=share)
            pipeline.xinfo_stream(self._stream.key(name))
        answers = pipeline.execute()
        found, left = [], max_records
        for name, entries, info in zip(names, answers[::2], answers[1::2], strict=True):
            state = _State(info)
            self._ends[name] = max(state.end, self._positions[name])
            if state.removed != self._removed[name]:
                if not self._nothing_lost(name, self._positions[name], state):
                    self._refuse_gap(name, self._positions[name], state)
                self._removed[name] = state.removed
            if entries and left > 0:
                records = _records(name, entries[:left])
                self._positions[name] = records.next_offset
                left -= len(records)
                found.append(records)
        # The next poll begins with another partition.
        self._positions = {name: self._positions[name] for name in names[1:] + names[:1]}
        return found

    def _behind(self) -> dict[Any, Any]:
        """Return the id after which each key is read."""
        return {self._stream.key(name): _id_before(offset) for name, offset in self._positions.items()}

    def _nothing_lost(self, name: str, offset: int, state: _State) -> bool:
        """Return whether no record from `offset` on was removed: removing begins at the oldest."""
        if offset in (state.end, state.start):
            return True
        key = self._stream.key(name)
        around = ((entry, entry) for entry in (_id_of(offset - 1), _id_of(offset)))
        return any(self._stream.asked(self._client.xrange, key, *span) for span in around)

    def _refuse_gap(self, name: str, offset: int, state: _State) -> NoReturn:
        raise StreamGapError(
            f"{self._stream.url}: {name}: records from {offset} on may have been removed by retention: the oldest there is is "
            f"{state.start}. Start at the oldest, or keep more records than the reader may be behind"
        )

    def _try(self, ask: Callable[..., Any], *given: object, **named: object) -> Any:  # noqa: ANN401 - what `ask` returns
        """Call the client. Returns None while the server does not answer, which is logged."""
        errors = self._api.exceptions
        try:
            answer = ask(*given, **named)
        except (errors.AuthenticationError, errors.AuthorizationError) as error:
            raise self._stream.error(error) from None
        except (errors.ConnectionError, errors.TimeoutError) as error:
            now = time.monotonic()
            self._lost_at = self._lost_at or now
            if now - self._logged >= _LOG_SECS:
                self._logged = now
                _logger.warning("%s: %s; waiting for it", self._stream.url, error)
            self._woken.wait(_RETRY_SECS)
            return None
        except errors.RedisError as error:
            raise self._stream.error(error) from None
        if self._lost_at:
            _logger.warning("%s: answers again after %.1f s", self._stream.url, time.monotonic() - self._lost_at)
            self._lost_at = self._logged = 0.0
        return answer


class _State:
    """The borders of a partition, from the answer of XINFO STREAM."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        self.removed = int(info["entries-added"]) - int(info["length"])
        """Number of records that were removed."""
        self.end = offset_of(info["last-generated-id"]) + 1
        first = info["first-entry"]
        self.start = offset_of(first[0]) if first else self.end


class _Sink:
    """Where the records of one partition are written."""

    def __init__(self, stream: RedisStream, client: Any, name: str, settings: RedisSettings) -> None:  # noqa: ANN401
        self._stream, self._client, self._key = stream, client, stream.key(name)
        self._settings = settings

    def write(self, records: Sequence[NewRecord]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        limits: dict[str, Any] = {}
        if self._settings.retention_records is not None:
            limits = {"maxlen": self._settings.retention_records, "approximate": True}
        for value, key, timestamp, headers in records:
            fields: dict[str, bytes | int] = {"v": value, "t": timestamp}
            if key is not None:
                fields["k"] = key
            if headers:
                fields["h"] = _packed(headers)
            pipeline.xadd(self._key, fields, nomkstream=True, **limits)
        if self._settings.retention_secs is not None:
            oldest = time.time() - self._settings.retention_secs
            pipeline.xtrim(self._key, minid=f"{int(1000 * oldest)}-0", approximate=True)
        answers = self._stream.asked(pipeline.execute)
        if None in answers[: len(records)]:
            raise StorageError(f"{self._stream.url}: the partition {self._key} was removed while it was written")

    def sync(self) -> None:
        """Nothing to wait for: the server has acknowledged what was written."""

    def tidy(self) -> None:
        """Nothing is due."""

    def close(self, *, clean: bool) -> None:
        """Nothing is held."""


def offset_of(entry: bytes | str) -> int:
    """Return the offset of an entry by its id.

    Example:
        >>> offset_of("5-3") == 5 * 2**20 + 3
        True
    """
    text = entry.decode() if isinstance(entry, bytes) else entry
    milliseconds, _, sequence = text.partition("-")
    if int(sequence) >> _SEQUENCE_BITS or int(milliseconds) >> (63 - _SEQUENCE_BITS):
        raise CorruptFileError(
            f"the id {text} of an entry of a Redis stream is too large for an offset: expected less than 2**43 milliseconds and "
            f"2**20 entries in each. Has the clock of the server been set back far?"
        )
    return (int(milliseconds) << _SEQUENCE_BITS) + int(sequence)


def _id_of(offset: int) -> str:
    offset = max(offset, 0)
    return f"{offset >> _SEQUENCE_BITS}-{offset & ((1 << _SEQUENCE_BITS) - 1)}"


def _id_before(offset: int) -> str:
    """Return the largest id that is smaller than that of `offset`, for which there may be no offset."""
    milliseconds, sequence = offset >> _SEQUENCE_BITS, offset & ((1 << _SEQUENCE_BITS) - 1)
    if sequence:
        return f"{milliseconds}-{sequence - 1}"
    return f"{milliseconds - 1}-{2**64 - 1}" if milliseconds else "0-0"


def _records(name: str, entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> Records:
    offsets = [offset_of(entry) for entry, _ in entries]
    headers = [_unpacked(fields) for _, fields in entries]
    return Records(
        partition=name,
        offsets=offsets,
        next_offset=offsets[-1] + 1,
        timestamps=[_timestamp(fields, offset) for (_, fields), offset in zip(entries, offsets, strict=True)],
        keys=[fields.get(b"k") for _, fields in entries],
        values=[fields.get(b"v", b"") for _, fields in entries],
        headers=headers if any(headers) else None,
    )


def _timestamp(fields: Mapping[bytes, bytes], offset: int) -> int:
    try:
        return int(fields[b"t"])
    except (KeyError, ValueError):
        return offset >> _SEQUENCE_BITS


def _packed(headers: Headers) -> bytes:
    parts = []
    for name, value in headers:
        encoded = name.encode()
        parts += [_SIZES.pack(len(encoded), len(value)), encoded, value]
    return b"".join(parts)


def _unpacked(fields: Mapping[bytes, bytes]) -> Headers:
    """Return the headers of an entry. Fields that are not ours are headers, too, so nothing of another program is lost."""
    found, packed, at = [], fields.get(b"h", b""), 0
    try:
        while at < len(packed):
            size, length = _SIZES.unpack_from(packed, at)
            begin = at + _SIZES.size
            at = begin + size + length
            found.append((packed[begin : begin + size].decode(), packed[begin + size : at]))
    except (struct.error, UnicodeDecodeError):
        found, at = [("h", packed)], len(packed)
    if at != len(packed):
        found = [("h", packed)]
    known = (b"v", b"k", b"t", b"h")
    return (*found, *((name.decode(errors="replace"), data) for name, data in fields.items() if name not in known))


def _parsed(url: str) -> tuple[str, str]:
    scheme, _, rest = url.partition("://")
    server, _, inside = rest.partition("/")
    database, _, topic = inside.partition("/")
    if not server or not database.isdecimal() or not topic or "?" in topic or "/" in topic:
        raise InvalidArgumentError(f"url: expected redis://host:6379/0/topic, got {url!r}")
    return f"{scheme}://{server}/{database}", topic
