"""Test AUC after one epoch for several learning rates of Adagrad.

The Parquet files have the columns user, item, genres and label.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from monolith import EmbeddingBagCollection, Estimator, Feature
from monolith.data import ParquetSource
from monolith.features import Batch
from monolith.table import Adagrad

COLUMNS = ("user", "item", "genres")


class Clicks(nn.Module):
    def __init__(self, rate: float, dim: int = 16) -> None:
        super().__init__()
        optimizer = Adagrad(learning_rate=rate)
        self.embeddings = EmbeddingBagCollection(
            [Feature(name=c, dim=dim, bias=True, optimizer=optimizer) for c in COLUMNS]
        )
        self.mlp = nn.Sequential(nn.Linear(3 * dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: Batch) -> Tensor:
        out = self.embeddings(batch)
        user, item, genres = (out[column] for column in COLUMNS)
        wide = out["user.bias"] + out["item.bias"] + self.mlp(torch.cat([user, item, genres], dim=1))
        return wide.squeeze(1) + (user * (item + genres)).sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--rates", default="0.001,0.01,0.03,0.05,0.1,0.2")
    arguments = parser.parse_args()
    for rate in map(float, arguments.rates.split(",")):
        torch.manual_seed(0)
        estimator = Estimator(Clicks(rate))
        estimator.train(ParquetSource(arguments.train, [*COLUMNS, "label"], batch_size=4096))
        metrics = estimator.evaluate(ParquetSource(arguments.test, [*COLUMNS, "label"], batch_size=4096))
        print(f"rate {rate:<6g} test AUC {metrics['output/auc']:.4f}", flush=True)


if __name__ == "__main__":
    main()
