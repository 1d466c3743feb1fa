"""The paper's simulation: batch training, then shard by shard: sync, answer the shard from the serving copy, train on it.

Training does not depend on when a serving copy is synced. So one system is trained once and has a serving copy for every
interval, unless it says that it cannot. The scores are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from freshbench.adapters import Factory, Serving, System
from freshbench.examples import DataSet, Examples
from monolith.metrics import AUC

BATCH_SHARE = 5 / 7
"""The paper: five of seven days are batch training."""
BATCH_ONLY = 1
"""One sync, before the online part."""
PREDICTED_ROWS = 4096


@dataclass(frozen=True)
class Run:
    """The scores of one system and seed: float [online events] for every number of syncs."""

    scores: dict[int, np.ndarray]
    labels: np.ndarray

    def auc(self, syncs: int, slices: int) -> np.ndarray:
        """Return the AUC of each of `slices` consecutive parts, float [slices]."""
        return aucs(self.labels, self.scores[syncs], slices)


def aucs(labels: np.ndarray, scores: np.ndarray, slices: int) -> np.ndarray:
    """Return the AUC of each of `slices` consecutive parts of equal size. NaN where all labels are the same."""
    found = []
    for first, end in itertools.pairwise(cuts(len(labels), slices)):
        metric = AUC()
        metric.update(torch.from_numpy(_ranks(scores[first:end])), torch.from_numpy(labels[first:end]))
        found.append(metric.compute())
    return np.array(found)


def _ranks(scores: np.ndarray) -> np.ndarray:
    """Map scores to (0, 1) in the same order: AUC needs no more, and other systems have logits."""
    if not np.isfinite(scores).all():
        raise ValueError(f"scores: expected finite numbers, got {scores[~np.isfinite(scores)][0]}")
    distinct, place = np.unique(scores, return_inverse=True)
    return (place + 0.5) / len(distinct)


def cuts(size: int, parts: int) -> list[int]:
    """Return where `parts` consecutive parts of about equal size begin, and the end."""
    return [size * part // parts for part in range(parts + 1)]


def simulate(
    make: Factory,
    data: DataSet,
    seed: int,
    syncs: Sequence[int],
    *,
    tell: Callable[[int], None] = lambda events: None,
) -> Run:
    """Train a system on the batch part and then on the rest, and answer that from copies with each number of `syncs`.

    Args:
        make: Makes the system.
        data: Events in the order of time.
        seed: Of the system.
        syncs: How often each serving copy is synced during the online part. 1 is batch training alone. Every shard of every copy
            ends a batch, so that all systems train on the same batches.
        tell: Called with the number of events that were trained.
    """
    probe = make(data.schema, seed)
    limit, copies = getattr(probe, "max_syncs", None), getattr(probe, "copies", len(syncs))
    probe.close()
    kept = [number for number in syncs if limit is None or number <= limit]
    scores: dict[int, np.ndarray] = {}
    for group in (kept[first : first + copies] for first in range(0, len(kept), copies)):
        system = make(data.schema, seed)
        try:
            scores |= _run(system, data, group, syncs, tell)
        finally:
            system.close()
    first = round(len(data.examples) * BATCH_SHARE)
    return Run(scores, data.examples.labels[first:])


def _run(
    system: System, data: DataSet, syncs: Sequence[int], every: Sequence[int], tell: Callable[[int], None]
) -> dict[int, np.ndarray]:
    first = round(len(data.examples) * BATCH_SHARE)
    train(system, data.examples.between(0, first), data.batch_size, tell)
    online = data.examples.between(first, len(data.examples))
    copies = {number: system.serving() for number in syncs}
    due = {number: set(cuts(len(online), number)[:-1]) for number in syncs}
    ends = sorted({place for number in every for place in cuts(len(online), number)})
    scores: dict[int, list[np.ndarray]] = {number: [] for number in syncs}
    for begin, end in itertools.pairwise(ends):
        part = online.between(begin, end)
        for number, copy in copies.items():
            if begin in due[number]:
                copy.sync()
            scores[number].append(answers(copy, part))
        train(system, part, data.batch_size, tell)
    return {number: np.concatenate(parts) for number, parts in scores.items()}


def train(
    system: System, examples: Examples, batch_size: int, tell: Callable[[int], None] = lambda events: None
) -> None:
    """Let a system learn from events, batch by batch."""
    for batch in examples.batches(batch_size):
        system.fit(batch)
        tell(len(batch))


def answers(copy: Serving, examples: Examples) -> np.ndarray:
    """Return the scores of a serving copy, which does not see the labels."""
    asked = examples.without_labels()
    found = np.concatenate([copy.predict(batch) for batch in asked.batches(PREDICTED_ROWS)])
    if found.shape != (len(examples),):
        raise ValueError(f"predict: expected a score for each of {len(examples)} examples, got shape {found.shape}")
    return found
