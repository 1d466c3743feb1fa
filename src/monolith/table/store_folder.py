"""A store in a folder: one file per table, one per admission filter, and a list of them."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from monolith import _core
from monolith.config import Config
from monolith.durable import sync_to_disk, write_durably
from monolith.errors import ConfigError, CorruptFileError, StorageError
from monolith.table.admission import AdmissionFilter
from monolith.table.config import TableConfig
from monolith.table.embedding_table import EmbeddingTable
from monolith.table.entries import TableState
from monolith.table.table_file import read_rows_into
from monolith.urls import local_path

__all__ = ["StoreIndex", "read_store", "write_store"]

STORE_INDEX = "store.json"


class StoreIndex(Config):
    """What a store's folder holds."""

    version: int = 1
    tables: tuple[str, ...]
    """Names of the tables, each in `<name>.table`."""
    admission: tuple[str, ...]
    """Names of those with an admission filter, in `<name>.admission`."""


def write_store(tables: Mapping[str, EmbeddingTable], folder: str | os.PathLike[str]) -> None:
    """Write `tables` into `folder`, which must be new or empty and appears complete or not at all."""
    target = Path(local_path(folder, "folder"))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        try:
            _write_files(tables, temporary)
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


def read_store(tables: Mapping[str, EmbeddingTable], folder: str | os.PathLike[str]) -> dict[str, EmbeddingTable]:
    """Return new tables with the configurations of `tables` and the rows of `folder`."""
    index = _read_index(Path(folder))
    missing = [name for name in tables if name not in index.tables]
    if missing:
        known = ", ".join(map(repr, index.tables)) or "none"
        raise CorruptFileError(f"{folder}: has no table {', '.join(map(repr, missing))}; it has {known}")
    return {name: _read_table(table, Path(folder), index) for name, table in tables.items()}


def _write_files(tables: Mapping[str, EmbeddingTable], folder: Path) -> None:
    for name, table in tables.items():
        if table.admission is not None:
            table.admission.save(folder / _file(name, "admission"))
        table.save(folder / _file(name, "table"))
    filtered = tuple(name for name, table in tables.items() if table.admission is not None)
    index = StoreIndex(tables=tuple(tables), admission=filtered)
    write_durably(folder / STORE_INDEX, index.model_dump_json().encode())


def _read_index(folder: Path) -> StoreIndex:
    path = folder / STORE_INDEX
    try:
        text = path.read_text()
    except OSError as error:
        raise StorageError(f"{path}: cannot read the list of tables: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{path}: is not text: {error}") from None
    try:
        index = StoreIndex.from_json(text)
    except ConfigError as error:
        raise CorruptFileError(f"{path}: {error}") from None
    if index.version != 1:
        raise CorruptFileError(
            f"{path}: version {index.version}, but this release reads version 1; upgrade monolith-torch"
        )
    return index


def _read_table(table: EmbeddingTable, folder: Path, index: StoreIndex) -> EmbeddingTable:
    admission = None if table.admission is None else AdmissionFilter(table.admission.config)
    # Without counts of its own in the folder, a filter is newer than the save and starts counting now.
    if admission is not None and table.name in index.admission:
        admission.load(folder / _file(table.name, "admission"))
    fresh = EmbeddingTable(table.config, admission=admission)
    path = folder / _file(table.name, "table")
    file = _core.TableFile(str(path))
    _check_seed(table.config, file, path)
    read_rows_into(fresh, path)
    max_event_time, updates, scales = file.state
    fresh.set_state(TableState(max_event_time=max_event_time, updates=updates, hashnet_scales=tuple(scales)))
    return fresh


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
