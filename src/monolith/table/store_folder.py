"""A store in a folder: one file per table, one per admission filter, and a list of them; a sharded store as one such folder
per shard."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import quote

from monolith import _core
from monolith.config import Config
from monolith.durable import sync_to_disk, write_durably
from monolith.errors import ConfigError, CorruptFileError, StorageError
from monolith.table.admission import AdmissionFilter
from monolith.table.buckets import NUM_BUCKETS
from monolith.table.config import TableConfig
from monolith.table.embedding_table import EmbeddingTable
from monolith.table.entries import TableState
from monolith.table.table_file import read_rows_into
from monolith.urls import local_path

__all__ = ["ShardIndex", "StoreIndex", "read_store", "write_shards", "write_store"]

INDEX = "store.json"
SHARDS = "shards.json"


class StoreIndex(Config):
    """What a store's folder holds."""

    version: int = 1
    tables: tuple[str, ...]
    """Names of the tables, each in `<name>.table`."""
    admission: tuple[str, ...]
    """Names of those with an admission filter, in `<name>.admission`."""


class ShardIndex(Config):
    """What the folder of a sharded store holds: shard n in `shard-<n>`."""

    version: int = 1
    buckets: tuple[tuple[int, int], ...]
    """The first bucket of each shard, and the one behind its last."""


class SavesItself(Protocol):
    """What `write_shards` asks of a shard."""

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write everything into a new folder."""


Index = TypeVar("Index", StoreIndex, ShardIndex)


@dataclass(frozen=True)
class _Part:
    """A folder with one file per table, whose ids are of these buckets."""

    folder: Path
    buckets: range


def write_store(tables: Mapping[str, EmbeddingTable], folder: str | os.PathLike[str]) -> None:
    """Write `tables` into `folder`, which must be new or empty and appears complete or not at all."""
    _write_folder(folder, lambda temporary: _write_files(tables, temporary))


def write_shards(shards: Sequence[SavesItself], ranges: Sequence[range], folder: str | os.PathLike[str]) -> None:
    """Let `shards` write themselves into `folder`, which must be new or empty and appears complete or not at all."""

    def write(temporary: Path) -> None:
        for number, shard in enumerate(shards):
            shard.save(temporary / f"shard-{number:05d}")
        _write_index(temporary, SHARDS, ShardIndex(buckets=tuple((owned.start, owned.stop) for owned in ranges)))

    _write_folder(folder, write)


def _write_folder(folder: str | os.PathLike[str], write: Callable[[Path], None]) -> None:
    target = Path(local_path(folder, "folder"))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        try:
            write(temporary)
            temporary.replace(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        sync_to_disk(target.parent)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(
            f"{target}: cannot write a store, expected a new or empty folder: {error.strerror}"
        ) from error


def read_store(
    tables: Mapping[str, EmbeddingTable], folder: str | os.PathLike[str], buckets: range = range(NUM_BUCKETS)
) -> dict[str, EmbeddingTable]:
    """New tables with the configurations of `tables` and the rows of `folder` that are in `buckets`."""
    parts = [
        part for part in _parts(Path(folder)) if part.buckets.start < buckets.stop and buckets.start < part.buckets.stop
    ]
    indexes = [_read_index(part.folder, INDEX, StoreIndex) for part in parts]
    for part, index in zip(parts, indexes, strict=True):
        missing = [name for name in tables if name not in index.tables]
        if missing:
            known = ", ".join(map(repr, index.tables)) or "none"
            raise CorruptFileError(f"{part.folder}: has no table {', '.join(map(repr, missing))}; it has {known}")
    return {name: _read_table(table, list(zip(parts, indexes, strict=True)), buckets) for name, table in tables.items()}


def _parts(folder: Path) -> list[_Part]:
    if not (folder / SHARDS).is_file():
        return [_Part(folder, range(NUM_BUCKETS))]
    index = _read_index(folder, SHARDS, ShardIndex)
    parts = []
    for number, (first, end) in enumerate(index.buckets):
        # A shard may be sharded itself; what it owns of the whole is what its parts own of it.
        for part in _parts(folder / f"shard-{number:05d}"):
            parts.append(_Part(part.folder, range(max(first, part.buckets.start), min(end, part.buckets.stop))))
    return parts


def _write_files(tables: Mapping[str, EmbeddingTable], folder: Path) -> None:
    for name, table in tables.items():
        if table.admission is not None:
            table.admission.save(folder / _file(name, "admission"))
        table.save(folder / _file(name, "table"))
    filtered = tuple(name for name, table in tables.items() if table.admission is not None)
    _write_index(folder, INDEX, StoreIndex(tables=tuple(tables), admission=filtered))


def _write_index(folder: Path, name: str, index: Config) -> None:
    write_durably(folder / name, index.model_dump_json().encode())


def _read_index(folder: Path, name: str, kind: type[Index]) -> Index:
    path = folder / name
    try:
        text = path.read_text()
    except OSError as error:
        raise StorageError(f"{path}: cannot read the list of tables: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{path}: is not text: {error}") from None
    try:
        index = kind.from_json(text)
    except ConfigError as error:
        raise CorruptFileError(f"{path}: {error}") from None
    if index.version != 1:
        raise CorruptFileError(
            f"{path}: version {index.version}, but this release reads version 1; upgrade monolith-torch"
        )
    return index


def _read_table(table: EmbeddingTable, parts: Sequence[tuple[_Part, StoreIndex]], buckets: range) -> EmbeddingTable:
    fresh = EmbeddingTable(table.config, admission=_read_filter(table, parts, buckets))
    states = []
    for part, _ in parts:
        path = part.folder / _file(table.name, "table")
        file = _core.TableFile(str(path))
        _check_seed(table.config, file, path)
        read_rows_into(fresh, path, buckets)
        max_event_time, updates, scales = file.state
        states.append(TableState(max_event_time=max_event_time, updates=updates, hashnet_scales=tuple(scales)))
    fresh.set_state(_newest(states))
    return fresh


def _newest(states: Sequence[TableState]) -> TableState:
    """What the shards of a table know together."""
    newest = max(states, key=lambda state: state.updates)
    return replace(newest, max_event_time=max(state.max_event_time for state in states))


def _read_filter(
    table: EmbeddingTable, parts: Sequence[tuple[_Part, StoreIndex]], buckets: range
) -> AdmissionFilter | None:
    if table.admission is None:
        return None
    admission = AdmissionFilter(table.admission.config)
    for part, index in parts:
        # Counts of several shards cannot be put together; those of one that had all the ids hold. A threshold that is newer
        # than the save starts counting now.
        if table.name in index.admission and part.buckets.start <= buckets.start and buckets.stop <= part.buckets.stop:
            admission.load(part.folder / _file(table.name, "admission"))
    return admission


def _check_seed(config: TableConfig, file: _core.TableFile, path: Path) -> None:
    try:
        saved = TableConfig.from_json(file.metadata.decode())
    except (ConfigError, UnicodeDecodeError) as error:
        raise CorruptFileError(f"{path}: its configuration cannot be read: {error}") from None
    if (saved.name, saved.seed) != (config.name, config.seed):
        raise CorruptFileError(
            f"{path}: holds table {saved.name!r} with seed {saved.seed}, expected {config.name!r} with seed {config.seed}; "
            "unseen ids would read other initial values"
        )


def _file(table: str, ending: str) -> str:
    return f"{quote(table, safe=' ')}.{ending}"
