"""Batches into a Parquet file, for benchmarks that read what a generator made."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from monolith.errors import InvalidArgumentError
from monolith.features import Column, Ragged

if TYPE_CHECKING:
    import pyarrow

__all__ = ["write_parquet"]


def write_parquet(
    batches: Iterable[Mapping[str, Column]], path: str | os.PathLike[str], *, rows_per_group: int = 65_536
) -> int:
    """Write the columns of all batches to one file, in row groups of `rows_per_group` rows; returns the number of rows.

    A tensor [n] becomes a flat column, a `Ragged` a list column.

    Example:
        >>> import tempfile, torch, pyarrow.parquet
        >>> batches = [{"label": torch.tensor([0.0, 1.0]), "ids": Ragged.from_lists([[7], [8, 9]])}]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rows = write_parquet(batches, f"{folder}/a.parquet")
        ...     pyarrow.parquet.read_table(f"{folder}/a.parquet").to_pydict()
        {'label': [0.0, 1.0], 'ids': [[7], [8, 9]]}
    """
    import pyarrow
    import pyarrow.parquet

    if rows_per_group < 1:
        raise InvalidArgumentError(f"rows_per_group: expected at least 1, got {rows_per_group}")
    writer, held, rows = None, [], 0
    try:
        for batch in batches:
            table = pyarrow.table({name: _column(name, values) for name, values in batch.items()})
            writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
            held.append(table)
            rows += table.num_rows
            if sum(part.num_rows for part in held) >= rows_per_group:
                joined = pyarrow.concat_tables(held)
                full = joined.num_rows // rows_per_group * rows_per_group
                writer.write_table(joined.slice(0, full), row_group_size=rows_per_group)
                held = [joined.slice(full)]
        if writer is None:
            raise InvalidArgumentError("batches: expected at least one batch, got none; a file needs its columns")
        if held[0].num_rows or len(held) > 1:
            writer.write_table(pyarrow.concat_tables(held))
    finally:
        if writer is not None:
            writer.close()
    return rows


def _column(name: str, values: Column) -> pyarrow.Array:
    import pyarrow

    if isinstance(values, Ragged):
        return pyarrow.LargeListArray.from_arrays(values.offsets.numpy(), values.values.numpy())
    if values.ndim != 1:
        raise InvalidArgumentError(f"{name}: expected a column [n] or a Ragged, got shape {list(values.shape)}")
    return pyarrow.array(values.numpy())
