"""Whole stores beside a checkpoint, in `<checkpoint>.assets/`: written before it is complete, removed after it is gone."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

from monolith.errors import CheckpointMismatchError, CorruptFileError, InvalidArgumentError
from monolith.state.checkpoint_folder import remove_checkpoint
from monolith.state.manifest import MANIFEST
from monolith.state.paths import base_name, parent_folder
from monolith.state.roots import reading_below
from monolith.state.storage import Folder, StrPath, is_remote, open_folder, safe_name
from monolith.table.store import Store

__all__ = ["prepare_stores", "remove_assets", "save_stores"]


def save_stores(path: StrPath, stores: Mapping[str, Store]) -> dict[str, str]:
    """Save each store into a folder of its own; their names inside of the assets of the checkpoint `path`."""
    if not stores:
        return {}
    if is_remote(path):
        raise InvalidArgumentError(f"save_path: stores are saved to a local disk, got {str(path)!r}")
    # New names each time: what a checkpoint of this name has now stays whole until it is replaced.
    generation = secrets.token_hex(4)
    names = {name: f"{generation}/{quote(name, safe=' ')}" for name in stores}
    with reading_below(parent_folder(path)):
        for name, store in stores.items():
            store.save(_folder(path, names[name]))
    return names


def prepare_stores(
    path: StrPath, saved: Mapping[str, object], stores: Mapping[str, Store], *, only_fresh: bool
) -> list[Callable[[], None]]:
    """Read and check what `stores` get; calling the answers puts it in place.

    With `only_fresh`, the shards or servers of a store that have their state keep it.
    """
    prepared: list[Callable[[], None]] = []
    for name, store in stores.items():
        if name not in saved:
            known = ", ".join(map(repr, saved)) or "none"
            raise CheckpointMismatchError(f"{path}: store {name!r} was not found in the checkpoint, which has {known}")
        folder = _folder(path, str(saved[name]))
        if not folder.is_dir():
            raise CorruptFileError(f"{folder}: is missing, but belongs to the checkpoint {str(path)!r}")
        # A store in this process is one shard: whether it is fresh was decided before.
        prepared.append(store.prepare_restore(folder, only_fresh=only_fresh and store.remote))
    return prepared


def remove_assets(path: StrPath, *, but: Mapping[str, str] | None = None) -> None:
    """Remove what lies beside the checkpoint `path`, except what `save_stores` named last."""
    folder = open_folder(parent_folder(path))
    assets = f"{base_name(path)}.assets"
    keep = {name.split("/")[0] for name in (but or {}).values()}
    inside = folder.inside(assets)
    for generation in inside.names():
        if generation not in keep:
            _remove_checkpoints(inside.inside(generation))
            inside.remove(generation)
    if not but:
        folder.remove(assets)


def _remove_checkpoints(generation: Folder) -> None:
    """Stores on servers are checkpoints, which have parts elsewhere in the model_dir, two folders further up."""
    with reading_below(parent_folder(parent_folder(str(generation)))):
        for name in generation.names():
            if generation.inside(name).size(MANIFEST) is not None:
                remove_checkpoint(f"{generation}/{name}")


def _folder(path: StrPath, name: str) -> Path:
    return Path(f"{path}.assets") / safe_name(name, path)
