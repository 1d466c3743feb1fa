"""The interface of all metrics, and the checks they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from monolith.errors import InvalidArgumentError
from monolith.table.arrays import Ids, id_array

__all__ = ["Examples", "Floats", "Metric", "Numbers", "SumMetric", "require_fractions"]

Floats = npt.NDArray[np.float64]
Numbers = torch.Tensor | np.ndarray | Sequence[float]


@dataclass(frozen=True, slots=True)
class Examples:
    """The examples of one update after the checks: columns of equal length without the examples of weight 0."""

    predictions: Floats
    labels: Floats
    weights: Floats
    groups: npt.NDArray[np.int64] | None


class Metric(ABC):
    """A number over a stream of examples, kept up to date in bounded memory.

    An example is a prediction, a label, a weight (1 unless given) and, for metrics that compare within groups, an int64 group
    id. Other metrics ignore it, so one call can feed them all. The columns are tensors or arrays [n] or [n, 1]. An example of
    weight 0 does not count, whatever its prediction and label are: mask with it.

    A NaN prediction makes the result NaN until `reset`, so that a broken model never shows a good number. With no examples
    the result is NaN. A label that is not finite, a weight that is negative or not finite, and columns of unequal length are
    `InvalidArgumentError`, and the metric is unchanged. Workers sum up by `merge`. Calls must not overlap.

    Example:
        >>> from monolith.metrics import AUC
        >>> one, other = AUC(), AUC()
        >>> one.update(torch.tensor([0.2, 0.7]), torch.tensor([0, 1]))
        >>> other.update(torch.tensor([0.6, 0.5]), torch.tensor([0, 1]))
        >>> one.merge(other)
        >>> one.compute()
        0.75
        >>> resumed = AUC()
        >>> resumed.load_state_dict(one.state_dict())
        >>> resumed.compute()
        0.75
    """

    def update(
        self,
        predictions: Numbers,
        labels: Numbers,
        weights: Numbers | None = None,
        groups: Ids | None = None,
    ) -> None:
        """Add a batch of examples."""
        self._add(_check(predictions, labels, weights, groups))

    @abstractmethod
    def compute(self) -> float:
        """Return the metric over all examples since the last `reset`."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all examples."""

    def merge(self, other: Self) -> None:
        """Add the examples of `other`, a metric of the same class and settings. `other` does not change."""
        if type(other) is not type(self):
            raise InvalidArgumentError(f"other: expected {type(self).__name__}, got {type(other).__name__}")
        self._merge(other)

    @abstractmethod
    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return everything seen so far, as tensors on the CPU that later updates do not change."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state_dict` of a metric with the same settings returned."""

    @abstractmethod
    def _add(self, examples: Examples) -> None: ...

    @abstractmethod
    def _merge(self, other: Self) -> None: ...

    def _tensors(self, state: Mapping[str, torch.Tensor], expected: set[str]) -> dict[str, npt.NDArray[np.generic]]:
        """Return copies of the values of `state`, which must have exactly the keys `expected`."""
        if set(state) != expected:
            raise InvalidArgumentError(
                f"{type(self).__name__}.load_state_dict: expected keys {sorted(expected)}, got {sorted(state)}"
            )
        return {key: value.detach().cpu().numpy().copy() for key, value in state.items()}


class SumMetric(Metric):
    """A metric computed from a few sums over the examples, kept in float64."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._sums = np.zeros(shape)

    @abstractmethod
    def _terms(self, examples: Examples) -> Floats:
        """Return what `examples` add to the sums."""

    def reset(self) -> None:
        """Forget all examples."""
        self._sums = np.zeros_like(self._sums)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the sums and the settings that give them their meaning."""
        return {"sums": torch.from_numpy(self._sums.copy()), **self._settings()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state_dict` of a metric with the same settings returned."""
        sums = self._tensors(state, {"sums", *self._settings()})["sums"]
        self._require_same_settings(state)
        if sums.shape != self._sums.shape:
            raise InvalidArgumentError(
                f"{type(self).__name__}: expected sums of shape {list(self._sums.shape)}, got {list(sums.shape)}"
            )
        self._sums = sums.astype(np.float64)

    def _settings(self) -> dict[str, torch.Tensor]:
        """Return the settings that two metrics must share for their sums to be added."""
        return {}

    def _require_same_settings(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, value in self._settings().items():
            if not torch.equal(value, state[name]):
                raise InvalidArgumentError(
                    f"{type(self).__name__}: expected {name} {value.tolist()}, got {state[name].tolist()}; "
                    "only metrics with the same settings can be combined"
                )

    def _add(self, examples: Examples) -> None:
        self._sums = self._sums + self._terms(examples)

    def _merge(self, other: Self) -> None:
        self._require_same_settings(other.state_dict())
        self._sums = self._sums + other._sums


def require_fractions(examples: Examples, *, predictions: bool) -> None:
    """Refuse labels outside [0, 1] and, with `predictions`, predictions outside it. NaN predictions pass."""
    columns = [("labels", examples.labels, "for classification a label is 0, 1 or a fraction between")]
    if predictions:
        columns.append(("predictions", examples.predictions, "pass probabilities: torch.sigmoid(logits)"))
    for name, values, advice in columns:
        outside = (values < 0) | (values > 1)
        if outside.any():
            raise InvalidArgumentError(f"{name}: expected numbers in [0, 1], got {values[outside][0]:g}; {advice}")


def _check(predictions: Numbers, labels: Numbers, weights: Numbers | None, groups: Ids | None) -> Examples:
    predicted = _column(predictions, "predictions")
    labelled = _column(labels, "labels", len(predicted))
    if weights is None:
        weighted, counted = np.ones(len(predicted)), None
    else:
        weighted = _column(weights, "weights", len(predicted))
        if not (np.isfinite(weighted) & (weighted >= 0)).all():
            raise InvalidArgumentError("weights: expected finite numbers >= 0, got a negative, infinite or NaN weight")
        counted = None if weighted.all() else weighted > 0
    grouped = None if groups is None else id_array(groups, "groups").reshape(-1)
    if grouped is not None and len(grouped) != len(predicted):
        raise InvalidArgumentError(f"groups: expected {len(predicted)} ids as in predictions, got {len(grouped)}")
    if counted is not None:
        predicted, labelled, weighted = predicted[counted], labelled[counted], weighted[counted]
        grouped = None if grouped is None else grouped[counted]
    if not np.isfinite(labelled).all():
        raise InvalidArgumentError("labels: expected finite numbers; give examples without a label the weight 0")
    return Examples(predicted, labelled, weighted, grouped)


def _column(values: Numbers, name: str, rows: int | None = None) -> Floats:
    tensor = values.detach() if isinstance(values, torch.Tensor) else torch.from_numpy(_array(values, name))
    if tensor.ndim == 2 and tensor.shape[1] == 1:
        tensor = tensor[:, 0]
    if tensor.ndim != 1:
        raise InvalidArgumentError(f"{name}: expected shape [n] or [n, 1], got {list(tensor.shape)}")
    if rows is not None and len(tensor) != rows:
        raise InvalidArgumentError(f"{name}: expected {rows} numbers as in predictions, got {len(tensor)}")
    column: Floats = tensor.to(device="cpu", dtype=torch.float64).numpy()
    return column


def _array(values: np.ndarray | Sequence[float], name: str) -> npt.NDArray[np.generic]:
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise InvalidArgumentError(f"{name}: expected numbers, got an array of {array.dtype}")
    return array
