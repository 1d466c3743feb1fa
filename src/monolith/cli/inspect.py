"""`monolith inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from monolith.checkpoint.inspect import inspect_checkpoint, read_row
from monolith.checkpoint.manifest import MANIFEST
from monolith.checkpoint.restore_points import find_restore_point, restore_points
from monolith.cli.options import Json
from monolith.cli.output import show
from monolith.errors import InvalidArgumentError
from monolith.serve import load
from monolith.table import EmbeddingTable, Entries

__all__ = ["inspect"]


def inspect(
    path: Annotated[Path, typer.Argument(help="A .table file, an export, a checkpoint, or the model_dir of a run.")],
    id_: Annotated[
        int | None, typer.Option("--id", help="Also print this id's row of every table that has it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what is in a table, an export, a checkpoint or the newest one of a run: rows, bytes, slots, one id."""
    checkpoint = _checkpoint(path)
    if checkpoint is not None:
        show(_described_checkpoint(checkpoint, id_), as_json=as_json, title=checkpoint)
        return
    answer, tables = _open(path)
    answer["tables"] = {name: _describe(table, id_) for name, table in tables.items()}
    show(answer, as_json=as_json, title=str(path))


def _checkpoint(path: Path) -> str | None:
    """The checkpoint that is meant, if any: of a run, the newest."""
    manifest = path / MANIFEST
    if manifest.is_file():
        return str(path) if b'"monolith-checkpoint"' in manifest.read_bytes()[:200] else None
    if not path.is_dir() or not any(point.checkpoint for point in restore_points(path)):
        return None
    newest = find_restore_point(path)
    checkpoints = [point for point in restore_points(path) if point.checkpoint is not None]
    return newest.checkpoint or checkpoints[-1].checkpoint


def _described_checkpoint(path: str, id_: int | None) -> dict[str, object]:
    found = inspect_checkpoint(path)
    answer: dict[str, object] = {
        "kind": "checkpoint",
        "path": found.path,
        "step": found.step,
        "time": found.time,
        "sequence": found.sequence,
        "problem": found.problem,
        "bytes": found.bytes,
        "snapshot": found.snapshot,
        "segments": found.segments,
        "segment_bytes": found.segment_bytes,
    }
    tables: dict[str, dict[str, object]] = {}
    for name, table in found.tables.items():
        tables[name] = {"rows": table.rows, "shards": table.shards, "bytes": table.bytes, "dim": table.config.dim}
        entries = None if id_ is None else read_row(path, name, id_)
        if entries is not None:
            tables[name]["id"] = _row(entries)
    return {**answer, "tables": tables}


def _row(entries: Entries) -> dict[str, object]:
    slots = {name: slot[0].tolist() for name, slot in entries.slots.items()}
    return {"values": entries.values[0].tolist(), "time": int(entries.times[0]), **slots}


def _open(path: Path) -> tuple[dict[str, object], dict[str, EmbeddingTable]]:
    if path.is_file():
        table = EmbeddingTable.load(path)
        return {"kind": "table", "file_bytes": path.stat().st_size}, {table.name: table}
    if not path.is_dir():
        raise InvalidArgumentError(
            f"{path}: expected a .table file, an export, a checkpoint or a model_dir; there is no such path"
        )
    predictor = load(path)
    signature = predictor.signature
    tables = _named({place: store.tables for place, store in predictor.stores.items()})
    return {
        "kind": "export",
        "version": signature.version,
        "step": signature.step,
        "columns": list(signature.columns),
        "outputs": [output.name for output in signature.outputs],
    }, tables


def _named(stores: Mapping[str, Mapping[str, EmbeddingTable]]) -> dict[str, EmbeddingTable]:
    """Tables by name, and, where there are several stores, by store and name: each store has its own names."""
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
        "newest_event_time": stats.max_event_time,
        "rows_by_slot": _rows_by_slot(table),
    }
    if id_ is not None and id_ in table:
        described["id"] = _row(table.lookup_entry([id_]))
    return described


def _rows_by_slot(table: EmbeddingTable) -> dict[str, int]:
    """Rows for each value of the bits of an id that hold the slot of a fid v2."""
    counts = np.zeros(1 << 15, dtype=np.int64)
    for entries in table.iter_batches():
        counts += np.bincount((entries.ids.numpy() >> 48) & 0x7FFF, minlength=len(counts))
    return {str(slot): int(counts[slot]) for slot in np.flatnonzero(counts)}
