"""Area under the ROC curve over a stream, and over its most recent part.

Scores are kept as cells: an interval of scores and the weight of the positives and negatives in it. A new score is a cell of its
own, so results are exact. When there are too many cells, neighbours are merged. Pairs inside one cell, or in a cell and another
that contains it, can then no longer be ordered. They count as ties, and the weight of these pairs bounds the error.

Which neighbours merge is a q-digest (Shrivastava et al., 2004): scores are 64-bit keys, keys are leaves of a binary tree, and
every subtree lighter than a threshold becomes one cell. Cells from different moments or workers are then nested or disjoint,
never partly overlapping, so the uncertainty does not add up over merges, however long the stream is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from monolith.errors import InvalidArgumentError
from monolith.metrics.metric import Examples, Floats, Metric, require_fractions

__all__ = [
    "AUC",
    "CELL_COLUMNS",
    "Cells",
    "Keys",
    "WindowedAUC",
    "append",
    "cells_of",
    "compress",
    "in_order",
    "points",
    "score_keys",
]

Keys = npt.NDArray[np.int64]

_ALL_BITS = (1 << 64) - 1
_TINY = np.finfo(np.float64).tiny

CELL_COLUMNS = ("low", "high", "positive", "negative")


@dataclass(frozen=True, slots=True)
class Cells:
    """Columns of equal length, sorted by `low`: first and last key of a cell, weight of its positives and negatives."""

    low: Keys
    high: Keys
    positive: Floats
    negative: Floats

    def __len__(self) -> int:
        return len(self.low)

    def __getitem__(self, index: slice | npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Cells:
        return Cells(self.low[index], self.high[index], self.positive[index], self.negative[index])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of the columns by name."""
        return {name: torch.from_numpy(getattr(self, name).copy()) for name in CELL_COLUMNS}

    def area_and_error(self) -> tuple[float, float]:
        """Return the area under the ROC curve and a bound of its error. Both are NaN with one class only."""
        positives, negatives = self.positive.sum(), self.negative.sum()
        if not (positives > 0 and negatives > 0):
            return np.nan, np.nan
        by_high = np.argsort(self.high)
        below = _running(self.negative[by_high])[np.searchsorted(self.high[by_high], self.low, side="left")]
        up_to = _running(self.negative)[np.searchsorted(self.low, self.high, side="right")]
        pairs = 2 * positives * negatives
        area = self.positive @ (below + up_to) / pairs
        merged = self.low != self.high
        if not merged.any():
            return float(area), 0.0
        ties = np.where(merged, 0.0, self.negative)
        return float(area), max(0.0, float(self.positive @ (up_to - below - ties) / pairs))


def score_keys(scores: Floats) -> Keys:
    """Return integers in the order of the scores, equal where the scores are equal. Scores must not be NaN."""
    bits = (scores + 0.0).view(np.int64)  # + 0.0 turns -0.0 into 0.0
    keys: Keys = bits ^ ((bits >> 63) & np.iinfo(np.int64).max)
    return keys


def cells_of(columns: Mapping[str, npt.NDArray[np.generic]]) -> Cells:
    """Return the cells whose `tensors()` these are, if the columns are vectors of one length."""
    low, high, positive, negative = (columns[name] for name in CELL_COLUMNS)
    if not low.shape == high.shape == positive.shape == negative.shape == (low.size,):
        raise InvalidArgumentError(f"state: expected {', '.join(CELL_COLUMNS)} to be vectors of equal length")
    return Cells(low.astype(np.int64), high.astype(np.int64), positive.astype(np.float64), negative.astype(np.float64))


def points(keys: Keys, positive: Floats, negative: Floats) -> Cells:
    """Return one cell per example, in the order of the examples. `in_order` sorts them."""
    return Cells(keys, keys, positive, negative)


def append(parts: list[Cells]) -> Cells:
    """Return all cells of `parts`, one after the other."""
    return Cells(
        np.concatenate([part.low for part in parts]),
        np.concatenate([part.high for part in parts]),
        np.concatenate([part.positive for part in parts]),
        np.concatenate([part.negative for part in parts]),
    )


