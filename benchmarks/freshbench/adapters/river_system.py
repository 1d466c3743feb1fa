"""River as an online learner: logistic regression with crossed ids. Its weights are in a dict, so ids do not collide."""

from __future__ import annotations

import copy

import numpy as np

from freshbench.adapters import Serving
from freshbench.adapters.online_packages import require
from freshbench.examples import Examples, IdLists, Schema

require("river")
from river import linear_model, optim  # noqa: E402 - where it is installed is known after `require`

CROSSED = 2
"""Only the first columns are crossed."""


def features(examples: Examples) -> list[dict[tuple[object, ...], float]]:
    """Return each example as a dict of features."""
    rows: list[dict[tuple[object, ...], float]] = [
        {(number,): value for number, value in enumerate(values)} for values in examples.numbers.tolist()
    ]
    single = [(name, ids.tolist()) for name, ids in examples.ids.items() if isinstance(ids, np.ndarray)]
    for name, ids in single:
        for row, one in zip(rows, ids, strict=True):
            row[name, one] = 1.0
    for row, *crossed in zip(rows, *(ids for _, ids in single[:CROSSED]), strict=True):
        row["crossed", *crossed] = 1.0
    for name, ids in examples.ids.items():
        if isinstance(ids, IdLists):
            for number, row in enumerate(rows):
                for one in ids.values[ids.offsets[number] : ids.offsets[number + 1]].tolist():
                    row[name, one] = 1.0
    return rows


class RiverSystem:
    """Learns each example as it comes. A sync copies the model."""

    def __init__(self, schema: Schema, seed: int) -> None:
        self.model = linear_model.LogisticRegression(optimizer=optim.AdaGrad(0.1))

    def fit(self, examples: Examples) -> None:
        for row, label in zip(features(examples), examples.labels.tolist(), strict=True):
            self.model.learn_one(row, bool(label))

    def serving(self) -> Serving:
        return _Copied(self)

    def close(self) -> None:
        pass


class _Copied:
    def __init__(self, system: RiverSystem) -> None:
        self._system = system
        self._model: linear_model.LogisticRegression | None = None

    def sync(self) -> None:
        self._model = copy.deepcopy(self._system.model)

    def predict(self, examples: Examples) -> np.ndarray:
        assert self._model is not None
        return np.array([self._model.predict_proba_one(row).get(True, 0.5) for row in features(examples)])
