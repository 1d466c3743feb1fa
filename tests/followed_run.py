"""A run in a thread, made step by step, whose predictions tests compare with those of a replica."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import nn

from followed_tables import until
from monolith import Estimator, Feature, RunConfig
from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.nn import EmbeddingBagCollection
from monolith.nn.heads import Head
from monolith.serve import Predictor, export_model, load
from monolith.train.hooks.hook import Hook

PROBE = {"user_id": torch.arange(50), "item_id": torch.arange(50)}
HEADS = [Head(name="click", label="label")]


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection([Feature(name="user_id", dim=4), Feature(name="item_id", dim=4)])
        self.norm = nn.BatchNorm1d(8)
        self.dense = nn.Linear(8, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = self.embeddings(batch)
        return self.dense(self.norm(torch.cat([rows["user_id"], rows["item_id"]], dim=1))).squeeze(1)


class Gate(Hook):
    """Lets the run make steps when the test says so."""

    def __init__(self) -> None:
        self.allowed = threading.Semaphore(0)
        self.made = 0

    def before_step(self, trainer: object) -> None:
        assert self.allowed.acquire(timeout=240)

    def after_step(self, trainer: object, result: object) -> None:
        self.made += 1


class Run:
    """A run in a thread, made step by step."""

    def __init__(self, folder: Path, batches: int = 60) -> None:
        torch.manual_seed(0)
        self.folder, self.gate, self.total = folder, Gate(), batches
        config = RunConfig(model_dir=str(folder), feed_secs=0.01, feed_dense_secs=0.01, log_flush_secs=0.01)
        self.model = Clicks()
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.estimator = Estimator(self.model, config, optimizer=optimizer, heads=HEADS)
        data = ClickStream(ClickStreamConfig(users=50, items=50, batches=batches, batch_size=64))
        self.thread = threading.Thread(target=lambda: self.estimator.train(data, hooks=[self.gate]))

    def start(self) -> Run:
        self.thread.start()
        return self

    def steps(self, count: int) -> None:
        wanted = self.gate.made + count
        for _ in range(count):
            self.gate.allowed.release()
        until(lambda: self.gate.made == wanted)

    def finish(self) -> None:
        for _ in range(self.total + 1):
            self.gate.allowed.release()
        self.thread.join(240)

    def predictions(self) -> list[float]:
        self.model.eval()
        with torch.no_grad():
            found = torch.sigmoid(self.model(PROBE))
        self.model.train()
        return found.tolist()


def exported(run: Run, folder: Path) -> Predictor:
    return load(export_model(run.model, PROBE, folder, heads=HEADS))


def equal(predictor: Predictor, run: Run) -> bool:
    found = predictor.predict(PROBE)["click"]
    return bool(torch.allclose(found, torch.tensor(run.predictions()), atol=1e-6, rtol=0))