def in_order(parts: list[Cells]) -> Cells:
    """Return all cells of `parts` in order, equal ones summed."""
    cells = append(parts)
    # Stable: a merged cell stays before later scores equal to its lowest one, so that these are neighbours and get summed.
    cells = cells[np.argsort(cells.low, kind="stable")]
    if not len(cells):
        return cells
    repeats = (cells.low[1:] == cells.low[:-1]) & (cells.high[1:] == cells.high[:-1])
    starts = np.flatnonzero(np.append(True, ~repeats))
    return Cells(
        cells.low[starts],
        cells.high[starts],
        np.add.reduceat(cells.positive, starts),
        np.add.reduceat(cells.negative, starts),
    )


def compress(cells: Cells, most: int) -> Cells:
    """Return at most `most` (>= 4) cells, merged so that no merged cell has much of either class."""
    threshold = 4 / most
    smaller = cells
    while len(smaller) > most:
        smaller = _merge_light_subtrees(cells, threshold)
        threshold *= 2
    return smaller


def _merge_light_subtrees(cells: Cells, threshold: float) -> Cells:
    """Merge every largest subtree whose share of all positives plus share of all negatives is at most `threshold`."""
    share = cells.positive / max(cells.positive.sum(), _TINY) + cells.negative / max(cells.negative.sum(), _TINY)
    spread = (cells.low ^ cells.high).view(np.uint64)
    owner = np.arange(len(cells))
    undecided = owner.copy()
    root = (int(cells.low[0] ^ cells.high.max()) & _ALL_BITS).bit_length()
    for bits in range(root, 0, -1):
        # A cell that spans several subtrees of this height stays as it is.
        undecided = undecided[spread[undecided] >> np.uint64(bits) == 0]
        if not len(undecided):
            break
        subtree = cells.low[undecided] >> bits
        starts = np.flatnonzero(np.concatenate(([True], subtree[1:] != subtree[:-1])))
        sizes = np.diff(starts, append=len(undecided))
        light = np.repeat(np.add.reduceat(share[undecided], starts) <= threshold, sizes)
        owner[undecided[light]] = np.repeat(undecided[starts], sizes)[light]
        undecided = undecided[~light]
    kept = np.flatnonzero(owner == np.arange(len(cells)))
    high = cells.high.copy()
    np.maximum.at(high, owner, cells.high)
    return Cells(
        cells.low[kept],
        high[kept],
        np.bincount(owner, cells.positive)[kept].astype(np.float64, copy=False),
        np.bincount(owner, cells.negative)[kept].astype(np.float64, copy=False),
    )


def _running(values: Floats) -> Floats:
    return np.concatenate(([0.0], np.cumsum(values)))


_NO_CELLS = points(np.empty(0, np.int64), np.empty(0), np.empty(0))


