"""The model of the live loop, and the history that it is trained on before it goes live."""

from __future__ import annotations

from torch import Tensor, nn
from world import world
from world_clock import HISTORY_BATCH, HISTORY_BATCHES, HISTORY_RATE

from monolith.data.synthetic import ClickStream
from monolith.features import Batch, Feature
from monolith.nn import FM, EmbeddingBagCollection
from monolith.table import Adam
from monolith.train import Head

COLUMNS, DIM = ("user_id", "item_id", "category_id", "tag_ids"), 8


class ClickModel(nn.Module):
    """DeepFM: biases, a factorization machine and an MLP over the embeddings of four columns."""

    heads = (Head(name="click", label="label"),)

    def __init__(self) -> None:
        super().__init__()
        # Adam forgets old gradients, so it follows tastes that change. Adagrad would learn ever more slowly.
        adam = Adam(learning_rate=0.02)
        self.embeddings = EmbeddingBagCollection(
            [Feature(name=name, dim=DIM, bias=True, optimizer=adam, pooling="mean", stack="ids") for name in COLUMNS]
        )
        self.fm = FM()
        self.mlp = nn.Sequential(nn.Linear(len(COLUMNS) * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: Batch) -> Tensor:
        rows = self.embeddings(batch)  # "ids" [rows, columns, DIM], "ids.bias" [rows, columns, 1]
        logits = rows["ids.bias"].sum(1) + self.fm(rows["ids"]) + self.mlp(rows["ids"].flatten(1))
        return logits.squeeze(1)


def history(mode: str) -> ClickStream:
    """Return the minute before the site opened, as if it had been recorded."""
    rate = {"impressions_per_second": float(HISTORY_RATE), "batch_size": HISTORY_BATCH, "batches": HISTORY_BATCHES}
    return ClickStream(world().config.model_copy(update=rate))
