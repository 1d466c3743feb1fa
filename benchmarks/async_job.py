"""One process of the asynchronous benchmark. `async_training.py` runs it alone, and as servers and workers."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.features import Batch, Feature
from monolith.nn import FM, EmbeddingBagCollection
from monolith.table import Adagrad
from monolith.train import Estimator, Head, RunConfig

COLUMNS, DIM = ("user_id", "item_id", "category_id", "tag_ids"), 16


class DeepFM(nn.Module):
    """Biases, a factorization machine and an MLP over the embeddings of four columns."""

    heads = (Head(name="click", label="label"),)

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        adagrad = Adagrad(learning_rate=0.1)
        self.embeddings = EmbeddingBagCollection(
            [Feature(name=name, dim=DIM, bias=True, optimizer=adagrad, pooling="mean", stack="ids") for name in COLUMNS]
        )
        self.fm = FM()
        self.mlp = nn.Sequential(nn.Linear(len(COLUMNS) * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: Batch) -> Tensor:
        """-> [rows]."""
        rows = self.embeddings(batch)
        logits = rows["ids.bias"].sum(1) + self.fm(rows["ids"]) + self.mlp(rows["ids"].flatten(1))
        return logits.squeeze(1)


def stream(seed: int, batches: int) -> ClickStream:
    """The data of a seed; what comes after `batches` is for the evaluation."""
    world = {"users": 5_000, "items": 1_000, "new_items_per_hour": 500, "batch_size": 1024}
    return ClickStream(ClickStreamConfig(**world, seed=seed, batches=batches))


def main() -> None:
    """Train a share of the stream."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--model-dir", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = RunConfig(model_dir=arguments.model_dir, save_checkpoints_secs=0)
    step = Estimator(DeepFM(arguments.seed), config).train(stream(arguments.seed, arguments.batches))
    print(f"step {step}", flush=True)


if __name__ == "__main__":
    main()
