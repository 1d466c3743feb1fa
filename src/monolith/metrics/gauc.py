"""Area under the ROC curve within groups, such as the items shown to one user."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from monolith.errors import InvalidArgumentError
from monolith.metrics.auc import CELL_COLUMNS, Cells, Keys, append, cells_of, compress, in_order, points, score_keys
from monolith.metrics.metric import Examples, Metric, require_fractions

__all__ = ["GAUC"]


class GAUC(Metric):
    """Group AUC: Σ w_g AUC_g / Σ w_g over groups g with both classes, w_g the weight of the group's examples (impressions).

    `update` needs `groups`, int64 ids such as users. The rest is as in `AUC`. NaN while no group has both classes.

    Exact up to `capacity` examples. Beyond that it is computed from a sample of the groups: half of them, chosen by a hash
    of their id, are left out as often as needed, with all their examples, past and future. `sampled_fraction()` is the share of
    groups that are left, and the error is that of a mean over so many groups. All workers leave out the same groups, so `merge`
    is as good as one stream. A group with more than a 16th of `capacity` scores keeps them merged, as `AUC` does. Memory: about
    72 bytes times `capacity`, 72 MiB unless set otherwise, and as much again while sorting.

    Example:
        >>> metric = GAUC()
        >>> metric.update([0.9, 0.1, 0.3, 0.2], [1, 0, 0, 1], groups=[7, 7, 8, 8])
        >>> metric.compute()
        0.5
    """

    def __init__(self, capacity: int = 1 << 20) -> None:
        if capacity < 256:
            raise InvalidArgumentError(f"capacity: expected at least 256 examples, got {capacity}")
        self.capacity = capacity
        self.reset()

    def compute(self) -> float:
        """Return the mean over groups since the last `reset`."""
        self._fold()
        return math.nan if self._nans else _mean_area(self._groups, self._cells)

    def sampled_fraction(self) -> float:
        """Return the fraction of groups that the result is computed from. It is 1 while all are."""
        self._fold()
        return math.ldexp(1.0, -self._halvings)

    def reset(self) -> None:
        """Forget all examples and sample all groups again."""
        self._groups: Keys = np.empty(0, np.int64)
        self._cells = points(self._groups, np.empty(0), np.empty(0))
        self._pending: list[tuple[Keys, Cells]] = []
        self._pending_length = 0
        self._halvings = 0
        self._nans = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the scores held by group, the sampling and the number of NaN predictions."""
        self._fold()
        return {
            "group": torch.from_numpy(self._groups.copy()),
            **self._cells.tensors(),
            "halvings": torch.tensor(self._halvings),
            "nans": torch.tensor(self._nans),
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state_dict` returned, with this or another `capacity`."""
        columns = self._tensors(state, {"group", *CELL_COLUMNS, "halvings", "nans"})
        cells, group = cells_of(columns), columns["group"].astype(np.int64)
        if group.shape != cells.low.shape:
            raise InvalidArgumentError(f"state: expected {len(cells)} groups, got shape {list(group.shape)}")
        self.reset()
        self._halvings, self._nans = int(columns["halvings"]), int(columns["nans"])
        self._append(group, cells)

    def _add(self, examples: Examples) -> None:
        if examples.groups is None:
            raise InvalidArgumentError("groups: GAUC needs an int64 group id per example, such as the user's; got None")
        require_fractions(examples, predictions=False)
        self._nans += int(np.isnan(examples.predictions).sum())
        if not self._nans:
            positive = examples.weights * examples.labels
            cells = points(score_keys(examples.predictions), positive, examples.weights - positive)
            self._append(examples.groups.copy(), cells)

    def _merge(self, other: Self) -> None:
        other._fold()
        self._nans += other._nans
        self._halvings = max(self._halvings, other._halvings)
        self._append(other._groups, other._cells)

    def _append(self, groups: Keys, cells: Cells) -> None:
        self._pending.append((groups, cells))
        self._pending_length += len(groups)
        if self._pending_length >= self.capacity:
            self._fold()

    def _fold(self) -> None:
        """Sort in the pending examples, and sample groups until at most `capacity` examples are left."""
        if not self._pending:
            return
        parts = [(self._groups, self._cells), *self._pending]
        self._pending, self._pending_length = [], 0
        groups = np.concatenate([group for group, _ in parts])
        cells = append([part for _, part in parts])
        kept = _is_sampled(groups, self._halvings)
        groups, cells = groups[kept], cells[kept]
        order = np.lexsort((cells.low, groups))
        groups, cells = _shrink_large_groups(groups[order], cells[order], self.capacity // 16)
        while len(groups) > self.capacity:
            self._halvings += 1
            kept = _is_sampled(groups, self._halvings)
            groups, cells = groups[kept], cells[kept]
        self._groups, self._cells = groups, cells


def _is_sampled(groups: Keys, halvings: int) -> npt.NDArray[np.bool_]:
    """Return whether the hash of a group id (splitmix64) begins with `halvings` zero bits: one group in 2 ** halvings."""
    if halvings == 0:
        return np.ones(len(groups), dtype=bool)
    mixed = groups.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    sampled: npt.NDArray[np.bool_] = (mixed ^ (mixed >> np.uint64(31))) >> np.uint64(64 - halvings) == 0
    return sampled


def _shrink_large_groups(groups: Keys, cells: Cells, most: int) -> tuple[Keys, Cells]:
    """Merge cells of groups that have more than `most` of them. Both columns stay ordered by group."""
    starts, sizes = _runs(groups)
    large = sizes > most
    if not large.any():
        return groups, cells
    shrunk = [
        (groups[start], compress(in_order([cells[start : start + size]]), most // 2))
        for start, size in zip(starts[large], sizes[large], strict=True)
    ]
    small = np.repeat(~large, sizes)
    groups = np.concatenate([groups[small], *(np.full(len(part), group) for group, part in shrunk)])
    cells = append([cells[small], *(part for _, part in shrunk)])
    order = np.argsort(groups, kind="stable")
    return groups[order], cells[order]


def _mean_area(groups: Keys, cells: Cells) -> float:
    """Return the mean over groups. A merged cell counts at its lowest score, an error of at most its share of the group."""
    starts, sizes = _runs(groups)
    if not len(starts):
        return math.nan
    tie_starts, tie_sizes = _runs(groups, cells.low)
    running = np.append(0.0, np.cumsum(cells.negative))
    before = np.repeat(running[starts], sizes)
    below = np.repeat(running[tie_starts], tie_sizes) - before
    up_to = np.repeat(running[tie_starts + tie_sizes], tie_sizes) - before
    wins = np.add.reduceat(cells.positive * (below + up_to) / 2, starts)
    positive, negative = np.add.reduceat(cells.positive, starts), np.add.reduceat(cells.negative, starts)
    mixed = (positive > 0) & (negative > 0)
    if not mixed.any():
        return math.nan
    weight = (positive + negative)[mixed]
    return float(weight @ (wins[mixed] / (positive * negative)[mixed]) / weight.sum())


def _runs(*columns: Keys) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return starts and lengths of the runs of rows that are equal in all columns."""
    differs = np.zeros(max(0, len(columns[0]) - 1), dtype=bool)
    for column in columns:
        differs |= column[1:] != column[:-1]
    starts = np.flatnonzero(np.append(True, differs)) if len(columns[0]) else np.empty(0, np.intp)
    return starts, np.diff(starts, append=len(columns[0]))
