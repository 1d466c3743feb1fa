"""`monolith import-table` and `export-table`: tables from and to other formats."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from monolith.cli.options import Json, read_yaml
from monolith.cli.output import show, showing_progress
from monolith.console import Progress
from monolith.errors import ConfigError, InvalidArgumentError, SchemaError, StorageError
from monolith.nn.pretrained import has_tfra, import_state_dict, import_tfra, read_state_dict, read_vocabulary
from monolith.original.dump import export_dump, export_multi_dump, import_dump, import_multi_dump
from monolith.original.dump_files import has_dump
from monolith.table import NUM_BUCKETS, EmbeddingTable, TableConfig
from monolith.table.exchange import export_parquet, export_safetensors, import_parquet

__all__ = ["export_table", "import_table", "open_tables"]


def import_table(
    source: Annotated[
        str,
        typer.Argument(
            help="A .parquet file, a state dict (.safetensors, .pt, .pth or .bin), the files that TFRA's save_to_file_system "
            "wrote (their folder, or their path without -keys), or a dump of the original: the path or URL of its files without "
            "-00000-of-00001.",
            metavar="SOURCE",
        ),
    ],
    output: Annotated[
        Path, typer.Argument(help="The .table file to write, or a folder for a multi-table dump.", metavar="OUTPUT")
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with the fields of TableConfig. For a multi-table dump, one such block under the name of each "
            "table. Not needed for Parquet files that export-table wrote."
        ),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(help="A further dump of the same tables, from another parameter server. May be repeated."),
    ] = None,
    weight: Annotated[
        str | None,
        typer.Option(
            help="Of a state dict: the tensor [rows, dim], by default that of the table's name, or the only embedding."
        ),
    ] = None,
    vocabulary: Annotated[
        Path | None,
        typer.Option(
            help="Of a state dict: the ids of its rows, as text with one per line, .npy, or .json with a list or an object from "
            "id to row. Texts that are not all numbers are hashed. By default the ids of TorchRec's managed collision "
            "module, or else the numbers of the rows."
        ),
    ] = None,
    optimizer_state: Annotated[
        bool, typer.Option(help="Also import the state of the optimizers, which must be those of the dump.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Import tables from Parquet, PyTorch, TFRA or the original.

    Nothing is written unless everything could be read.
    """
    with showing_progress(f"reading {source}") as progress:
        if _is_state_dict(source) or has_tfra(source):
            tables = _pretrained([source, *(also or ())], config, weight, vocabulary)
        elif weight is not None or vocabulary is not None:
            raise InvalidArgumentError(f"--weight, --vocabulary: only for a state dict, got {source}")
        else:
            tables = _read([source, *(also or ())], config, optimizer_state, progress)
    answer = {}
    for name, table in tables.items():
        file = output / f"{quote(table.name, safe=' ')}.table" if _is_multi(source) else output
        answer[name] = {"file": str(file), "rows": len(table), "bytes": _save(table, file)}
    show({"tables": answer}, as_json=as_json, title=source)


def _is_state_dict(source: str) -> bool:
    return source.endswith((".safetensors", ".pt", ".pth", ".bin"))


def _pretrained(
    sources: list[str], config: Path | None, weight: str | None, vocabulary: Path | None
) -> dict[str, EmbeddingTable]:
    if len(sources) > 1:
        raise InvalidArgumentError("--also: only a dump of the original can be in several places")
    if config is None:
        raise InvalidArgumentError(
            "--config: expected the configuration of the table, which the weights do not contain"
        )
    given = _table(read_yaml(config), str(config))
    if _is_state_dict(sources[0]):
        ids = None if vocabulary is None else read_vocabulary(vocabulary)
        state = read_state_dict(sources[0])
        try:
            table = import_state_dict(state, given, weight=weight, vocabulary=ids)
        except SchemaError as error:
            # Arguments of the function are options here.
            is_option = str(error).startswith(("weight:", "vocabulary:"))
            raise SchemaError(f"{'--' if is_option else ''}{error}") from None
    elif weight is not None or vocabulary is not None:
        raise InvalidArgumentError("--weight, --vocabulary: only for a state dict; the files of TFRA say their ids")
    else:
        table = import_tfra(sources[0], given)
    return {table.name: table}


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
        raise InvalidArgumentError("--config: expected the configuration of the table, which a dump does not contain")
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


class Format(StrEnum):
    """File formats of an exported table."""

    PARQUET = "parquet"
    SAFETENSORS = "safetensors"
    DUMP = "dump"
    MULTI_DUMP = "multi-dump"


def export_table(
    source: Annotated[
        str,
        typer.Argument(help="A .table file, a checkpoint, or the model_dir of a run: a path or URL.", metavar="SOURCE"),
    ],
    output: Annotated[
        str, typer.Argument(help="The file to write. For dumps, the path without -00000-of-00001.", metavar="OUTPUT")
    ],
    to: Annotated[
        Format | None,
        typer.Option(
            help="Format, by default that of the output's suffix. dump and multi-dump are formats of the original."
        ),
    ] = None,
    table: Annotated[
        list[str] | None, typer.Option(help="A table of the checkpoint or run. May be repeated for multi-dump.")
    ] = None,
    shards: Annotated[int | None, typer.Option(help="Number of files of a dump.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Export a table as Parquet, safetensors or a dump.

    The original can restore from the dump.
    """
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
            f"--to: {output!r} does not say the format, give one of {', '.join(f.value for f in Format)}"
        )
    return kind


def open_tables(path: str, names: Sequence[str] | None = None) -> dict[str, EmbeddingTable]:
    """Return the table of a .table file, or those of a checkpoint or of the newest restore point of a model_dir.

    With `names` only these tables are read.
    """
    from monolith.state import find_restore_point, is_complete
    from monolith.state.tables import open_source
    from monolith.urls import is_remote

    if not is_remote(path):
        if Path(path).is_file():
            table = EmbeddingTable.load(path)
            return dict.fromkeys(_chosen([table.name], names, path), table)
        if not Path(path).is_dir():
            raise InvalidArgumentError(
                f"{path}: expected a .table file, a checkpoint or a model_dir; there is no such path"
            )
    saved = open_source(path if is_complete(path) else find_restore_point(path))
    chosen = _chosen(saved.tables, names, path)
    tables = {name: EmbeddingTable(saved.tables[name].config) for name in chosen}
    saved.fill(tables, range(NUM_BUCKETS))
    return tables


def _chosen(known: Collection[str], names: Sequence[str] | None, path: str) -> Collection[str]:
    missing = [name for name in names or () if name not in known]
    if missing:
        raise InvalidArgumentError(f"--table: {path} has no table {missing[0]!r}; it has {', '.join(sorted(known))}")
    return names or known
