"""Batches as plain rows, for oracles that look at one row at a time."""

from __future__ import annotations

import numpy as np
import torch

from monolith.features import Batch, BatchColumn, Ragged


def to_rows(batch: Batch) -> list[dict]:
    """One dict of plain values per row."""
    columns = {name: _plain(column) for name, column in batch.items()}
    assert len({len(column) for column in columns.values()}) <= 1
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _plain(column: BatchColumn) -> list:
    return column.to_lists() if isinstance(column, Ragged) else column.tolist()


def ragged(rng: np.random.Generator, rows: int, high: int, longest: int = 4) -> Ragged:
    """Rows of 0 to `longest` numbers below `high`."""
    return Ragged.from_lists([rng.integers(high, size=rng.integers(longest + 1)).tolist() for _ in range(rows)])


def random_batch(rng: np.random.Generator, rows: int) -> Batch:
    """Rows with the columns that transforms ask for, values from small ranges so that everything happens."""
    return {
        "ids": ragged(rng, rows, 6),
        "more_ids": torch.from_numpy(rng.integers(4, 9, size=rows)),
        "actions": ragged(rng, rows, 5, longest=3),
        "pre_actions": ragged(rng, rows, 5, longest=2),
        "label": torch.from_numpy(rng.choice([-1.0, 0.0, 1.0, 2.5], size=rows).astype(np.float32)),
        "req_time": torch.from_numpy(rng.integers(100, size=rows)),
        "chnid": torch.from_numpy(rng.integers(4, size=rows)),
        "item_id": torch.from_numpy(rng.integers(30, size=rows)),
    }
