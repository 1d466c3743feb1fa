"""The click model of `serving.py` in plain torch, as a user of another model server would write it.

Needs only PyTorch and NumPy, because it is imported in the environment of every peer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from click_models import TorchFM, tower

TABLES, ROWS, DIM = 26, 100_000, 16
NAMES = [f"C{number}" for number in range(1, TABLES + 1)]
PACKED = "ids"  # the name of one tensor [rows, 26] instead of 26 tensors [rows]


@dataclass(frozen=True, kw_only=True)
class ServingJob:
    """What the process of a model server is told."""

    folder: Path
    http_port: int
    grpc_port: int
    tuned: bool
    """Whether to run with the fastest settings instead of the default ones."""

    @classmethod
    def of_command_line(cls) -> ServingJob:
        """Read `FOLDER HTTP_PORT GRPC_PORT VARIANT`."""
        folder, http_port, grpc_port, variant = sys.argv[1:]
        return cls(folder=Path(folder), http_port=int(http_port), grpc_port=int(grpc_port), tuned=variant == "tuned")


class ClickScorer(nn.Module):
    """Ids, int64 [rows, 26] below 100,000 -> predictions [rows]. One lookup for all tables, the fastest way in torch."""

    first: Tensor

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.pairs = TorchFM()
        self.deep = tower(TABLES * DIM, 128, 64, 1)
        self.deep.load_state_dict({name: torch.from_numpy(np.load(folder / f"{name}.npy")) for name in self._weights()})
        rows = torch.from_numpy(np.load(folder / "rows.npy"))
        self.rows = nn.Embedding.from_pretrained(rows)
        self.register_buffer("first", torch.arange(TABLES) * ROWS)

    def _weights(self) -> list[str]:
        return list(self.deep.state_dict())

    def forward(self, ids: Tensor) -> Tensor:
        vectors = self.rows(ids + self.first)
        return torch.sigmoid(self.pairs(vectors) + self.deep(vectors.flatten(1))).squeeze(1)


class ServedModel:
    """From the columns of a request to predictions, without what belongs to a server."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self._scorer = ClickScorer(folder).eval()

    def columns(self, columns: Mapping[str, np.ndarray | Sequence[int]]) -> np.ndarray:
        """Predict from `ids` [rows, 26], or from C1 to C26, each [rows]."""
        if PACKED in columns:
            return self.packed(np.asarray(columns[PACKED], dtype=np.int64).reshape(-1, TABLES))
        return self.packed(np.stack([np.asarray(columns[name], dtype=np.int64).reshape(-1) for name in NAMES], axis=1))

    def packed(self, ids: np.ndarray) -> np.ndarray:
        """int64 [rows, 26] -> float32 [rows]."""
        with torch.inference_mode():
            found: np.ndarray = self._scorer(torch.from_numpy(ids)).numpy()
            return found
