"""Table files: reading their rows into tables, and the entry by which a checkpoint lists a file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from monolith import _core
from monolith.config import Config, Count
from monolith.errors import CorruptFileError
from monolith.table.arrays import file_name
from monolith.table.buckets import bucket_bounds
from monolith.table.config import TableConfig, to_core

if TYPE_CHECKING:
    from monolith.table.embedding_table import EmbeddingTable

__all__ = ["FileEntry", "file_checksum", "read_rows_into", "write_table_file"]


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
