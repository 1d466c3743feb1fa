"""An export with known rows, for tests of embedding shards, and shards as processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from monolith.features import Feature
from monolith.features.batch import Batch
from monolith.nn import EmbeddingBagCollection
from monolith.serve import export_model
from monolith.serve.shards.shard_server import ShardConfig, ShardServer
from monolith.table import Fp16, Store
from monolith.train import Head

FEATURES = [Feature(name="user", dim=4), Feature(name="item", dim=3, compressor=Fp16())]
IDS = torch.arange(3000)
EXAMPLE: Batch = {"user": torch.tensor([1, 2]), "item": torch.tensor([3, 4])}


class SumModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(FEATURES)

    def forward(self, batch: Batch) -> torch.Tensor:
        found = self.embeddings(batch)
        return torch.cat([found["user"], found["item"]], dim=1).sum(dim=1)  # type: ignore[list-item]


def fill(store: Store, *, seed: int = 5) -> None:
    chance = torch.Generator().manual_seed(seed)
    for name, dim in (("user", 4), ("item", 3)):
        store.assign(name, IDS, torch.randn(len(IDS), dim, generator=chance))


def export_rows(folder: Path, *, seed: int = 5) -> Path:
    """Export two tables with random rows for `IDS`."""
    model = SumModel()
    fill(model.embeddings.store, seed=seed)
    return Path(export_model(model, EXAMPLE, folder, heads=[Head(name="ctr")]))


@contextlib.contextmanager
def shard_servers(export: Path, shards: int, *, replicas: int = 1, **options: object) -> Iterator[list[ShardServer]]:
    """Run shards in this process, all replicas of the first one first."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(ShardServer(ShardConfig(export=export, shard=shard, shards=shards, **options)))
            for shard in range(shards)
            for _ in range(replicas)
        ]


class ShardProcess:
    """`monolith serve-shard` as a process."""

    def __init__(self, export: Path, shard: int, shards: int, *, port: int = 0, options: tuple[str, ...] = ()) -> None:
        command = [sys.executable, "-m", "monolith.cli", "serve-shard", str(export), "--shard", str(shard)]
        command += ["--shards", str(shards), "--port", str(port), "--json", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.kill()
            raise AssertionError(f"{' '.join(command)} ended with {self._process.returncode}")
        self.address: str = json.loads(line)["address"]
        self.port = int(self.address.rpartition(":")[2])

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)
        if number == signal.SIGSTOP:
            # kill() returns before all threads have stopped.
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        """End it as a lost machine ends, and wait until it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> ShardProcess:
        return self

    def __exit__(self, *failure: object) -> None:
        self.kill()
