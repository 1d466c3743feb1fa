"""`monolith import-table`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from monolith.cli.given_files import read_yaml
from monolith.cli.options import Json
from monolith.cli.output import show
from monolith.cli.progress import showing_progress
from monolith.console import Progress
from monolith.errors import ConfigError, InvalidArgumentError, StorageError
from monolith.original.dump import import_dump, import_multi_dump
from monolith.original.dump_files import has_dump
from monolith.table import EmbeddingTable, TableConfig
from monolith.table.exchange import import_parquet

__all__ = ["import_table"]


def import_table(
    source: Annotated[
        str,
        typer.Argument(
            help="A .parquet file, or a dump of the original: the path or URL of its files without -00000-of-00001."
        ),
    ],
    output: Annotated[Path, typer.Argument(help="The .table file to write; a folder for a multi-table dump.")],
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML with the fields of TableConfig; for a multi-table dump, one such block under the name of each "
            "table to import. Parquet files written here have it inside."
        ),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(help="A further dump of the same tables, from another parameter server; may be repeated."),
    ] = None,
    optimizer_state: Annotated[
        bool, typer.Option(help="Take over the optimizers' state, which needs the optimizers of the dump.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Build tables from the original's dumps or from Parquet. Nothing is written unless all of it could be read."""
    with showing_progress(f"reading {source}") as progress:
        tables = _read([source, *(also or ())], config, optimizer_state, progress)
    answer = {}
    for name, table in tables.items():
        file = output / f"{quote(table.name, safe=' ')}.table" if _is_multi(source) else output
        answer[name] = {"file": str(file), "rows": len(table), "bytes": _save(table, file)}
    show({"tables": answer}, as_json=as_json, title=source)


def _save(table: EmbeddingTable, file: Path) -> int:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{file.parent}: cannot make the folder: {error.strerror}") from error
    return table.save(file)


def _read(
    sources: list[str], config: Path | None, optimizer_state: bool, progress: Progress
) -> dict[str, EmbeddingTable]:
    if sources[0].endswith(".parquet"):
        if len(sources) > 1:
            raise InvalidArgumentError("--also: only a dump of the original can be in several places")
        given = None if config is None else _table(read_yaml(config), str(config))
        table = import_parquet(sources[0], given, optimizer_state=optimizer_state, progress=progress)
        return {table.name: table}
    if config is None:
        raise InvalidArgumentError("--config: a dump does not say what its numbers are; give the table's configuration")
    tree = read_yaml(config)
    if _is_multi(sources[0]):
        configs = {name: _table(block, f"{config}: {name}") for name, block in tree.items()}
        return import_multi_dump(sources, configs, optimizer_state=optimizer_state, progress=progress)
    table = import_dump(sources, _table(tree, str(config)), optimizer_state=optimizer_state, progress=progress)
    return {table.name: table}


def _is_multi(source: str) -> bool:
    return not source.endswith(".parquet") and has_dump(f"{source}.meta")


def _table(tree: object, where: str) -> TableConfig:
    try:
        return TableConfig.from_json(json.dumps(tree))
    except (ConfigError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from None
