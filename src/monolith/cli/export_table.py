"""`monolith export-table`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from monolith.cli.options import Json
from monolith.cli.output import show
from monolith.cli.progress import showing_progress
from monolith.cli.table_source import open_tables
from monolith.console import Progress
from monolith.errors import InvalidArgumentError
from monolith.original.dump import export_dump, export_multi_dump
from monolith.table import EmbeddingTable
from monolith.table.exchange import export_parquet, export_safetensors

__all__ = ["export_table"]


class Format(StrEnum):
    """What to write."""

    PARQUET = "parquet"
    SAFETENSORS = "safetensors"
    DUMP = "dump"
    MULTI_DUMP = "multi-dump"


def export_table(
    source: Annotated[
        str, typer.Argument(help="A .table file, a checkpoint, or the model_dir of a run; local or a URL.")
    ],
    output: Annotated[str, typer.Argument(help="The file to write; for dumps their path without -00000-of-00001.")],
    to: Annotated[
        Format | None,
        typer.Option(help="By default by the suffix of the output. dump and multi-dump are the original's files."),
    ] = None,
    table: Annotated[
        list[str] | None, typer.Option(help="A table of the checkpoint or run; may be repeated for multi-dump.")
    ] = None,
    shards: Annotated[int | None, typer.Option(help="Number of files of a dump.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Write a table as Parquet, safetensors, or a dump that the original restores from."""
    kind = to or _by_suffix(output)
    tables = open_tables(source, table)
    with showing_progress(f"writing {output}") as progress:
        files = _write(kind, tables, output, shards, progress)
    rows = {name: len(each) for name, each in tables.items()}
    size = sum(file.stat().st_size for file in files)
    show({"files": [str(file) for file in files], "rows": rows, "bytes": size}, as_json=as_json, title=output)


def _write(
    kind: Format, tables: dict[str, EmbeddingTable], output: str, shards: int | None, progress: Progress
) -> Sequence[Path]:
    if kind is Format.MULTI_DUMP:
        return export_multi_dump(list(tables.values()), output, shards=shards, progress=progress)
    if len(tables) != 1:
        raise InvalidArgumentError(f"--table: {kind.value} holds one table; choose one of {', '.join(tables)}")
    (table,) = tables.values()
    if kind is Format.DUMP:
        return export_dump(table, output, shards=shards, progress=progress)
    if kind is Format.PARQUET:
        return [export_parquet(table, output, progress=progress)]
    return [export_safetensors(table, output)]


def _by_suffix(output: str) -> Format:
    kind = {".parquet": Format.PARQUET, ".safetensors": Format.SAFETENSORS}.get(Path(output).suffix)
    if kind is None:
        raise InvalidArgumentError(
            f"--to: {output!r} does not say the format; give one of {', '.join(f.value for f in Format)}"
        )
    return kind
