"""What the data looks like while it trains: how full columns are and how many distinct ids they bring."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from monolith.features import Ragged
from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.features.batch import BatchColumn
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["ColumnStatistics", "FeatureStatisticsHook", "column_statistics"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ColumnStatistics:
    """One column of one batch."""

    rows: int
    values: int
    """Entries of all rows."""
    empty: float
    """Share of rows without an entry."""
    distinct: float | None
    """Share of distinct values among the values, for integers; None for floats and without values."""
    mean: float | None
    """Mean of the values, for floats; None for integers and without values."""
    invalid: int
    """NaN and infinite values."""


def column_statistics(column: BatchColumn) -> ColumnStatistics:
    """Describe a column.

    Example:
        >>> stats = column_statistics(Ragged.from_lists([[7, 7], [], [8, 9]]))
        >>> stats.rows, stats.values, round(stats.empty, 2), stats.distinct
        (3, 4, 0.33, 0.75)
    """
    values = (column.values if isinstance(column, Ragged) else column).detach()
    empty = (column.row_lengths() == 0).double().mean().item() if isinstance(column, Ragged) and len(column) else 0.0
    numbers = values.is_floating_point()
    count = values.numel()
    finite = values[values.isfinite()] if numbers else values
    return ColumnStatistics(
        rows=len(column),
        values=count,
        empty=empty,
        distinct=None if numbers or not count else torch.unique(values).numel() / count,
        mean=finite.double().mean().item() if numbers and finite.numel() else None,
        invalid=count - finite.numel(),
    )


class FeatureStatisticsHook(Hook):
    """Every `every_steps` steps, describe each column of the batch just trained on and hand it to `write`.

    Example:
        >>> hook = FeatureStatisticsHook(every_steps=1000, write=lambda step, columns: print(step, columns))
    """

    def __init__(
        self,
        *,
        every_steps: int = 1000,
        write: Callable[[int, Mapping[str, ColumnStatistics]], None] | None = None,
    ) -> None:
        self.every_steps = every_steps
        self._write = write or _log_columns

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Describe the batch."""
        if result.step % self.every_steps == 0:
            self._write(result.step, {name: column_statistics(column) for name, column in result.batch.items()})


def _log_columns(step: int, columns: Mapping[str, ColumnStatistics]) -> None:
    for name, column in columns.items():
        _log.info("step %d: column %s: %s", step, name, asdict(column))
