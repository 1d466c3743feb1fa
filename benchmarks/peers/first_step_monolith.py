"""DeepFM with Monolith, its layers written out, in a plain PyTorch loop."""

import sys

import torch
from torch import Tensor, nn

from monolith import EmbeddingBagCollection, Feature
from monolith.data import Column, CsvSource
from monolith.features import Batch
from monolith.nn import FM
from monolith.table import Adagrad

IDS, NUMBERS = ("user", "item", "category", "city"), ("age", "price")
DIM, BATCH, LEARNING_RATE = 16, 512, 0.02


class DeepFM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rows = Adagrad(learning_rate=LEARNING_RATE)
        self.embeddings = EmbeddingBagCollection(
            [Feature(name=name, dim=DIM, optimizer=rows, bias=True, stack="ids") for name in IDS]
        )
        self.fm = FM()
        self.linear = nn.Linear(len(NUMBERS), 1)
        width = len(IDS) * DIM + len(NUMBERS)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: Batch) -> Tensor:
        rows = self.embeddings(batch)
        vectors, first_order = rows["ids"], rows["ids.bias"].sum(1)
        numbers = torch.stack([batch[name] for name in NUMBERS], dim=1)
        deep = self.mlp(torch.cat([vectors.flatten(1), numbers], dim=1))
        return (first_order + self.linear(numbers) + self.fm(vectors) + deep).squeeze(1)


columns = [Column(name=name, shape=()) for name in IDS]
columns += [Column(name=name, dtype="float32", shape=()) for name in (*NUMBERS, "label")]
model = DeepFM()
adagrad = torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE, initial_accumulator_value=0.1)
loss_of = nn.BCEWithLogitsLoss(reduction="sum")
for step, batch in enumerate(CsvSource(sys.argv[1], columns, batch_size=BATCH), 1):
    loss = loss_of(model(batch), batch["label"])
    adagrad.zero_grad()
    loss.backward()
    adagrad.step()
    model.embeddings.step()
    print(f"step {step} loss {loss.item() / BATCH:.4f}")
