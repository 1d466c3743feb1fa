"""A table frozen into a plain `nn.Embedding` and the list of its ids, for programs that have nothing but torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.table.arrays import Ids, id_array
from monolith.table.embedding_table import EmbeddingTable

__all__ = ["IdEmbedding"]


class IdEmbedding(nn.Module):
    """`nn.Embedding` over the ids a table had, as `EmbeddingTable.lookup` read them.

    Position 0 stands for every id that is not in `ids`: it is zero, and as `padding_idx` stays zero in training. Position
    i + 1 is `ids[i]`; `ids` ascend. A training table reads initial values for ids without a row, this reads zeros, as a
    serving table does.

    Shapes: ids [*] -> float32 [*, dim].

    Example:
        >>> from monolith import EmbeddingTable, Segment, TableConfig
        >>> from monolith.table import Ones
        >>> table = EmbeddingTable(TableConfig(name="user", segments=(Segment(dim=2, initializer=Ones()),)))
        >>> table.reinitialize([50, -3]).tolist()
        [0, 0]
        >>> frozen = IdEmbedding.from_table(table)
        >>> frozen.ids.tolist(), frozen.positions(torch.tensor([50, 7])).tolist()
        ([-3, 50], [2, 0])
        >>> frozen(torch.tensor([50, 7])).tolist()
        [[1.0, 1.0], [0.0, 0.0]]
    """

    ids: torch.Tensor
    """int64 [n], ascending."""

    def __init__(self, ids: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        if ids.dtype != torch.int64 or ids.ndim != 1 or bool((ids[1:] <= ids[:-1]).any()):
            raise InvalidArgumentError("ids: expected int64 [n], ascending and each once")
        if values.ndim != 2 or len(values) != len(ids):
            raise InvalidArgumentError(f"values: expected [{len(ids)}, dim], one row per id, got {list(values.shape)}")
        self.register_buffer("ids", ids)
        weight = torch.cat([values.new_zeros(1, values.shape[1]), values])
        self.embedding = nn.Embedding(len(weight), weight.shape[1], padding_idx=0, _weight=weight)

    @classmethod
    def from_table(cls, table: EmbeddingTable, ids: Ids | None = None) -> IdEmbedding:
        """The embeddings of `ids`, or of every id that has a row now."""
        wanted = [batch.ids.numpy() for batch in table.iter_batches()] if ids is None else [id_array(ids).reshape(-1)]
        unique = np.unique(np.concatenate([np.empty(0, np.int64), *wanted]))
        return cls(torch.from_numpy(unique), table.lookup(unique))

    def positions(self, ids: torch.Tensor) -> torch.Tensor:
        """Where each id lies in `embedding.weight`: int64, the shape of `ids`; 0 if it is not there."""
        if not len(self.ids):
            return torch.zeros_like(ids)
        near = torch.searchsorted(self.ids, ids).clamp(max=len(self.ids) - 1)
        return torch.where(self.ids[near] == ids, near + 1, 0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of `ids`."""
        embedded: torch.Tensor = self.embedding(self.positions(ids))
        return embedded
