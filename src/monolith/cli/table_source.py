"""The tables behind a path that a command was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from monolith.errors import InvalidArgumentError
from monolith.table import EmbeddingTable

__all__ = ["open_tables"]


def open_tables(path: Path, names: Sequence[str] | None = None) -> dict[str, EmbeddingTable]:
    """The table of a .table file, or those of a checkpoint; of these only `names`, if there are any."""
    if path.is_file():
        table = EmbeddingTable.load(path)
        return _only({table.name: table}, names, path)
    raise InvalidArgumentError(f"{path}: expected a .table file, a checkpoint or a model_dir; there is no such path")


def _only(tables: Mapping[str, EmbeddingTable], names: Sequence[str] | None, path: Path) -> dict[str, EmbeddingTable]:
    missing = [name for name in names or () if name not in tables]
    if missing:
        raise InvalidArgumentError(f"--table: {path} has no table {missing[0]!r}; it has {', '.join(sorted(tables))}")
    return {name: tables[name] for name in names or tables}
