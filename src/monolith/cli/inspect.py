"""`monolith inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from monolith.cli.options import Json
from monolith.cli.output import show
from monolith.errors import InvalidArgumentError
from monolith.serve import load
from monolith.table import EmbeddingTable
from monolith.train.run_folder import RunFolder

__all__ = ["inspect"]


def inspect(
    path: Annotated[Path, typer.Argument(help="A .table file, an export, or the model_dir of a run.")],
    id_: Annotated[
        int | None, typer.Option("--id", help="Also print this id's row of every table that has it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what is in a table, an export or a saved run: rows, bytes, slots, one id."""
    answer, tables = _open(path)
    answer["tables"] = {name: _describe(table, id_) for name, table in tables.items()}
    show(answer, as_json=as_json, title=str(path))


def _open(path: Path) -> tuple[dict[str, object], dict[str, EmbeddingTable]]:
    if path.is_file():
        table = EmbeddingTable.load(path)
        return {"kind": "table", "file_bytes": path.stat().st_size}, {table.name: table}
    if RunFolder(path).exists():
        files = sorted(RunFolder(path).latest().rglob("*.table"))
        by_store: dict[str, dict[str, EmbeddingTable]] = {}
        for file in files:
            table = EmbeddingTable.load(file)
            by_store.setdefault(file.parent.name, {})[table.name] = table
        return {"kind": "run", "saved": RunFolder(path).latest().name}, _named(by_store)
    if not path.is_dir():
        raise InvalidArgumentError(f"{path}: expected a .table file, an export or a model_dir; there is no such path")
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
        entries = table.lookup_entry([id_])
        slots = {name: slot[0].tolist() for name, slot in entries.slots.items()}
        described["id"] = {"values": entries.values[0].tolist(), "time": int(entries.times[0]), **slots}
    return described


def _rows_by_slot(table: EmbeddingTable) -> dict[str, int]:
    """Rows for each value of the bits of an id that hold the slot of a fid v2."""
    counts = np.zeros(1 << 15, dtype=np.int64)
    for entries in table.iter_batches():
        counts += np.bincount((entries.ids.numpy() >> 48) & 0x7FFF, minlength=len(counts))
    return {str(slot): int(counts[slot]) for slot in np.flatnonzero(counts)}
