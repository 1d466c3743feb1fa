"""Train a click model on 64-bit ids in a plain PyTorch loop: no vocabulary, no hashing trick, no collisions.

The clicks are synthetic with a known truth, so the best possible AUC is known too. Every batch is scored before the
model learns from it, as with live traffic, so the AUC shown is always that of unseen events.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.features import Batch, Feature
from monolith.metrics import AUC
from monolith.nn import FM, EmbeddingBagCollection, clip_grad_norm_
from monolith.table import Adagrad

COLUMNS, DIM = ("user_id", "item_id", "category_id", "tag_ids"), 16
WORLD = {"users": 5_000, "items": 1_000, "new_items_per_hour": 500, "batch_size": 4096}


class ClickModel(nn.Module):
    """DeepFM: biases, a factorization machine and an MLP over the embeddings of four columns."""

    def __init__(self) -> None:
        super().__init__()
        adagrad = Adagrad(learning_rate=0.1)
        self.embeddings = EmbeddingBagCollection(
            [Feature(name=name, dim=DIM, bias=True, optimizer=adagrad, pooling="mean", stack="ids") for name in COLUMNS]
        )
        self.fm = FM()
        self.mlp = nn.Sequential(nn.Linear(len(COLUMNS) * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: Batch) -> Tensor:
        rows = self.embeddings(batch)  # "ids" [rows, columns, DIM], "ids.bias" [rows, columns, 1]
        logits = rows["ids.bias"].sum(1) + self.fm(rows["ids"]) + self.mlp(rows["ids"].flatten(1))
        return logits.squeeze(1)


def main(steps: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for layers this small, more threads are slower
    stream = ClickStream(ClickStreamConfig(**WORLD, batches=steps))
    model = ClickModel()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)  # rows are not parameters: their table trains them
    auc, best = AUC(), AUC()

    for step, batch in enumerate(stream, 1):
        logits = model(batch)
        # Summed, not averaged: the step of an id should not depend on the size of the batch.
        loss = binary_cross_entropy_with_logits(logits, batch["label"], reduction="sum")
        adam.zero_grad()
        loss.backward()
        clip_grad_norm_(model, 1000.0)  # dense and sparse gradients together
        adam.step()
        model.embeddings.step()  # updates the rows of this batch and inserts new ids

        auc.update(logits, batch["label"])
        best.update(batch["click_probability"], batch["label"])
        if step % max(1, steps // 10) == 0:
            rows = sum(table.rows for table in model.embeddings.store.stats().values())
            print(f"step {step:5,}  {rows:7,} rows  AUC {auc.compute():.4f}  best possible {best.compute():.4f}")
            auc.reset()
            best.reset()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500, help="batches of 4,096 impressions")
    main(parser.parse_args().steps)