class AUC(Metric):
    """Area under the ROC curve: how often a positive example is scored above a negative one, a tie counting half.

    Scores may be probabilities or logits, ±infinity included. Only their order counts. A label between 0 and 1 makes an
    example that much positive and the rest negative. NaN as long as one class is missing.

    Exact up to `capacity` distinct scores. Beyond that, scores close to each other count as ties, in cells that hold a
    few hundred-thousandths of the examples each: the result stays well within 1e-4 of the exact one, and `error_bound()`
    says how far off it can be at most. Memory: 64 bytes times `capacity`, 4 MiB unless set otherwise.

    Example:
        >>> metric = AUC()
        >>> metric.update([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
        >>> metric.compute()
        0.75
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        if capacity < 16:
            raise InvalidArgumentError(f"capacity: expected at least 16 scores, got {capacity}")
        self.capacity = capacity
        self.reset()

    def compute(self) -> float:
        """Return the area over all examples since the last `reset`."""
        return math.nan if self._nans else self._folded().area_and_error()[0]

    def error_bound(self) -> float:
        """Return a bound of the difference between `compute()` and the exact area. It is 0 while nothing was merged."""
        return math.nan if self._nans else self._folded().area_and_error()[1]

    def reset(self) -> None:
        """Forget all examples."""
        self._cells = _NO_CELLS
        self._pending: list[Cells] = []
        self._pending_length = 0
        self._nans = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the cells and the number of NaN predictions."""
        return {**self._folded().tensors(), "nans": torch.tensor(self._nans)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state_dict` returned, with this or another `capacity`."""
        columns = self._tensors(state, {*CELL_COLUMNS, "nans"})
        cells = cells_of(columns)
        self.reset()
        self._nans = int(columns["nans"])
        self._append(cells)

    def _add(self, examples: Examples) -> None:
        require_fractions(examples, predictions=False)
        self._nans += int(np.isnan(examples.predictions).sum())
        if not self._nans:
            positive = examples.weights * examples.labels
            self._append(points(score_keys(examples.predictions), positive, examples.weights - positive))

    def _merge(self, other: Self) -> None:
        self._nans += other._nans
        self._append(other._folded())

    def _append(self, cells: Cells) -> None:
        self._pending.append(cells)
        self._pending_length += len(cells)
        if self._pending_length >= self.capacity:
            self._folded()

    def _folded(self) -> Cells:
        """Return all examples as cells. Sorting is deferred to this point, so that many small batches are sorted once."""
        if self._pending:
            cells = in_order([self._cells, *self._pending])
            self._cells = compress(cells, self.capacity // 2) if len(cells) > self.capacity else cells
            self._pending, self._pending_length = [], 0
        return self._cells


class WindowedAUC(Metric):
    """Area under the ROC curve of the last `window` examples, exact: what a progress display shows.

    Otherwise as `AUC`. A NaN prediction makes the result NaN until it has left the window. `merge` appends the examples
    of `other` as if they had come later.

    Example:
        >>> metric = WindowedAUC(window=4)
        >>> metric.update([0.9, 0.8], [0, 0])
        >>> metric.update([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
        >>> metric.compute()
        0.75
    """

    def __init__(self, window: int = 100_000) -> None:
        if window < 1:
            raise InvalidArgumentError(f"window: expected at least 1 example, got {window}")
        self.window = window
        self.reset()

    def compute(self) -> float:
        """Return the area over the examples in the window."""
        predictions, positive, negative = self._columns()
        if np.isnan(predictions).any():
            return math.nan
        return in_order([points(score_keys(predictions), positive, negative)]).area_and_error()[0]

    def reset(self) -> None:
        """Forget all examples."""
        self._batches: deque[np.ndarray] = deque()
        self._held = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the examples in the window, oldest first: prediction, weight as positive, weight as negative [3, n]."""
        return {"examples": torch.from_numpy(self._columns())}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state_dict` returned. Of a longer window, the most recent part is kept."""
        examples = self._tensors(state, {"examples"})["examples"].astype(np.float64)
        if examples.ndim != 2 or len(examples) != 3:
            raise InvalidArgumentError(f"examples: expected shape [3, n], got {list(examples.shape)}")
        self.reset()
        self._append(examples)

    def _add(self, examples: Examples) -> None:
        require_fractions(examples, predictions=False)
        positive = examples.weights * examples.labels
        self._append(np.stack([examples.predictions, positive, examples.weights - positive]))

    def _merge(self, other: Self) -> None:
        self._append(other._columns())

    def _append(self, examples: np.ndarray) -> None:
        self._batches.append(examples[:, -self.window :])
        self._held += self._batches[-1].shape[1]
        while self._held > self.window:
            excess = self._held - self.window
            oldest = self._batches.popleft()
            self._held -= min(excess, oldest.shape[1])
            if oldest.shape[1] > excess:
                self._batches.appendleft(oldest[:, excess:])

    def _columns(self) -> np.ndarray:
        return np.concatenate([np.empty((3, 0)), *self._batches], axis=1)
