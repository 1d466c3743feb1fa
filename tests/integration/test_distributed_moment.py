"""Danger: a checkpoint of several workers whose dense parameters, rows and step are of different moments.

The model counts: a batch takes 1 from its dense parameter and 1 from the row of each of its ids. So in every checkpoint both,
and the step, must show the same number to every reader.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster_threads import sleep, started
from counting_model import Counts
from monolith import RunConfig, Trainer
from monolith.cluster import HostServiceDiscovery
from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.state import restore_points
from monolith.state.model_dir import read_state
from monolith.table import Bags
from monolith.train import RunnerConfig
from monolith.train.distributed.run import distributed_train

WORKERS, BATCHES, BATCH_SIZE = 3, 24, 8


def clicks() -> ClickStream:
    return ClickStream(ClickStreamConfig(users=50, batches=BATCHES, batch_size=BATCH_SIZE))


def start(folder: Path, kind: str, index: int, **options: object) -> Future[int]:
    model = Counts(None)
    settings = {"save_checkpoints_steps": 5, "checkpoints_max_to_keep": 100, "clip_norm": None, **options}
    chief = (kind, index) == ("worker", 0)
    config = RunConfig(model_dir=str(folder) if chief else None, **settings)  # type: ignore[arg-type]
    trainer = Trainer(model, torch.optim.SGD([model.batches], lr=1.0), config=config)
    runner = RunnerConfig(
        server_type=kind, index=index, num_ps=2, num_workers=WORKERS, model_dir=str(folder), retry_wait_in_secs=0.1
    )
    discovery = HostServiceDiscovery(folder / "discovery")
    return started(lambda: distributed_train(trainer, clicks(), runner, discovery, sleep=sleep))


@pytest.mark.parametrize("postpush", [False, True])
def test_rows_dense_parameters_and_step_of_every_checkpoint_are_of_one_moment(tmp_path: Path, postpush: bool) -> None:
    roles = [("ps", 0), ("ps", 1), *(("worker", index) for index in range(WORKERS))]
    running = [start(tmp_path, kind, index, enable_embedding_postpush=postpush) for kind, index in roles]
    assert running[2].result(120) == BATCHES
    points = [point for point in restore_points(tmp_path) if point.checkpoint is not None]
    assert len(points) > 1
    for point in points:
        saved = read_state(str(point.checkpoint))
        assert isinstance(saved["model"], dict)
        read = read_without_servers(tmp_path, point.step)
        assert (-saved["model"]["batches"].item(), *read) == (point.step, point.step, point.step, point.step)


def read_without_servers(folder: Path, step: int) -> tuple[int, float, float]:
    """The step, dense parameter and mean of rows for a batch, in a process that has no servers."""
    model = Counts(None)
    config = RunConfig(model_dir=str(folder), restore_to=f"step={step}")
    reader = Trainer(model, torch.optim.SGD([model.batches], lr=1.0), config=config)
    assert reader.restore()
    ids = torch.cat([batch["user_id"] for batch in clicks()]).unique().numpy()
    every = Bags(table="user_id", ids=ids, offsets=np.arange(len(ids) + 1))
    rows = model.embeddings.store.lookup([every])[0]
    return reader.step, -model.batches.item(), -rows.sum().item() / BATCH_SIZE
