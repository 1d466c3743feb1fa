"""End to end with TorchRec on the CPU: pyarrow, its fused EmbeddingBagCollection over mapped rows, Adagrad in backward."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import torchrec
from torch import Tensor
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from click_models import (
    BATCH,
    DATA_FILE,
    DIM,
    FIELDS,
    IDS_FILE,
    INITIAL_ACCUMULATOR,
    INITIAL_WEIGHT,
    LEARNING_RATE,
    ROWS,
    dense_half,
    dense_optimizer,
)
from peers.click_embedding_bag import RowsTrainer, read

EPSILON = 1e-10


class TorchRecTrainer(RowsTrainer):
    def __init__(self, model: str, towers: str, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        pa.set_cpu_count(threads)
        self.versions = {"torchrec": torchrec.__version__, "torch": torch.__version__}
        self.half = dense_half(model, towers)
        self._dense = dense_optimizer(self.half)
        self._sparse = None
        self._first = int(self.half.has_first_order)
        # Its kernels want widths in fours, so a first-order weight brings three unused numbers with it.
        self._width = DIM + 4 * self._first
        rows = len(np.load(folder / IDS_FILE, mmap_mode="r"))
        table = torchrec.EmbeddingBagConfig(
            name="rows", num_embeddings=rows, embedding_dim=self._width, feature_names=ROWS
        )
        self._bags = FusedEmbeddingBagCollection(
            tables=[table],
            optimizer_type=torch.optim.Adagrad,
            optimizer_kwargs={"lr": LEARNING_RATE, "eps": EPSILON},
            device=torch.device("cpu"),
        )
        for parameters in self._bags.fused_optimizer().state.values():
            for state in parameters.values():
                state.fill_(INITIAL_ACCUMULATOR)
        for weight in self._bags.parameters():
            weight.detach().fill_(INITIAL_WEIGHT)
        self._lengths = torch.ones(FIELDS * BATCH, dtype=torch.int64)
        self._batches = read(folder / DATA_FILE, rows_first=False)

    def _lookup(self, rows: Tensor) -> Tensor:
        jagged = torchrec.KeyedJaggedTensor(keys=ROWS, values=rows.reshape(-1), lengths=self._lengths)
        return self._bags(jagged).values().view(-1, FIELDS, self._width)

    def _split(self, vectors: Tensor) -> list[Tensor]:
        first_order, _, vectors = vectors.split([1, 3, DIM], dim=2)
        return [first_order, vectors]
