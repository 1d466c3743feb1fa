"""Area under the ROC curve over a stream, and over its most recent part."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Self

import numpy as np
import torch

from monolith.errors import InvalidArgumentError
from monolith.metrics.metric import Examples, Metric, require_fractions
from monolith.metrics.ranked import CELL_COLUMNS, Cells, cells_of, compress, in_order, points, score_keys

__all__ = ["AUC", "WindowedAUC"]

_NO_CELLS = points(np.empty(0, np.int64), np.empty(0), np.empty(0))


class AUC(Metric):
    """Area under the ROC curve: how often a positive example is scored above a negative one, a tie counting half.

    Scores may be probabilities or logits, ±infinity included; only their order counts. A label between 0 and 1 makes an
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
        """The area over all examples since the last `reset`."""
        return math.nan if self._nans else self._folded().area_and_error()[0]

    def error_bound(self) -> float:
        """No exact computation over the same examples differs from `compute()` by more; 0 while nothing was merged."""
        return math.nan if self._nans else self._folded().area_and_error()[1]

    def reset(self) -> None:
        """Forget all examples."""
        self._cells = _NO_CELLS
        self._pending: list[Cells] = []
        self._pending_length = 0
        self._nans = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The cells and the number of NaN predictions."""
        return {**self._folded().tensors(), "nans": torch.tensor(self._nans)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state_dict` returned; another `capacity` is fine."""
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
        """All examples as cells. Sorting is put off to this point, so that it is paid once for many small batches."""
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
        """The area over the examples in the window."""
        predictions, positive, negative = self._columns()
        if np.isnan(predictions).any():
            return math.nan
        return in_order([points(score_keys(predictions), positive, negative)]).area_and_error()[0]

    def reset(self) -> None:
        """Forget all examples."""
        self._batches: deque[np.ndarray] = deque()
        self._held = 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The examples in the window, oldest first: prediction, weight as positive, weight as negative [3, n]."""
        return {"examples": torch.from_numpy(self._columns())}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state_dict` returned; of a longer window, the most recent part."""
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
