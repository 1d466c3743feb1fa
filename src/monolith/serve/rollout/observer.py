"""`ServedQuality`: remembers what was answered, joins labels with it, and counts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from monolith.errors import ModelNotFoundError
from monolith.serve.repository import ModelRepository
from monolith.serve.rollout.labels import PredictionMemory, ServedLabel
from monolith.serve.rollout.quality import QualityBoard
from monolith.serve.server.routing import Answered

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["ServedQuality"]

_KINDS = ("joined", "repeated", "late", "unknown", "invalid")
_MAX_KNOWN_VERSIONS = 256


class ServedQuality:
    """The quality of all versions that a server answers with, by labels. An `Observer`. Thread-safe.

    Example:
        >>> served = ServedQuality(ModelRepository(), PredictionMemory(), clock=lambda: 0.0)
        >>> served.add([ServedLabel(request_id="r-1", label=1.0)])
        ({'joined': 0, 'repeated': 0, 'late': 0, 'unknown': 1, 'invalid': 0}, set())
    """

    def __init__(self, repository: ModelRepository, memory: PredictionMemory, *, clock: Callable[[], float]) -> None:
        self._repository, self._clock = repository, clock
        self.memory = memory
        self.board = QualityBoard()
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._heads: dict[tuple[str, int], tuple[str, ...]] = {}

    def answered(self, answered: Answered) -> None:
        """Remember the predictions of an answer until its labels come."""
        model, version = answered.model, answered.version
        if answered.status != "ok":
            if answered.shadow:
                what = "dropped_shadows" if answered.status == "overloaded" else "failed_shadows"
                self.count(what, model, version)
            return
        self.count("shadows" if answered.shadow else "answers", model, version)
        heads = self._heads_of(model, version)
        if not heads or any(head not in answered.outputs for head in heads):
            return
        if not answered.request_id:
            self.count("answers_without_id", model, version)
            return
        values = np.array([_vector(answered.outputs[head]) for head in heads], dtype=np.float32)  # a copy
        compared = self.memory.add(model, version, answered.request_id, heads, values, shadow=answered.shadow)
        for shadow, distances in compared:
            self.board.compare(model, shadow, distances)

    def add(self, labels: Iterable[ServedLabel]) -> tuple[dict[str, int], set[str]]:
        """Join labels. Returns the number of each kind, see `PredictionMemory.join`, and the models that have new ones."""
        batches, counts = self.memory.join(labels)
        touched = self.board.add(batches, self._clock())
        return {kind: counts.get(kind, 0) for kind in _KINDS}, touched

    def count(self, what: str, model: str, version: int | str = "") -> None:
        """Count something that happened to a version."""
        with self._lock:
            self._counts[what, model, str(version)] += 1

    def counters(self) -> dict[tuple[str, str, str], int]:
        """Return all counts by (what, model, version). Those of labels and remembered requests have no model and version."""
        with self._lock:
            return {**self._counts, **{(what, "", ""): number for what, number in self.memory.counts.items()}}

    def answers(self, model: str) -> dict[str, int]:
        """Return how many requests each version of a model has answered."""
        with self._lock:
            return {key[2]: number for key, number in self._counts.items() if key[:2] == ("answers", model)}

    def _heads_of(self, model: str, version: int) -> tuple[str, ...]:
        """Return the heads whose predictions are probabilities."""
        known = self._heads.get((model, version))
        if known is not None:
            return known
        try:
            outputs = self._repository.get(model, version).signature.outputs
        except ModelNotFoundError:  # removed since it answered
            return ()
        heads = tuple(output.name for output in outputs if output.kind == "binary" and output.shape in ((), (1,)))
        if len(self._heads) >= _MAX_KNOWN_VERSIONS:
            self._heads = {}
        self._heads[model, version] = heads
        return heads


def _vector(values: Tensor) -> npt.NDArray[np.float32]:
    if values.requires_grad or values.dtype is not torch.float32 or values.device.type != "cpu":
        values = values.detach().cpu().float()
    return values.numpy().reshape(-1)
