"""The parts of a checkpoint that parameter servers have written: what is in them, and those that belong to nothing any more."""

from __future__ import annotations

import contextlib

from monolith.errors import CorruptFileError, StorageError
from monolith.state.checkpoint_folder import part_paths, remove_checkpoint
from monolith.state.manifest import MANIFEST, Manifest, read_manifest
from monolith.state.paths import is_absolute, parent_folder
from monolith.state.save_names import BASENAME
from monolith.state.storage import StrPath, open_folder

__all__ = ["remove_orphans", "rows_of_parts"]


def rows_of_parts(manifest: Manifest, path: StrPath) -> dict[str, int]:
    """How many rows the tables of the parts have together."""
    rows: dict[str, int] = {}
    for part in part_paths(manifest, path):
        for name, table in read_manifest(part).tables.items():
            rows[name] = rows.get(name, 0) + table.rows
    return rows


def remove_orphans(manifest: Manifest, path: StrPath) -> None:
    """Remove checkpoints of servers beside the parts of `path` whose own checkpoint is not there: its writer, or remover, died.

    Only while no other one is being written. What lies outside of the model_dir is left alone.
    """
    top = open_folder(parent_folder(path))
    inside = [entry.name for entry in manifest.parts if not is_absolute(entry.name)]
    for folder in {parent_folder(parent_folder(name)) for name in inside}:
        for name in top.inside(folder).names():
            if name.startswith(f"{BASENAME}-") and top.inside(name).size(MANIFEST) is None:
                # Left behind it only takes room.
                with contextlib.suppress(StorageError, CorruptFileError):
                    remove_checkpoint(f"{top}/{folder}/{name}")
