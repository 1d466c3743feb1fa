"""The tables behind a path that a command was given."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from monolith.errors import InvalidArgumentError
from monolith.state import find_restore_point, is_complete
from monolith.state.storage import is_remote
from monolith.state.tables import open_source
from monolith.table import NUM_BUCKETS, EmbeddingTable

__all__ = ["open_tables"]


def open_tables(path: str, names: Sequence[str] | None = None) -> dict[str, EmbeddingTable]:
    """The table of a .table file, or those of a checkpoint, or of the newest restore point of a model_dir.

    With `names` only these are read.
    """
    if not is_remote(path):
        if Path(path).is_file():
            table = EmbeddingTable.load(path)
            return dict.fromkeys(_chosen([table.name], names, path), table)
        if not Path(path).is_dir():
            raise InvalidArgumentError(
                f"{path}: expected a .table file, a checkpoint or a model_dir; there is no such path"
            )
    saved = open_source(path if is_complete(path) else find_restore_point(path))
    chosen = _chosen(saved.tables, names, path)
    tables = {name: EmbeddingTable(saved.tables[name].config) for name in chosen}
    saved.fill(tables, range(NUM_BUCKETS))
    return tables


def _chosen(known: Collection[str], names: Sequence[str] | None, path: str) -> Collection[str]:
    missing = [name for name in names or () if name not in known]
    if missing:
        raise InvalidArgumentError(f"--table: {path} has no table {missing[0]!r}; it has {', '.join(sorted(known))}")
    return names or known
