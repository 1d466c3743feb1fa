"""Tables from and to the files of others: the original's dumps, Parquet, safetensors, a plain `nn.Embedding`."""

from monolith.table.exchange.export_dump import export_dump, export_multi_dump
from monolith.table.exchange.id_embedding import IdEmbedding
from monolith.table.exchange.import_dump import dump_counts, import_dump, import_multi_dump
from monolith.table.exchange.parquet import export_parquet, import_parquet
from monolith.table.exchange.safetensors_file import export_safetensors

__all__ = [
    "IdEmbedding",
    "dump_counts",
    "export_dump",
    "export_multi_dump",
    "export_parquet",
    "export_safetensors",
    "import_dump",
    "import_multi_dump",
    "import_parquet",
]
