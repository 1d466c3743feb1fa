"""Tables from and to the files of others: the original's dumps, Parquet, safetensors, a plain `nn.Embedding`."""

from monolith.table.exchange.id_embedding import IdEmbedding
from monolith.table.exchange.parquet import export_parquet, import_parquet
from monolith.table.exchange.safetensors_file import export_safetensors

__all__ = [
    "IdEmbedding",
    "export_parquet",
    "export_safetensors",
    "import_parquet",
]
