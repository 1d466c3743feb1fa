"""`FusedLayout`: from a batch to the named outputs of a `FeatureConfigs`, with gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from monolith.features.batch import BatchColumn
from monolith.nn.collection import EmbeddingBagCollection
from monolith.original.feature_messages import batch_from_examples
from monolith.original.fused_layout import FeatureConfigs, Outputs, arrange, features_of
from monolith.table.config import Segment
from monolith.table.store import Store

if TYPE_CHECKING:
    from monolith.proto import example_pb2

__all__ = ["FusedLayout"]


class FusedLayout(nn.Module):
    """Look up the features of `configs`, and put their slices together as its outputs say.

    The rows, one lookup per table, and their training are those of `embeddings`, an `EmbeddingBagCollection`; `segments` gives
    their optimizers by table, see `monolith.original.fused_layout.features_of`.

    Shapes: a batch, or an ExampleBatch message, of B rows gives, by output name, CONCAT [B, sum of d], STACK [B, slices, d],
    ADDN [B, d], and NONE a tuple of one [B, d] per slice. For FIRSTN features there is an n before d.

    Example:
        >>> import torch
        >>> from monolith.original.fused_layout import FeatureConfig, FeatureConfigs, OutConfig, SliceConfig
        >>> from monolith.original import FusedLayout
        >>> slices = (SliceConfig(feature_name="user", start=1, end=5), SliceConfig(feature_name="item", start=1, end=5))
        >>> configs = FeatureConfigs(
        ...     feature_configs={name: FeatureConfig(table="t", slice_dims=(1, 4)) for name in ("user", "item")},
        ...     out_configs={"vec": OutConfig(slice_configs=slices)},
        ... )
        >>> layout = FusedLayout(configs)
        >>> layout({"user": torch.tensor([1, 2, 3]), "item": torch.tensor([7, 7, 8])})["vec"].shape
        torch.Size([3, 8])
    """

    def __init__(
        self,
        configs: FeatureConfigs,
        store: Store | None = None,
        *,
        segments: Mapping[str, tuple[Segment, ...]] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.configs = configs
        self.embeddings = EmbeddingBagCollection(features_of(configs, segments=segments), store, seed=seed)

    def forward(self, batch: Mapping[str, BatchColumn] | example_pb2.ExampleBatch) -> Outputs:
        """Look up and arrange."""
        columns = batch if isinstance(batch, Mapping) else batch_from_examples(batch, self.configs.feature_configs)
        return arrange(self.configs, self.embeddings(columns))
