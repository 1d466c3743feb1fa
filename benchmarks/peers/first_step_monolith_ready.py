"""DeepFM with Monolith, from its ready models, with its trainer."""

import sys

import torch

from monolith import Head, RunConfig, Trainer
from monolith.data import Column, CsvSource
from monolith.models import DeepFM

IDS, NUMBERS = ("user", "item", "category", "city"), ("age", "price")
DIM, BATCH, LEARNING_RATE = 16, 512, 0.02

columns = [Column(name=name, shape=()) for name in IDS]
columns += [Column(name=name, dtype="float32", shape=()) for name in (*NUMBERS, "label")]
rows = {"optimizer": {"kind": "adagrad", "learning_rate": LEARNING_RATE}}
model = DeepFM(ids=IDS, numbers=NUMBERS, dim=DIM, hidden=(64, 32), feature=rows)
adagrad = torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE, initial_accumulator_value=0.1)
trainer = Trainer(model, adagrad, heads=[Head(label="label")], config=RunConfig(clip_norm=None))
for batch in CsvSource(sys.argv[1], columns, batch_size=BATCH):
    result = trainer.train_step(batch)
    print(f"step {result.step} loss {float(result.loss) / BATCH:.4f}")
