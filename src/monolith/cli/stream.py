"""`monolith stream create`, `add-partitions`, `list`, `info`, `read`, `write` and `repartition`: streams by their URL."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, NamedTuple

import typer
from rich import filesize
from rich.console import Console
from rich.table import Table

from monolith.cli.options import Json
from monolith.cli.serve_replicas import live_status
from monolith.errors import ConfigError, InvalidArgumentError, StorageError
from monolith.streams import FolderStream, Records, Stream, StreamReader, open_stream

__all__ = ["stream"]

StreamUrl = Annotated[
    str,
    typer.Argument(help="A folder, kafka://HOST:PORT/TOPIC or redis://HOST:PORT/DATABASE/TOPIC.", metavar="STREAM"),
]
StreamSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A setting of the stream or its client, such as retention_bytes=1000000000. NAME.file and NAME.env name a file "
        "or an environment variable with the value. May be repeated.",
    ),
]

_POLL_RECORDS = 1000
_POLL_SECS = 0.5

stream = typer.Typer(name="stream", help="Make, look into, read and write streams of records.", no_args_is_help=True)


@stream.command()
def create(
    url: StreamUrl,
    partitions: Annotated[int, typer.Option(help="Number of partitions.", min=1)] = 1,
    settings: StreamSettings = None,
) -> None:
    """Make a stream. One that exists stays as it is, and must have as many partitions or more.

    The settings of a folder are kept with it: fsync, linger_ms, segment_bytes, retention_bytes, retention_secs and
    max_pending_bytes.
    """
    made = open_stream(url, settings=_parsed(settings), partitions=partitions)
    _console().print(f"{made.url}: {len(made.partitions())} partitions")


@stream.command("add-partitions")
def add_partitions(
    url: StreamUrl,
    more: Annotated[int, typer.Argument(help="How many to add.", metavar="MORE", min=1)],
    settings: StreamSettings = None,
) -> None:
    """Add partitions to a stream in a folder or on Redis.

    Records of a key may be in another partition from then on. Writers have the new ones when they start again.
    """
    found = open_stream(url, settings=_parsed(settings))
    add = getattr(found, "add_partitions", None)
    if add is None:
        raise InvalidArgumentError(f"{url}: partitions of a topic of Kafka are added with the tools of the broker")
    add(more)
    _console().print(f"{found.url}: {len(found.partitions())} partitions")


@stream.command("list")
def list_streams(
    folder: Annotated[Path, typer.Argument(help="Where to look for streams in folders.", metavar="FOLDER")] = Path(),
    as_json: Json = False,
) -> None:
    """List the streams in a folder and the folders in it."""
    if not folder.is_dir():
        raise InvalidArgumentError(f"{folder}: expected a folder; there is none")
    rows = []
    for path in sorted(folder.rglob("stream.json")):
        found = FolderStream(path.parent)
        bounds = found.bounds().values()
        records, size = sum(end - start for start, end in bounds), sum(found.sizes().values())
        rows.append({"stream": found.url, "partitions": len(bounds), "records": records, "bytes": size})
    if as_json:
        _write_line({"folder": str(folder), "streams": rows})
    else:
        _print_table(rows, title=None if rows else f"no streams in {folder}")


@stream.command()
def info(
    url: StreamUrl,
    run: Annotated[
        Path | None, typer.Option(help="Also print how far this run is behind, by its model_dir.", metavar="MODEL_DIR")
    ] = None,
    settings: StreamSettings = None,
    as_json: Json = False,
) -> None:
    """Print the partitions of a stream.

    For each partition: the offsets of its oldest and its next record, their times, bytes (of a folder), and with --run the next
    offset in the newest saved state of the run, and how many records come after that. A run that goes on has read further than it
    has saved: how far it is behind now is in the last line.
    """
    found = open_stream(url, settings=_parsed(settings))
    sizes = found.sizes() if isinstance(found, FolderStream) else {}
    positions = None if run is None else _positions_of(run)
    rows: list[dict[str, object]] = []
    for name, (start, end) in found.bounds().items():
        row: dict[str, object] = {"partition": name, "start": start, "end": end, "bytes": sizes.get(name)}
        row |= _times(found, name, start, end)
        if positions is not None:
            at = positions.get(name)
            row |= {"saved": at, "after_saved": None if at is None else max(0, end - at)}
        rows.append(row)
    live = None if run is None else live_status(run)
    if as_json:
        said = live and {
            name: live[name] for name in ("state", "lag_records", "lag_seconds", "problem") if name in live
        }
        _write_line({"stream": found.url, "partitions": rows, **({} if run is None else {"run": said})})
        return
    _print_table(rows, title=found.url)
    if live is not None and "problem" in live:
        _console().print(f"{run} does not answer: {live['problem']}")
    elif live is not None and live["lag_records"] is not None:
        _console().print(f"{run} is {live['state']}, and {live['lag_records']:,} records behind now")


@stream.command()
def read(
    url: StreamUrl,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            help="start, end, or a time: milliseconds since 1970, or such as 2026-01-31T12:00.",
            metavar="WHERE",
        ),
    ] = "start",
    partition: Annotated[
        list[str] | None, typer.Option(help="Read only this one, such as clicks/0. May be repeated.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="End after this many records.", min=1)] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more records at the end.")] = False,
    settings: StreamSettings = None,
) -> None:
    """Print the records of a stream as JSON lines.

    The value is an object or list if it is compact JSON, else text. If it is not UTF-8, it is in value_base64.
    """
    found = open_stream(url, settings=_parsed(settings))
    with found.reader() as reader:
        positions = _start_positions(found, start, partition)
        reader.assign(positions)
        ends = None if follow else _ends(found, positions)
        try:
            for line in _lines(reader, positions, ends, limit):
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


@stream.command()
def write(
    url: StreamUrl,
    file: Annotated[
        Path | None, typer.Argument(help="The lines to write, by default standard input.", metavar="FILE")
    ] = None,
    partition: Annotated[int | None, typer.Option(help="Number of the partition, by default of all in turn.")] = None,
    key: Annotated[
        str | None,
        typer.Option(
            help="Field of each line whose value is the key. Records of a key are in one partition.", metavar="FIELD"
        ),
    ] = None,
    records: Annotated[
        bool, typer.Option("--records", help="Lines are as `read` prints them: with value, key, timestamp and headers.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Write each line as it is, whatever it holds.")] = False,
    settings: StreamSettings = None,
) -> None:
    """Write lines of a file or of standard input as records.

    The records are stored when the command ends with 0. Each line is a JSON object, and empty ones are left out. At the first
    line that is none the command ends with 2, and says how many records before it were written.
    """
    if raw and (records or key is not None):
        raise InvalidArgumentError("--raw: expected it alone, --records and --key need lines that are JSON objects")
    found = open_stream(url, settings=_parsed(settings))
    count = 0
    with _opened(file) as lines, found.writer(None if partition is None else [partition]) as writer:
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text:
                continue
            try:
                if raw:
                    record = _Record(text, None, None, ())
                elif records:
                    record = _record(_object(text, number), number)
                else:
                    fields = _object(text, number)
                    record = _Record(text, None if key is None else _key(fields, key, number), None, ())
            except InvalidArgumentError as error:
                writer.flush()
                hint = "" if records or key is not None else "; --raw writes any lines"
                raise InvalidArgumentError(
                    f"{error}{hint}. {count:,} records, of the lines before it, were written: go on with line {number:,}"
                ) from None
            writer.append(record.value, key=record.key, timestamp=record.timestamp, headers=record.headers)
            count += 1
        writer.flush()
    _console(stderr=True).print(f"{found.url}: {count:,} records written")


@stream.command()
def repartition(
    source: Annotated[str, typer.Argument(help="The stream to copy, as in `read`.", metavar="SOURCE")],
    target: Annotated[str, typer.Argument(help="The stream to copy into. A folder is made.", metavar="TARGET")],
    key: Annotated[
        list[str], typer.Option(help="Field of the records that makes the key. May be repeated.", metavar="FIELD")
    ],
    state: Annotated[Path, typer.Option(help="Folder in which it remembers how far it has come.", metavar="FOLDER")],
    partitions: Annotated[
        int | None, typer.Option(help="Partitions of the target, by default as many as the source has.", min=1)
    ] = None,
    until_end: Annotated[
        bool, typer.Option("--until-end", help="End when all records that there are have been copied.")
    ] = False,
    source_settings: Annotated[
        list[str] | None, typer.Option("--set-source", help="A setting of the source.", metavar="NAME=VALUE")
    ] = None,
    target_settings: Annotated[
        list[str] | None, typer.Option("--set-target", help="A setting of the target.", metavar="NAME=VALUE")
    ] = None,
) -> None:
    """Copy a stream into one that is partitioned by another key.

    Two streams can be joined if records of one key have the same partition number in both. Every record is copied once, also when
    the process is killed and started again. It runs until SIGTERM or SIGINT.
    """
    from monolith.cli.join import stop_on_signals
    from monolith.data.join import Repartition

    read_from = open_stream(source, settings=_parsed(source_settings, "--set-source"))
    count = len(read_from.partitions()) if partitions is None else partitions
    write_to = open_stream(target, settings=_parsed(target_settings, "--set-target"), partitions=count)
    copying = Repartition(read_from, write_to, key=key, state=state)
    with closing(copying), stop_on_signals(copying.request_stop):
        copying.run(until_end=until_end)
    counts = copying.counts
    _console().print(
        f"{write_to.url}: {counts['copied']:,} records copied, {counts['without_key']:,} of them without {', '.join(key)}"
    )


def _opened(file: Path | None) -> AbstractContextManager[IO[bytes]]:
    if file is None:
        return nullcontext(sys.stdin.buffer)
    try:
        return file.open("rb")
    except OSError as error:
        raise StorageError(f"{file}: cannot be read: {error.strerror}") from error


def _parsed(settings: list[str] | None, option: str = "--set") -> dict[str, str] | None:
    given = {}
    for text in settings or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option}: expected NAME=VALUE, got {text!r}")
        given[name] = value
    return given or None


def _start_positions(found: Stream, start: str, partitions: list[str] | None) -> dict[str, int]:
    names = found.partitions()
    unknown = [name for name in partitions or () if name not in names]
    if unknown:
        raise InvalidArgumentError(f"--partition: expected some of {', '.join(names)}, got {unknown[0]!r}")
    if start in ("start", "end"):
        at = {name: both[start == "end"] for name, both in found.bounds().items()}
    else:
        at = found.first_offset_at(_milliseconds(start))
    return {name: at[name] for name in partitions or names}


def _ends(found: Stream, names: Iterable[str]) -> dict[str, int]:
    """Return the offset after the last record of each partition. What is between it and the end are marks of a broker."""
    last = {name: found.last(name) for name in names}
    return {name: 0 if records is None else records.next_offset for name, records in last.items()}


def _milliseconds(text: str) -> int:
    if text.isdecimal():
        return int(text)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgumentError(
            f"--from: expected start, end, milliseconds since 1970 or a time such as 2026-01-31T12:00, got {text!r}"
        ) from None
    return int(1000 * (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp())


def _lines(
    reader: StreamReader, positions: Mapping[str, int], ends: Mapping[str, int] | None, limit: int | None
) -> Iterator[dict[str, object]]:
    """Yield the records from `positions` to `ends`, or for ever."""
    left, at = limit, dict(positions)
    while ends is None or any(at[name] < end for name, end in ends.items()):
        for records in reader.poll(_POLL_RECORDS if left is None else min(left, _POLL_RECORDS), _POLL_SECS):
            at[records.partition] = records.next_offset
            for line in _described(records):
                if ends is not None and int(str(line["offset"])) >= ends[records.partition]:
                    break
                yield line
                left = None if left is None else left - 1
                if left == 0:
                    return


def _described(records: Records) -> Iterator[dict[str, object]]:
    headers = records.headers or [()] * len(records)
    for number, value in enumerate(records.values):
        line: dict[str, object] = {
            "partition": records.partition,
            "offset": records.offsets[number],
            "timestamp": records.timestamps[number],
        }
        key = records.keys[number]
        if key is not None:
            line |= _as_json("key", key, parse=False)
        if headers[number]:
            line["headers"] = [{"name": name, **_as_json("value", data, parse=False)} for name, data in headers[number]]
        yield {**line, **_as_json("value", value, parse=True)}


def _as_json(name: str, data: bytes, *, parse: bool) -> dict[str, object]:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}
    if parse and text[:1] in ("{", "["):
        try:
            # Only if `write --records` makes the same bytes of it: spaces, or a repeated name, would be lost.
            found = json.loads(text)
            if _compact(found) == text:
                return {name: found}
        except (ValueError, RecursionError):
            pass
    return {name: text}


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _object(text: bytes, number: int) -> dict[str, object]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(f"line {number}: expected a JSON object, got {_short(text)}: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidArgumentError(f"line {number}: expected a JSON object, got {_short(text)}")
    return fields


def _short(line: bytes) -> str:
    text = line.decode(errors="replace")
    return repr(text if len(text) <= 80 else f"{text[:80]}...")


def _key(fields: Mapping[str, object], key: str, number: int) -> bytes:
    if key not in fields:
        raise InvalidArgumentError(f"line {number}: has no field {key!r}, which --key names")
    value = fields[key]
    return (value if isinstance(value, str) else json.dumps(value)).encode()


class _Record(NamedTuple):
    value: bytes
    key: bytes | None
    timestamp: int | None
    headers: tuple[tuple[str, bytes], ...]


def _record(fields: Mapping[str, object], number: int) -> _Record:
    value, timestamp, headers = _data(fields, "value", number), fields.get("timestamp"), fields.get("headers", [])
    if value is None:
        raise InvalidArgumentError(f"line {number}: has no value or value_base64, which --records needs")
    if not (timestamp is None or isinstance(timestamp, int)) or not isinstance(headers, list):
        raise InvalidArgumentError(f"line {number}: expected an integer as timestamp and a list as headers")
    pairs = tuple((str(each["name"]), _data(each, "value", number) or b"") for each in headers)
    # -1 says that it has none.
    when = None if timestamp is None or timestamp < 0 else timestamp
    return _Record(value, _data(fields, "key", number), when, pairs)


def _data(fields: Mapping[str, object], name: str, number: int) -> bytes | None:
    encoded = fields.get(f"{name}_base64")
    if encoded is not None:
        try:
            return base64.b64decode(str(encoded), validate=True)
        except ValueError:
            raise InvalidArgumentError(f"line {number}: {name}_base64 is not base64") from None
    value = fields.get(name)
    if value is None:
        return None
    return (value if isinstance(value, str) else _compact(value)).encode()


def _times(found: Stream, name: str, start: int, end: int) -> dict[str, object]:
    """Return the timestamps of the oldest and the newest record of a partition."""
    if start == end:
        return {"oldest": None, "newest": None}
    with found.reader() as reader:
        reader.assign({name: start})
        first = reader.poll(1, 10 * _POLL_SECS)
    last = found.last(name)
    return {
        "oldest": first[0].timestamps[0] if first else None,
        "newest": None if last is None else last.timestamps[-1],
    }


def _positions_of(run: Path) -> dict[str, int]:
    """Return the next offset of each partition in the newest saved state of a run."""
    from monolith.state import ModelDir, find_restore_point

    point = find_restore_point(ModelDir(str(run)))
    if point is None:
        raise InvalidArgumentError(f"--run: {run} has no saved state")
    found = dict(_offsets_in(point.state()))
    if not found:
        raise InvalidArgumentError(f"--run: the saved state of {run} has no position in a stream")
    return found


def _offsets_in(state: object) -> Iterator[tuple[str, int]]:
    """Yield partitions and next offsets from a position of a source, wherever it is in the state."""
    if isinstance(state, Mapping):
        text = state.get("partitions")
        if isinstance(text, str):
            for name, place in json.loads(text or "{}").items():
                # With several examples in a record, the number of those already trained is next to the offset.
                if place != "start":
                    yield name, int(place[0] if isinstance(place, list) else place)
        for value in state.values():
            yield from _offsets_in(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _offsets_in(value)


def _console(*, stderr: bool = False) -> Console:
    return Console(highlight=False, soft_wrap=True, stderr=stderr)


def _write_line(answer: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")


def _print_table(rows: Iterable[Mapping[str, object]], *, title: str | None) -> None:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, row in enumerate(rows):
        for name in row if number == 0 else ():
            words = name in ("stream", "partition", "oldest", "newest")
            table.add_column(name, justify="left" if words else "right", no_wrap=True)
        table.add_row(*(_for_people(name, value) for name, value in row.items()))
    console = _console()
    # Nothing is cut: offsets of Redis have 19 digits.
    given, console.width = console.width, 1000
    console.width = max(given, console.measure(table).maximum)
    console.print(table)


def _for_people(name: str, value: object) -> str:
    if value is None:
        return "-"
    if name == "bytes":
        return filesize.decimal(int(str(value)))
    if name in ("oldest", "newest"):
        milliseconds = int(str(value))
        return (
            "-" if milliseconds < 0 else datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
        )
    return f"{value:,}" if isinstance(value, int) else str(value)
