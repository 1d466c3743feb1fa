"""A model in a `Trainer` that saves every few steps, writes its log more often, and continues by itself.

Its loss is a plain sum, so that gradients do not depend on weights: each record adds known numbers to known rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch._dynamo  # torch.optim imports it at its first use, which takes seconds: better once, before the runs fork
from torch import Tensor, nn

from comparison import assert_same_rows, initial_rows
from monolith import EmbeddingTable
from monolith.features import Batch, Feature
from monolith.nn import EmbeddingBagCollection
from monolith.state.index import read_checkpoint_state, read_patiently
from monolith.table import SGD, Adagrad, Zeros
from monolith.train import Head, RunConfig, StepResult, Trainer
from monolith.train.hooks import Hook
from oracle import DictTable

ROWS = 6
FIRST_SECOND = 1_700_000_000


class Counting(nn.Module):
    """`user` counts its records, `item` and `weights` add what the record says."""

    heads = (Head(name="none", label="label", kind="regression"),)

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(
            [
                Feature(name="user", dim=4, initializer=Zeros(), optimizer=SGD(learning_rate=1.0)),
                Feature(name="item", dim=3, optimizer=Adagrad(learning_rate=0.5)),
            ]
        )
        self.weights = nn.Parameter(torch.zeros(2))
        self._rows: dict[str, Any] = {}

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        self._rows = self.embeddings(batch)
        return torch.zeros(ROWS)

    def extra_loss(self, batch: Mapping[str, Any], logits: Mapping[str, Tensor]) -> Tensor:
        """Minus the sum of what is to be added."""
        users, items = self._rows["user"].sum(), (self._rows["item"] * batch["amounts"]).sum()
        return -(users + items + (self.weights * batch["numbers"]).sum())


def record(number: int) -> Batch:
    """Batch `number` of an endless stream."""
    chance = np.random.default_rng(number)
    return {
        "user": torch.from_numpy(chance.integers(0, 50, ROWS)),
        "item": torch.from_numpy(chance.integers(0, 2**40, ROWS) if number % 3 else chance.integers(0, 20, ROWS)),
        "amounts": torch.from_numpy(chance.integers(-3, 4, (ROWS, 3)).astype(np.float32)),
        "numbers": torch.from_numpy(chance.integers(0, 5, (ROWS, 2)).astype(np.float32)),
        "label": torch.zeros(ROWS),
        "time": torch.full((ROWS,), FIRST_SECOND + number),
    }


class Records:
    """The stream, which knows its place."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.next += 1
            yield record(self.next - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]


class Oracle:
    """The tables and the dense weights after any number of records, by the formulas."""

    def __init__(self) -> None:
        self._configs = Counting().embeddings.store.configs()
        self._initial = {name: initial_rows(config) for name, config in self._configs.items()}
        self._start()

    def at(self, step: int) -> tuple[dict[str, DictTable], np.ndarray]:
        """After `step` records."""
        if step < self._step:
            self._start()
        while self._step < step:
            batch, now = record(self._step), FIRST_SECOND + self._step
            users, items = batch["user"].numpy(), batch["item"].numpy()
            self._tables["user"].apply_gradients(users, np.full((ROWS, 4), -1, np.float32), event_time=now)
            self._tables["item"].apply_gradients(items, -batch["amounts"].numpy(), event_time=now)
            self._weights = self._weights + batch["numbers"].numpy().sum(axis=0)
            self._step += 1
        return self._tables, self._weights

    def _start(self) -> None:
        self._step, self._weights = 0, np.zeros(2, np.float32)
        self._tables = {name: DictTable(config, self._initial[name]) for name, config in self._configs.items()}


class Announce(Hook):
    """Says what the index of checkpoints names: that is what the trainer has promised to keep."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir, self._said = model_dir, 0

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.look()

    def look(self) -> None:
        """Say it if it is new."""
        state = read_checkpoint_state(self._model_dir)
        kept = 0 if state is None else int(state.model_checkpoint_path.rpartition("-")[2])
        if kept > self._said:
            self._said = kept
            sys.stdout.write(f"kept {kept}\n")
            sys.stdout.flush()


def _trainer(model_dir: Path, *hooks: Hook) -> Trainer:
    model = Counting()
    config = RunConfig(
        model_dir=str(model_dir),
        clip_norm=None,
        event_time="time",
        save_checkpoints_steps=5,
        checkpoints_max_to_keep=2,
        log_flush_secs=1e-6,
        ignore_save_errors=True,
    )
    return Trainer(model, torch.optim.SGD([model.weights], lr=1.0), config=config, hooks=hooks)


def main(arguments: list[str]) -> None:
    """Train to the last step."""
    model_dir = Path(arguments[0], "model")
    announce = Announce(model_dir)
    _trainer(model_dir, announce).fit(Records(), max_steps=int(arguments[1]))
    announce.look()


@cache
def _oracle() -> Oracle:
    return Oracle()


def check(folder: Path, least: int) -> int:
    """Everything the trainer would continue with is of one step."""
    trainer = _trainer(folder / "model")
    # An index that cannot be read is read again after a while; nobody is replacing this one.
    with patch("monolith.train.restoring.read_patiently", partial(read_patiently, sleep=lambda _: None)):
        trainer.restore()
    step = trainer.step
    assert step >= least, f"restored step {step}, but {least} had been kept"
    tables, weights = _oracle().at(step)
    assert np.array_equal(trainer.model.weights.detach().numpy(), weights)
    for name, table in trainer.model.embeddings.store.tables.items():
        assert isinstance(table, EmbeddingTable)
        assert_same_rows(table, tables[name], {*table, *tables[name].rows}, rtol=1e-5, atol=1e-6)
    source = trainer.state_dict()["source"]
    assert source == ({"next": step} if step else None), source
    return step
