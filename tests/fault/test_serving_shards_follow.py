"""Danger: a shard that is killed while it follows a run comes back with rows of the past, or the front end mixes two states."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

import followed_job
from followed_tables import until
from monolith.serve import export_model
from monolith.serve.follow import RunWriters
from monolith.serve.shards.front_end import sharded_replica
from monolith.serve.shards.shard_replica import ShardClientConfig
from serving_shards import ShardProcess

PROBE = {name: torch.arange(400) for name in followed_job.COLUMNS}
ROOT = Path(followed_job.__file__).parent


def run_of(folder: Path, steps_secs: float) -> subprocess.Popen[bytes]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MONOLITH_")}
    environment = {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "STEP_SECS": str(steps_secs)}
    return subprocess.Popen([sys.executable, followed_job.__file__, str(folder)], env=environment)


def test_rows_of_killed_shards_equal_those_of_the_run_in_the_end(tmp_path: Path) -> None:
    export = Path(export_model(followed_job.Clicks(), PROBE, tmp_path / "exports", heads=[followed_job.CLICK]))
    folder = tmp_path / "run"
    training = run_of(folder, 0.1)
    options = ("--run", str(folder))
    try:
        with ShardProcess(export, 0, 2, options=options) as zero, ShardProcess(export, 1, 2, options=options) as one:
            addresses = f"{zero.address};{one.address}"
            config = ShardClientConfig(timeout=30.0)
            replica = sharded_replica("clicks", export, addresses, config=config, run=RunWriters(str(folder)))
            try:
                before = replica.predict(PROBE)["click"].clone()
                until(lambda: not torch.equal(replica.predict(PROBE)["click"], before), "the first rows")
                lag = replica.lag()
                assert lag is not None
                one.kill()
                with ShardProcess(export, 1, 2, port=one.port, options=options):
                    group = next(iter(replica.predictor.stores.values())).group  # type: ignore[attr-defined]
                    until(lambda: all(status.healthy for status in group.status()), "the shard")
                    assert training.wait(120) == 0
                    expected = trained(folder)
                    until(
                        lambda: torch.allclose(replica.predict(PROBE)["click"], expected, atol=1e-6, rtol=0),
                        "the last rows",
                    )
            finally:
                replica.close()
    finally:
        training.kill()
        training.wait()


def trained(folder: Path) -> torch.Tensor:
    """Predictions of what the run has saved at its end."""
    estimator = followed_job.estimator(str(folder))
    estimator.trainer.restore()
    estimator.model.eval()
    with torch.no_grad():
        found: torch.Tensor = torch.sigmoid(estimator.model(PROBE))
    return found
