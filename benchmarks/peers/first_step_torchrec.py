"""DeepFM with TorchRec on one CPU, unsharded.

Its own `SimpleDeepFMNN` is another model, without first-order weights. Tables have a fixed size, so ids are hashed into rows.
"""

import sys

import numpy as np
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

IDS, NUMBERS = ["user", "item", "category", "city"], ["age", "price"]
DIM, ROWS, BATCH, LEARNING_RATE = 16, 10_000, 512, 0.02


def tables(kind: str, dim: int) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=f"{name}_{kind}", embedding_dim=dim, num_embeddings=ROWS, feature_names=[name])
        for name in IDS
    ]
    return EmbeddingBagCollection(tables=configs)


class DeepFM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vectors, self.first_order = tables("vector", DIM), tables("first_order", 1)
        self.linear = nn.Linear(len(NUMBERS), 1)
        width = len(IDS) * DIM + len(NUMBERS)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, numbers: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        flat = self.vectors(ids).values()
        vectors, first_order = flat.view(-1, len(IDS), DIM), self.first_order(ids).values().sum(1, keepdim=True)
        fm = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True)
        deep = self.mlp(torch.cat([flat, numbers], dim=1))
        return (first_order + self.linear(numbers) + fm + deep).squeeze(1)


data = np.genfromtxt(sys.argv[1], delimiter=",", names=True, dtype=None)
model = DeepFM()
adagrad = torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE, initial_accumulator_value=0.1)
loss_of = nn.BCEWithLogitsLoss(reduction="sum")
for step, first in enumerate(range(0, len(data), BATCH), 1):
    batch = data[first : first + BATCH]
    numbers = torch.from_numpy(np.stack([batch[name] for name in NUMBERS], axis=1)).float()
    rows = torch.from_numpy(np.concatenate([batch[name] % ROWS for name in IDS]))
    ids = KeyedJaggedTensor(keys=IDS, values=rows, lengths=torch.ones(len(rows), dtype=torch.int64))
    loss = loss_of(model(numbers, ids), torch.from_numpy(batch["label"]).float())
    adagrad.zero_grad()
    loss.backward()
    adagrad.step()
    print(f"step {step} loss {loss.item() / BATCH:.4f}")
