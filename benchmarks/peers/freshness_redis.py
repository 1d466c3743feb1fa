"""Redis as the store that a trainer and a server share: every row is a value, and a server reads the rows of each request."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from monolith.serve.predictor import Predictor
from monolith.serve.replica import Replica

# Where setup_peers.sh puts it, behind our own packages.
sys.path.append(str(Path(__file__).parents[2] / ".venv-bench" / "exchange"))


def connected(port: int) -> Any:  # noqa: ANN401 - it may not be installed
    """Return a client."""
    import redis

    return redis.Redis(port=port)


def keys(table: str, ids: np.ndarray) -> list[str]:
    """Return the keys of the rows of ids."""
    return [f"{table}:{number}" for number in ids.tolist()]


class SharedStoreReplica(Replica):
    """Answers with the rows that Redis has at the moment. Its dense weights do not change."""

    def __init__(self, name: str, predictor: Predictor, port: int) -> None:
        from freshness_job import COLUMNS, DIM, ProbedModel

        super().__init__(name, predictor)
        self._redis, self._model, self._columns, self._dim = connected(port), ProbedModel().eval(), COLUMNS, DIM

    def predict(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Read the rows of all columns with one call, and predict."""
        wanted = [key for name in (*self._columns, "probe") for key in keys(name, batch[name].numpy())]
        found = self._redis.mget(wanted)
        rows = len(batch["probe"])
        none = bytes(4 * self._dim)
        flat = np.frombuffer(b"".join(row or none for row in found[: len(self._columns) * rows]), np.float32)
        vectors = torch.from_numpy(flat.reshape(len(self._columns), rows, self._dim).swapaxes(0, 1).copy())
        probes = np.frombuffer(b"".join(row or bytes(4) for row in found[len(self._columns) * rows :]), np.float32)
        with torch.inference_mode():
            click = torch.sigmoid(self._model.dense(vectors)).squeeze(1)
        return {"click": click, "value": torch.from_numpy(probes.copy())}
