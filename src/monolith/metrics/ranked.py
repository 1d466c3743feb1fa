"""Scores with the weight of positives and negatives at each: what areas under ROC curves are computed from.

A cell is an interval of scores and the weights found in it. A new score is a cell of its own, so results are exact; when
there are too many cells, neighbours are merged, and pairs inside one cell, or in a cell and another that contains it,
can no longer be told apart. They count as ties, and the weight of these pairs bounds the error.

Which neighbours merge is a q-digest (Shrivastava et al., 2004): scores are 64-bit keys, keys are leaves of a binary tree, and
every subtree lighter than a threshold becomes one cell. Cells from different moments or workers are then nested or apart,
never overlapping by halves, so however long the stream, uncertainty does not add up over merges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from monolith.errors import InvalidArgumentError
from monolith.metrics.metric import Floats

__all__ = ["CELL_COLUMNS", "Cells", "Keys", "append", "cells_of", "compress", "in_order", "points", "score_keys"]

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
        """Copies of the columns by name."""
        return {name: torch.from_numpy(getattr(self, name).copy()) for name in CELL_COLUMNS}

    def area_and_error(self) -> tuple[float, float]:
        """The area under the ROC curve and how far at most it is from that of the scores; NaN with one class only."""
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
    """Integers in the order of the scores, equal where the scores are. NaN has no place in it."""
    bits = (scores + 0.0).view(np.int64)  # + 0.0 turns -0.0 into 0.0
    keys: Keys = bits ^ ((bits >> 63) & np.iinfo(np.int64).max)
    return keys


def cells_of(columns: Mapping[str, npt.NDArray[np.generic]]) -> Cells:
    """The cells whose `tensors()` these are; columns that are not vectors of one length are refused."""
    low, high, positive, negative = (columns[name] for name in CELL_COLUMNS)
    if not low.shape == high.shape == positive.shape == negative.shape == (low.size,):
        raise InvalidArgumentError(f"state: expected {', '.join(CELL_COLUMNS)} to be vectors of equal length")
    return Cells(low.astype(np.int64), high.astype(np.int64), positive.astype(np.float64), negative.astype(np.float64))


def points(keys: Keys, positive: Floats, negative: Floats) -> Cells:
    """One cell per example, in the order of the examples; `in_order` sorts them."""
    return Cells(keys, keys, positive, negative)


def append(parts: list[Cells]) -> Cells:
    """All cells of `parts`, one after the other."""
    return Cells(
        np.concatenate([part.low for part in parts]),
        np.concatenate([part.high for part in parts]),
        np.concatenate([part.positive for part in parts]),
        np.concatenate([part.negative for part in parts]),
    )


def in_order(parts: list[Cells]) -> Cells:
    """All cells of `parts` in order, equal ones summed."""
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
    """At most `most` (>= 4) cells, merged so that no merged cell has much of either class."""
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
