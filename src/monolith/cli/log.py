"""`monolith log list`, `follow` and `history`: the change log of a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich import filesize
from rich.console import Console
from rich.table import Table

from monolith.cli.options import Json
from monolith.cli.output import plain
from monolith.errors import InvalidArgumentError
from monolith.log import LogReader, RowChange, SegmentInfo, history
from monolith.state.model_dir import SERVERS

__all__ = ["log"]

LogFolder = Annotated[Path, typer.Argument(help="The model_dir of a run, or the folder of its log.", metavar="FOLDER")]
To = Annotated[int | None, typer.Option(help="Sequence number to stop at, by default the newest.", min=1)]

log = typer.Typer(name="log", help="Read the change log of a run.", no_args_is_help=True)


@log.command("list")
def list_segments(folder: LogFolder, as_json: Json = False) -> None:
    """List the segments of the log.

    For each segment: when it was written, which one it continues, and how much changed.
    """
    reader = _open(folder)
    segments = reader.segments()
    line = _line(segments)
    rows = [{**_described(info), "abandoned": info.sequence not in line} for info in segments]
    if as_json:
        _write_line({"folder": str(reader.folder), "segments": rows})
    else:
        _print_table([_for_people(row) for row in rows], title=str(reader.folder))


@log.command()
def follow(
    folder: LogFolder,
    since: Annotated[int | None, typer.Option(help="Start after this sequence number, by default now.", min=0)] = None,
    poll: Annotated[float, typer.Option(help="Seconds between two checks for new segments.", min=0.01)] = 0.5,
    count: Annotated[int | None, typer.Option(help="End after this many segments.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Print new segments as they are committed, until interrupted."""
    reader = _open(folder)
    left = count
    try:
        for segment in reader.follow(reader.newest if since is None else since, poll=poll):
            described = _described(segment.info)
            if as_json:
                _write_line(described)
            else:
                _console().print("  ".join(f"{name} {text}" for name, text in _for_people(described).items() if text))
            left = None if left is None else left - 1
            if left == 0:
                return
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


# An id may be negative, and "-7" looks like an option.
@log.command("history", context_settings={"ignore_unknown_options": True})
def history_(
    folder: LogFolder,
    id_: Annotated[int, typer.Argument(help="The id of the row.", metavar="ID")],
    table: Annotated[str | None, typer.Option(help="Only of this table.")] = None,
    to: To = None,
    as_json: Json = False,
) -> None:
    """Print the changes of the row of an id.

    Rows on parameter servers or ranks are in the log of each of them: give MODEL_DIR/ps/INDEX as FOLDER.
    """
    if not -(2**63) <= id_ < 2**63:
        raise InvalidArgumentError(f"ID: expected an int64, got {id_}")
    reader = _open(folder)
    changes = list(history(reader, id_, table=table, to=to))
    if not changes:
        _refuse_elsewhere(folder, reader, table)
    if as_json:
        _write_line({"folder": str(reader.folder), "id": id_, "changes": [_change(change) for change in changes]})
    else:
        rows = [_change_for_people(change) for change in changes]
        title = f"id {id_}: {len(rows):,} changes in {reader.folder}"
        if rows:
            _print_table(rows, title=title)
        else:
            _console().print(f"{title}. `monolith inspect --id` shows whether it has a row")


def _open(folder: Path) -> LogReader:
    inside = folder / "log"
    reader = LogReader(inside if inside.is_dir() else folder)
    if not reader.folder.is_dir():
        raise InvalidArgumentError(
            f"{folder}: expected a model_dir or the folder of a change log; there is no such folder"
        )
    return reader


def _refuse_elsewhere(folder: Path, reader: LogReader, table: str | None) -> None:
    """Raise if the log cannot have changes of the row: they are in other logs, or the table does not exist."""
    servers = sorted(str(log.parent) for log in folder.glob(f"{SERVERS}/*/log") if log.is_dir())
    if servers:
        raise InvalidArgumentError(
            f"{folder}: has no change of this row; those on parameter servers or ranks are in {', '.join(servers)}"
        )
    known = sorted({known.name for info in reader.segments() for known in info.tables})
    if table is not None and table not in known:
        raise InvalidArgumentError(
            f"--table: {reader.folder} has no {table!r}; it has {', '.join(known) or 'no tables'}"
        )


def _line(segments: Iterable[SegmentInfo]) -> set[int]:
    """Return the sequence numbers of the newest segment and its ancestors."""
    parents = {info.sequence: info.parent for info in segments}
    line, sequence = set(), max(parents, default=0)
    while sequence in parents:
        line.add(sequence)
        sequence = parents[sequence]
    return line


def _described(info: SegmentInfo) -> dict[str, object]:
    return {
        "sequence": info.sequence,
        "parent": info.parent,
        "step": info.step,
        "time": info.time,
        "event_time": info.event_time,
        "rows": info.rows,
        "erased": info.erased,
        "bytes": info.size,
        "kind": info.kind,
        "dense": info.has_dense,
        "source": info.has_source,
        "parts": [entry.name for entry in info.parts],
    }


def _change(change: RowChange) -> dict[str, object]:
    return {
        "sequence": change.sequence,
        "step": change.step,
        "time": change.time,
        "table": change.table,
        "erased": change.erased,
        "event_time": change.event_time,
        "norm": change.norm,
        "values": change.values,
        "slots": change.slots,
    }


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


def _write_line(answer: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(plain(answer), allow_nan=False) + "\n")
    sys.stdout.flush()


def _print_table(rows: list[dict[str, str]], *, title: str) -> None:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in rows[0] if rows else ():
        words = name in ("time", "table", "values", "notes")
        table.add_column(name, justify="left" if words else "right", no_wrap=name != "values")
    for row in rows:
        table.add_row(*row.values())
    _console().print(table)


def _for_people(described: Mapping[str, object]) -> dict[str, str]:
    """Return one line of the list, with a note for each exception."""
    numbers = {name: f"{described[name]:,}" for name in ("sequence", "parent", "step", "rows", "erased")}
    notes = [name for name in ("dense", "source", "abandoned") if described.get(name)]
    if described["kind"] == "values":
        notes.append("values only")
    if isinstance(parts := described["parts"], list) and parts:
        notes.append(f"{len(parts)} ranks")
    size = filesize.decimal(int(str(described["bytes"])))
    return {**numbers, "size": size, "time": _time(described["time"]), "notes": ", ".join(notes)}


def _change_for_people(change: RowChange) -> dict[str, str]:
    return {
        "sequence": f"{change.sequence:,}",
        "step": f"{change.step:,}",
        "time": _time(change.time),
        "table": change.table,
        "norm": "" if change.norm is None else f"{change.norm:.6g}",
        "values": "erased" if change.values is None else " ".join(f"{value:.4g}" for value in change.values),
    }


def _time(seconds: object) -> str:
    return datetime.fromtimestamp(float(str(seconds)), UTC).strftime("%Y-%m-%d %H:%M:%S")
