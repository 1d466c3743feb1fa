"""End to end in plain PyTorch: pyarrow, EmbeddingBag with sparse gradients over mapped rows, torch's Adagrad.

Once with all columns in one EmbeddingBag, and once with one for each, as DLRM's own repository has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from click_models import (
    BATCH,
    DATA_FILE,
    DIM,
    DLRM,
    FIELDS,
    IDS_FILE,
    INITIAL_ACCUMULATOR,
    INITIAL_WEIGHT,
    LEARNING_RATE,
    NUMBERS,
    ROWS,
    DeepFM,
    dense_half,
    dense_optimizer,
    loss_of,
)
from click_worker import Phases

Example = tuple[Tensor, Tensor, Tensor]


def read(path: Path, *, rows_first: bool = True) -> Iterator[Example]:
    """Numbers [B, 13], rows [B, 26] (or [26, B]) and labels [B], for ever; columns are put together once per row group."""
    axis = 1 if rows_first else 0
    while True:
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=[*NUMBERS, *ROWS, "label"]).combine_chunks()
            column = {name: from_dlpack(table.column(name).chunk(0)) for name in table.column_names}
            numbers = torch.stack([column[name] for name in NUMBERS], dim=1)
            rows = torch.stack([column[name] for name in ROWS], dim=axis)
            for first in range(0, len(numbers), BATCH):
                part = slice(first, first + BATCH)
                yield numbers[part], rows[part] if rows_first else rows[:, part], column["label"][part]


class RowsTrainer:
    """What sides over mapped rows share: a subclass sets the fields, looks up, and takes first-order weights off the rows."""

    half: DeepFM | DLRM
    _first: int
    _dense: torch.optim.Optimizer
    _sparse: torch.optim.Optimizer | None
    """None where backward makes the sparse step, which then cannot be timed apart from it."""
    _batches: Iterator[Example]

    def _lookup(self, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def _split(self, vectors: Tensor) -> list[Tensor]:
        """First-order weights and vectors of rows that have both."""
        raise NotImplementedError

    def losses(self, batches: int) -> list[float]:
        return [float(self._step(*batch)) for batch in itertools.islice(self._batches, batches)]

    def train(self, batches: int) -> None:
        for batch in itertools.islice(self._batches, batches):
            self._step(*batch)

    def phases(self, batches: int) -> dict[str, float]:
        phases = Phases()
        for numbers, rows, labels in itertools.islice(self._batches, batches):
            phases.end("read")
            vectors = self._lookup(rows)
            phases.end("lookup")
            self._backward(numbers, vectors, labels)
            phases.end("forward and backward")
            self._dense.step()
            phases.end("dense step")
            if self._sparse is not None:
                self._sparse.step()
                phases.end("sparse step")
        return phases.seconds

    def _step(self, numbers: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
        loss = self._backward(numbers, self._lookup(rows), labels)
        self._dense.step()
        if self._sparse is not None:
            self._sparse.step()
        return loss

    def _backward(self, numbers: Tensor, vectors: Tensor, labels: Tensor) -> Tensor:
        self._dense.zero_grad()
        if self._sparse is not None:
            self._sparse.zero_grad()
        first_order = None
        if self._first:
            first_order, vectors = self._split(vectors)
        loss = loss_of(self.half(numbers, vectors, first_order), labels)
        loss.backward()
        return loss.detach()


class EmbeddingBagTrainer(RowsTrainer):
    def __init__(self, model: str, towers: str, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        pa.set_cpu_count(threads)
        self.versions = {"torch": torch.__version__, "pyarrow": pa.__version__}
        self.half = dense_half(model, towers)
        self._dense = dense_optimizer(self.half)
        # The first-order weight is the first number of a row: one table is faster than two.
        self._first = int(self.half.has_first_order)
        self._bags = nn.ModuleList(
            nn.EmbeddingBag(
                rows,
                self._first + DIM,
                mode="sum",
                sparse=True,
                _weight=torch.full((rows, self._first + DIM), INITIAL_WEIGHT),
            )
            for rows in self._sizes(np.load(folder / IDS_FILE))
        )
        self._sparse = torch.optim.Adagrad(
            self._bags.parameters(), lr=LEARNING_RATE, initial_accumulator_value=INITIAL_ACCUMULATOR
        )
        self._batches = read(folder / DATA_FILE)

    def _sizes(self, ids: np.ndarray) -> list[int]:
        """Rows of each bag."""
        return [len(ids)]

    def _lookup(self, rows: Tensor) -> Tensor:
        (bag,) = self._bags
        return bag(rows.reshape(-1, 1)).view(-1, FIELDS, self._first + DIM)

    def _split(self, vectors: Tensor) -> list[Tensor]:
        return list(vectors.split([1, DIM], dim=2))


class SeparateBagsTrainer(EmbeddingBagTrainer):
    """The rows of a column begin at 0 in its own bag; taking the first row off is left to this side, and next to nothing."""

    def _sizes(self, ids: np.ndarray) -> list[int]:
        # The ids of a column have its number above 48 bits.
        begins = np.searchsorted(ids >> 48, np.arange(1, FIELDS + 2))
        self._begins = torch.from_numpy(begins[:-1])
        return np.diff(begins).tolist()

    def _lookup(self, rows: Tensor) -> Tensor:
        columns = (rows - self._begins).unbind(1)
        return torch.stack([bag(column.unsqueeze(1)) for bag, column in zip(self._bags, columns, strict=True)], dim=1)
