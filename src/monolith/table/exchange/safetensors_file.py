"""A table as a safetensors file: ids, values, times and slots as tensors of one moment per row."""

from __future__ import annotations

from pathlib import Path

from safetensors.numpy import save

from monolith.table.embedding_table import EmbeddingTable
from monolith.table.exchange.output_files import replacing_files
from monolith.urls import local_path

__all__ = ["export_safetensors"]


def export_safetensors(table: EmbeddingTable, path: str | Path) -> Path:
    """Write all rows to one safetensors file and return its path; row i of every tensor belongs to `ids[i]`.

    Tensors are named as the columns of `export_parquet`; the configuration is in the metadata as `table_config`. All rows are
    in memory twice meanwhile: for a table larger than that, use Parquet.

    Example:
        >>> import tempfile
        >>> from monolith import EmbeddingTable, Segment, TableConfig
        >>> from safetensors.torch import load_file
        >>> table = EmbeddingTable(TableConfig(name="user", segments=(Segment(dim=4),)))
        >>> table.reinitialize([7]).tolist()
        [0]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tensors = load_file(export_safetensors(table, f"{folder}/user.safetensors"))
        >>> sorted(tensors), tensors["values"].shape
        (['0/norm', 'ids', 'times', 'values'], torch.Size([1, 4]))
    """
    target = Path(local_path(path, "path"))
    data = save(table.to_numpy(), metadata={"table_config": table.config.model_dump_json()})
    with replacing_files([target]) as (file,):
        file.write(data)
    return target
