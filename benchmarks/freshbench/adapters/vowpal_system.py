"""Vowpal Wabbit as an online learner: a linear model with crossed features, hashed into 2**22 weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from freshbench.adapters import Serving
from freshbench.adapters.online_packages import require
from freshbench.examples import Examples, IdLists, Schema

require("vowpalwabbit")
from vowpalwabbit import pyvw  # noqa: E402 - where it is installed is known after `require`

OPTIONS = "--quiet --loss_function logistic -b 22 --link identity"
CROSSED = 4
"""Only the first columns are crossed: all pairs of 26 would be 325 features an example."""


def lines(examples: Examples) -> Iterator[str]:
    """Yield each example in VW's text format: a namespace for each column, from `a` on."""
    columns = [
        (chr(ord("a") + number), ids.values.tolist(), ids.offsets.tolist())
        if isinstance(ids, IdLists)
        else (chr(ord("a") + number), ids.tolist(), range(len(ids) + 1))
        for number, ids in enumerate(examples.ids.values())
    ]
    labels = ["1 " if label else "-1 " for label in examples.labels.tolist()] or [""] * len(examples)
    numbers = examples.numbers.tolist()
    for row, label in enumerate(labels):
        ids = " ".join(f"|{name} {' '.join(map(str, v[o[row] : o[row + 1]]))}" for name, v, o in columns)
        yield f"{label}{ids} |Z {' '.join(f'{n}:{value:.5g}' for n, value in enumerate(numbers[row]))}"


class VowpalSystem:
    """Learns each example as it comes. A sync saves the model and loads it."""

    def __init__(self, schema: Schema, seed: int) -> None:
        names = [chr(ord("a") + number) for number in range(len(schema.columns))][:CROSSED]
        pairs = " ".join(f"-q {a}{b}" for n, a in enumerate(names) for b in names[n + 1 :])
        self.model = pyvw.Workspace(f"{OPTIONS} {pairs} --random_seed {seed}")

    def fit(self, examples: Examples) -> None:
        for line in lines(examples):
            self.model.learn(line)

    def serving(self) -> Serving:
        return _Loaded(self)

    def close(self) -> None:
        self.model.finish()


class _Loaded:
    def __init__(self, system: VowpalSystem) -> None:
        self._system = system
        self._model: pyvw.Workspace | None = None

    def sync(self) -> None:
        if self._model is not None:
            self._model.finish()
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model")
            self._system.model.save(path)
            self._model = pyvw.Workspace(f"--quiet -t -i {path}")

    def predict(self, examples: Examples) -> np.ndarray:
        assert self._model is not None
        return np.array([self._model.predict(line) for line in lines(examples)])
