"""Kills of ranks of a running job, and an oracle outside of it that counts what was trained."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import time
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch
from jobs import ranked
from torch import Tensor

from launched_job import Launch, is_alive
from monolith import Estimator, RunConfig
from monolith.nn import dense_state_dict
from monolith.train import RunnerConfig

__all__ = ["RankCampaign", "Verdict", "last_line", "quiet", "state_of", "undisturbed", "verdict"]

LIVENESS = {
    "heartbeat_secs": 0.5,
    "lease_secs": 3.0,
    "hang_secs": 4.0,
    "backoff_secs": 0.1,
    "max_backoff_secs": 0.5,
    "grace_secs": 30.0,
    "restarts": 100_000,
}
PATIENCE = 120.0
"""Seconds after which a job that makes no step hangs."""


@dataclass(frozen=True)
class Verdict:
    """What the oracle has found."""

    lost: int
    doubled: int
    steps: int
    same_bits: bool


def quiet(batches: int) -> Verdict:
    """What there is if nothing was lost, doubled or changed."""
    return Verdict(lost=0, doubled=0, steps=batches, same_bits=True)


def verdict(folder: Path, batches: int) -> Verdict:
    """Compare the last checkpoint with the data, and with a run of one process that nobody has disturbed."""
    model, found = state_of(folder / "model")
    off = ranked.counted(model.embeddings.store) - ranked.expected(batches)
    return Verdict(
        lost=round(float(-off.clamp(max=0).sum())),
        doubled=round(float(off.clamp(min=0).sum())),
        steps=round(-model.batches.item() / ranked.SHARDS),
        same_bits=equal(found, undisturbed(folder / "alone", batches)),
    )


@dataclass
class RankCampaign:
    """A job of `ranks` under `monolith launch`, and the harm that is done to it."""

    folder: Path
    ranks: int
    seed: int = 0
    launch_options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    liveness: dict[str, float] = field(default_factory=dict)
    pause_secs: float = 0.01
    recoveries: list[float] = field(default_factory=list)
    """Seconds from each kill until all ranks have made a step again."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        own = {"RANKED_PAUSE_SECS": str(self.pause_secs), "OMP_NUM_THREADS": "1", "MONOLITH_RANK_TIMEOUT_SECS": "2"}
        self.launch = Launch(
            self.folder,
            *("--ranks", str(self.ranks), "--model-dir", str(self.folder / "model")),
            *("--liveness", json.dumps({**LIVENESS, **self.liveness}), *self.launch_options),
            ranked.__file__,
            str(self.folder),
            environment={**os.environ, **own, **self.environment},
        )

    def last_step(self, rank: int) -> tuple[int, float]:
        """The step that a rank has made last, and when."""
        step, moment, _ = last_line(self.folder, rank)
        return step, moment

    def said(self, rank: int) -> str:
        """What all processes of a rank have written."""
        return "\n".join(self.launch.lines(f"rank {rank}"))

    def until_trained(self, *ranks: int, since: float) -> None:
        """Until these ranks, or all, have made a step after `since`."""
        deadline = time.monotonic() + PATIENCE
        while any(self.last_step(rank)[1] <= since for rank in ranks or range(self.ranks)):
            assert self.launch.is_running, f"the job ended: {self.launch.end()}"
            assert time.monotonic() < deadline, f"the job hangs; {self.folder}/logs has what its ranks wrote"
            time.sleep(0.02)

    def process(self, rank: int) -> int:
        """The newest process of a rank, which runs."""
        deadline = time.monotonic() + PATIENCE
        while not (pids := self.launch.pids(f"rank {rank}")) or not is_alive(pids[-1]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return pids[-1]

    def kill(self, process: int) -> None:
        """Kill a process, and wait until it has ended."""
        os.kill(process, signal.SIGKILL)
        while is_alive(process):
            time.sleep(0.01)

    def hit(self, rank: int, number: signal.Signals = signal.SIGKILL) -> float:
        """Send a signal to a rank, and wait until all ranks train again. Returns how long that took."""
        began, process = time.time(), self.process(rank)
        os.kill(process, number)
        # What the others have made before they noticed does not count.
        deadline = time.monotonic() + PATIENCE
        while is_alive(process):
            assert time.monotonic() < deadline, "nobody has ended a rank that hangs"
            time.sleep(0.01)
        self.until_trained(since=max(time.time(), began))
        self.recoveries.append(time.time() - began)
        return self.recoveries[-1]

    def finish(self, *, more: int = 20) -> int:
        """Let the data end some batches after those that any rank has read, and the job with it. Returns that number."""
        # Ranks read ahead of their steps.
        last = max(self.last_step(rank)[0] for rank in range(self.ranks)) + 40 + more
        (self.folder / "last.new").write_text(str(last))
        (self.folder / "last.new").replace(self.folder / "last")
        code, errors = self.launch.end(PATIENCE)
        assert code == 0, errors
        assert not any(map(is_alive, self.launch.all_pids()))
        return last

    def close(self) -> None:
        self.launch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def last_line(folder: Path, rank: int) -> tuple[int, float, int]:
    """The last step of a rank, when it made it, and its process. Zeros if there is none."""
    with suppress(FileNotFoundError, IndexError, ValueError):
        with (folder / f"steps-{rank}").open("rb") as lines:
            lines.seek(max(0, os.fstat(lines.fileno()).st_size - 200))
            step, moment, process = json.loads(lines.read().splitlines()[-1])
        return step, moment, process
    return 0, 0.0, 0


def undisturbed(folder: Path, batches: int) -> dict[str, Tensor]:
    """All of the state after training on so many batches of each shard in one process."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "last").write_text(str(batches))
    with torch.random.fork_rng(), redirect_stdout(io.StringIO()):
        ranked.main(folder, RunnerConfig(is_local=True))
    return state_of(folder / "model")[1]


def state_of(model_dir: Path) -> tuple[ranked.Counting, dict[str, Tensor]]:
    """The model as one process restores it, and everything that was restored: rows with their slots, dense parameters."""
    runner = RunnerConfig(is_local=True, enable_sync_training=False)
    estimator = Estimator(ranked.Counting(), RunConfig(model_dir=str(model_dir)), runner=runner)
    estimator.trainer.restore()
    model = estimator.model
    assert isinstance(model, ranked.Counting)
    found: dict[str, Tensor] = {f"dense {name}": value for name, value in dense_state_dict(model).items()}
    for name, (table,) in estimator.trainer.tables().items():
        rows = table.entries()
        order = rows.ids.argsort()
        columns = {"ids": rows.ids, "values": rows.values, "times": rows.times, **rows.slots}
        found |= {f"{name} {column}": values[order] for column, values in columns.items()}
    return model, found


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two states have the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
