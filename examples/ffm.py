"""The original's test model: a field-aware factorization machine on 64 generated examples.

It trains, evaluates, predicts, exports, and loads the export. Each id has a separate vector for each slot that it is crossed
with. A prediction is the sum of the dot products of the crossed slots and of the biases of the user's slots.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from monolith.features import Feature, Ragged
from monolith.features.batch import Batch
from monolith.nn import EmbeddingBagCollection
from monolith.serve import load
from monolith.table import SGD, Ftrl, Segment, Zeros
from monolith.train import Estimator, Head, RunConfig

NUM_SLOTS, VOCAB, NUM_EXAMPLES, BATCH = 6, 5, 64, 64
FFM_SLOTS = ((0, 3, 16), (0, 4, 16), (1, 5, 16), (2, 3, 16), (2, 5, 16))
"""(user slot, item slot, dim) of each cross."""
BIASED = range(3)
"""The first half of the slots has a bias."""


def examples(count: int = NUM_EXAMPLES, seed: int = 0) -> Batch:
    """Return `count` rows with one or two ids per slot, for slot i in [5i, 5i + 5). All labels are 0, as in the original."""
    random = np.random.default_rng(seed)
    batch: Batch = {"label": torch.zeros(count)}
    for slot in range(NUM_SLOTS):
        rows = [random.integers(VOCAB * slot, VOCAB * (slot + 1), size=random.integers(1, 3)) for _ in range(count)]
        batch[f"slot_{slot}"] = Ragged.from_lists([row.tolist() for row in rows])
    return batch


class FFM(nn.Module):
    """Logit = sum of <v_u, v_i> over the crosses + sum of the biases; it has no other parameters than its rows."""

    heads = (Head(name="ctr", label="label"),)

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection([_feature(slot) for slot in range(NUM_SLOTS)], seed=seed)

    def forward(self, batch: Batch) -> Tensor:
        rows = self.embeddings(batch)
        # The vectors of a slot follow each other in its row, in the order of FFM_SLOTS.
        crossed = {slot: iter(rows[f"slot_{slot}"].split(_dims(slot), dim=1)) for slot in range(NUM_SLOTS)}
        dots = [(next(crossed[user]) * next(crossed[item])).sum(1) for user, item, _ in FFM_SLOTS]
        biases = [rows[f"slot_{slot}.bias"].squeeze(1) for slot in BIASED]
        return torch.stack(dots + biases).sum(0)

    def input_fn(self, mode: str) -> Iterable[Batch]:
        """Return the same 64 examples, repeated for training and once otherwise."""
        return [examples()] * (1000 if mode == "train" else 1)


def _dims(slot: int) -> list[int]:
    return [dim for user, item, dim in FFM_SLOTS if slot in (user, item)]


def _feature(slot: int) -> Feature:
    return Feature(
        name=f"slot_{slot}",
        slot=slot,
        segments=tuple(Segment(dim=dim, optimizer=SGD(learning_rate=0.1)) for dim in _dims(slot)),
        bias=Segment(dim=1, initializer=Zeros(), optimizer=Ftrl(learning_rate=0.1)) if slot in BIASED else False,
    )


def main(steps: int, model_dir: str) -> None:
    estimator = Estimator(FFM(), RunConfig(model_dir=model_dir))
    before = estimator.evaluate()["ctr/loss"]
    step = estimator.train(steps=steps)
    after = estimator.evaluate()["ctr/loss"]
    print(f"step {step}: loss {before:.4f} before, {after:.4f} after; {rows(estimator)} rows")

    first = next(estimator.predict())["ctr"]
    folder = estimator.export_saved_model()
    served = load(folder).predict(examples())["ctr"][0]
    print(f"first prediction: {first:.6f} by the model, {served:.6f} by its export")


def rows(estimator: Estimator) -> int:
    return sum(table.rows for table in estimator.trainer.table_stats().values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--model-dir", help="kept, and continued next time; a temporary folder by default")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        main(arguments.steps, arguments.model_dir or temporary)
