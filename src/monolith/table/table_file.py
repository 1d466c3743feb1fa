"""Table files: reading rows into tables, the entry that lists a file in a checkpoint, and a store as a folder of files."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

from pydantic import Field

from monolith import _core
from monolith.config import Config, Count
from monolith.durable import sync_to_disk, write_durably
from monolith.errors import ConfigError, CorruptFileError, StorageError
from monolith.table.admission import AdmissionFilter
from monolith.table.arrays import file_name
from monolith.table.buckets import bucket_bounds
from monolith.table.config import TableConfig, to_core
from monolith.table.embedding_table import EmbeddingTable
from monolith.table.entries import TableState
from monolith.urls import local_path

if TYPE_CHECKING:
    from monolith.table.embedding_table import EmbeddingTable

__all__ = [
    "FileEntry",
    "StoreIndex",
    "file_checksum",
    "read_rows_into",
    "read_store",
    "write_store",
    "write_table_file",
]


class FileEntry(Config):
    """A file of a checkpoint: its name, size and checksum.

    Example:
        >>> FileEntry.of("state.json", b"{}").checksum[:15]
        'sha256:44136fa3'
    """

    name: str
    size: Count
    checksum: Annotated[str, Field(pattern=r"^(sha256:[0-9a-f]{64}|crc32c:[0-9a-f]{8})$")]
    """SHA-256. For table files CRC-32C, which is quicker and covers all rows. For segments the checksum in their footer."""

    @classmethod
    def of(cls, name: str, data: bytes) -> FileEntry:
        """Return the entry of a file with these bytes."""
        return cls(name=name, size=len(data), checksum=f"sha256:{hashlib.sha256(data).hexdigest()}")


def read_rows_into(
    table: EmbeddingTable, path: str | os.PathLike[str], buckets: range | None = None, *, checksum: str | None = None
) -> int:
    """Upsert the rows of a table file, or those of some buckets, and return how many.

    The file must have the table's `layout`, and the `checksum` if one is given. Several files may go into one table, one
    after the other or on several threads. `TableState` stays as it is, except that the newest event time does not go back.

    Raises `CorruptFileError` for a file that is damaged or of another layout. Rows before the damage may be in the table
    then, so fill a table that nobody uses yet.

    Example:
        >>> import tempfile
        >>> from monolith import EmbeddingTable, Segment, TableConfig
        >>> from monolith.table import read_rows_into
        >>> config = TableConfig(name="item", segments=(Segment(dim=4),))
        >>> table, half = EmbeddingTable(config), EmbeddingTable(config)
        >>> _ = table.reinitialize([1, 2, 3, 4])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = table.save(folder + "/item.table")
        ...     read_rows_into(half, folder + "/item.table", buckets=range(2048, 4096))
        2
    """
    first, last = bucket_bounds(buckets)
    file = _core.TableFile(file_name(path))
    # Before the rows are read: it follows from the checksums of the blocks, and each block is checked as it is read.
    if checksum is not None and checksum != file_checksum(file):
        raise CorruptFileError(f"{path}: its checksum is wrong; the file was altered")
    return file.read_into(table._core, first, last)


def write_table_file(path: str | os.PathLike[str], config: TableConfig, parts: Iterable[EmbeddingTable]) -> int:
    """Write the rows of `parts`, tables with the layout of `config` and no id in common, as the file of one table.

    Only one part needs to be in memory at a time. The file has the state of a new table, and appears under `path` complete and
    durable, or not at all. Returns its size in bytes.

    Example:
        >>> import tempfile
        >>> from monolith import EmbeddingTable, Segment, TableConfig
        >>> config = TableConfig(name="item", segments=(Segment(dim=4),))
        >>> def parts():
        ...     for number in range(3):
        ...         part = EmbeddingTable(config)
        ...         _ = part.reinitialize([2 * number, 2 * number + 1])
        ...         yield part
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = write_table_file(folder + "/item.table", config, parts())
        ...     len(EmbeddingTable.load(folder + "/item.table"))
        6
    """
    empty = _core.Table(to_core(config, capacity=0), None)
    writer = _core.TableFileWriter(file_name(path), empty, config.model_dump_json())
    for part in parts:
        writer.append(part._core)
    return writer.finish(empty)


def file_checksum(file: _core.TableFile) -> str:
    """What stands for the content of a table file elsewhere: CRC-32C of all its bytes, if its blocks are not damaged.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from monolith import EmbeddingTable, Segment, TableConfig
        >>> table = EmbeddingTable(TableConfig(name="item", segments=(Segment(dim=4),)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = table.save(folder + "/item.table")
        ...     data = Path(folder + "/item.table").read_bytes()
        ...     file_checksum(_core.TableFile(folder + "/item.table")) == f"crc32c:{_core.crc32c(data):08x}"
        True
    """
    return f"crc32c:{file.checksum:08x}"


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
