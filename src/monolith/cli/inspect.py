"""`monolith inspect`: the contents of tables, exports, checkpoints and runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from monolith.cli.options import Json
from monolith.cli.output import show
from monolith.errors import InvalidArgumentError, MonolithError
from monolith.features import hash_strings
from monolith.serve.predictor import load
from monolith.state import ModelDir, RestorePoint, find_restore_point, inspect_checkpoint, read_row, restore_points
from monolith.state.inspect import CheckpointInspection
from monolith.state.manifest import MANIFEST
from monolith.state.storage import open_folder
from monolith.table import EmbeddingTable, Entries, TableConfig
from monolith.urls import is_remote

__all__ = ["inspect"]

NO_ROW = "no row: it reads its initial value"
"""Printed for an id that a table has never trained, or that has expired."""
_SHOWN_SLOTS = 10


def inspect(
    path: Annotated[
        str,
        typer.Argument(
            help="A .table file, an export, a checkpoint, or the model_dir of a run: a path or URL.", metavar="PATH"
        ),
    ],
    id_: Annotated[int | None, typer.Option("--id", help="Also print the row of this id in each table.")] = None,
    text: Annotated[
        str | None,
        typer.Option(help="Also print the id of this text, as HashText makes it, and its row in each table."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the contents of a table, export, checkpoint or run.

    These are rows, bytes and slots of its tables, and with --id or --text the row of one id. A feature with a slot has its own
    ids, see `to_fids`: give those by --id.
    """
    if text is None:
        show(_answer(path, id_), as_json=as_json, title=path)
        return
    if id_ is not None:
        raise InvalidArgumentError("--id, --text: expected one of them, got both")
    hashed = int(hash_strings([text])[0])
    show({"text": text, "text_id": hashed, **_answer(path, hashed)}, as_json=as_json, title=path)


def _answer(path: str, id_: int | None) -> dict[str, object]:
    if not is_remote(path) and Path(path).is_file():
        table = EmbeddingTable.load(path)
        size = Path(path).stat().st_size
        return {"kind": "table", "file_bytes": size, "tables": {table.name: _describe(table, id_)}}
    if not is_remote(path) and not Path(path).is_dir():
        raise InvalidArgumentError(
            f"{path}: expected a .table file, an export, a checkpoint or a model_dir; there is no such path"
        )
    if _is_checkpoint(path):
        return {"kind": "checkpoint", **_checkpoint(path, id_)}
    home = ModelDir(path)
    points = restore_points(home)
    return _run(home, points, id_) if points else _export(path, id_)


def _is_checkpoint(path: str) -> bool:
    folder = open_folder(path)
    return folder.size(MANIFEST) is not None and b'"format":"monolith-checkpoint"' in folder.read(MANIFEST)


def _run(home: ModelDir, points: list[RestorePoint], id_: int | None) -> dict[str, object]:
    checkpoints = [point for point in points if point.checkpoint is not None]
    answer: dict[str, object] = {
        "kind": "run",
        "step": points[-1].step,
        "problem": _problem(home),
        "restore_points": len(points),
        "checkpoints": [point.step for point in checkpoints],
        "log_sequence": points[-1].sequence,
    }
    if checkpoints:
        newest = str(checkpoints[-1].checkpoint)
        answer |= {"newest_checkpoint": newest, "tables": _checkpoint(newest, id_)["tables"]}
    return answer


def _problem(home: ModelDir) -> str | None:
    """Return why a run would not resume from its newest state, or None."""
    try:
        find_restore_point(home)
    except MonolithError as error:
        return str(error)
    return None


def _checkpoint(path: str, id_: int | None) -> dict[str, object]:
    found = inspect_checkpoint(path)
    return {
        "step": found.step,
        "time": found.time,
        "newest_event_time": found.event_time,
        "problem": found.problem,
        "bytes": found.bytes,
        "log_sequence": found.sequence,
        "snapshot": found.snapshot,
        "snapshot_bytes": found.snapshot_bytes,
        "segments": found.segments,
        "segment_bytes": found.segment_bytes,
        "parts": [{"path": part.path, "step": part.step, "log_sequence": part.sequence} for part in found.parts],
        "config": found.config,
        "tables": {name: _saved_table(path, found, name, id_) for name in found.tables},
    }


def _saved_table(path: str, found: CheckpointInspection, name: str, id_: int | None) -> dict[str, object]:
    table = found.tables[name]
    described: dict[str, object] = {
        "rows": table.rows,
        "bytes": table.bytes,
        "row_bytes": table.row_bytes,
        "dim": table.config.dim,
        "segments": _segments(table.config),
        "shards": table.shards,
        "newest_event_time": table.newest_event_time,
    }
    if id_ is not None and found.problem is None:
        row = read_row(path, name, id_)
        described["id"] = NO_ROW if row is None else _row(row)
    return described


def _export(path: str, id_: int | None) -> dict[str, object]:
    predictor = load(path)
    signature = predictor.signature
    tables = _named({place: store.tables for place, store in predictor.stores.items()})
    return {
        "kind": "export",
        "version": signature.version,
        "step": signature.step,
        "columns": list(signature.columns),
        "outputs": [output.name for output in signature.outputs],
        "tables": {name: _describe(table, id_) for name, table in tables.items()},
    }


def _named(stores: Mapping[str, Mapping[str, EmbeddingTable]]) -> dict[str, EmbeddingTable]:
    """Return tables by name, with the name of the store in front where there are several stores."""
    if len(stores) == 1:
        return dict(next(iter(stores.values())))
    return {f"{place}/{name}": table for place, tables in stores.items() for name, table in tables.items()}


def _describe(table: EmbeddingTable, id_: int | None) -> dict[str, object]:
    stats = table.stats()
    described: dict[str, object] = {
        "rows": stats.rows,
        "bytes": stats.bytes,
        "row_bytes": stats.row_bytes,
        "dim": table.dim,
        "segments": _segments(table.config),
        "newest_event_time": stats.max_event_time,
        **_rows_by_slot(table),
    }
    if id_ is not None:
        described["id"] = _row(table.lookup_entry([id_])) if id_ in table else NO_ROW
    return described


def _segments(config: TableConfig) -> list[str]:
    """Return the segments of a row, such as ['1 ftrl', '16 adagrad'] for an embedding with a bias."""
    return [f"{segment.dim} {segment.optimizer.kind}" for segment in config.segments]


def _row(entries: Entries) -> dict[str, object]:
    slots = {name: slot[0].tolist() for name, slot in entries.slots.items()}
    return {"values": entries.values[0].tolist(), "time": int(entries.times[0]), **slots}


def _rows_by_slot(table: EmbeddingTable) -> dict[str, object]:
    """Count the rows by the bits of an id that hold the slot of a fid v2.

    Hashed ids have any bits there, so only the slots with the most rows are shown, and how many others there are.
    """
    counts = np.zeros(1 << 15, dtype=np.int64)
    for entries in table.iter_batches():
        counts += np.bincount((entries.ids.numpy() >> 48) & 0x7FFF, minlength=len(counts))
    largest = np.argsort(-counts, kind="stable")[:_SHOWN_SLOTS]
    shown = {str(slot): int(counts[slot]) for slot in np.sort(largest) if counts[slot]}
    others = int(np.count_nonzero(counts)) - len(shown)
    return {"rows_by_slot": shown, **({"other_slots": others} if others else {})}
