"""The same training, killed again and again without warning. It ends with the weights of a run that was never killed.

Every run is a separate process. It saves in the background at an interval of steps, and the next run resumes from the newest
complete state: rows, dense weights and the position in the data are always of the same step.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.features import Batch, Feature
from monolith.nn import FM, EmbeddingBagCollection
from monolith.state import restore_points
from monolith.table import Adagrad
from monolith.train import Estimator, Head, RunConfig, StepResult, Trainer
from monolith.train.hooks import Hook

COLUMNS, DIM = ("user_id", "item_id", "category_id", "tag_ids"), 16
WORLD = {"users": 5_000, "items": 1_000, "new_items_per_hour": 500, "batch_size": 1024}


class ClickModel(nn.Module):
    """DeepFM: biases, a factorization machine and an MLP over the embeddings of four columns."""

    heads = (Head(name="click", label="label", group="user_id"),)

    def __init__(self) -> None:
        super().__init__()
        adagrad = Adagrad(learning_rate=0.1)
        self.embeddings = EmbeddingBagCollection(
            [Feature(name=name, dim=DIM, bias=True, optimizer=adagrad, pooling="mean", stack="ids") for name in COLUMNS]
        )
        self.fm = FM()
        self.mlp = nn.Sequential(nn.Linear(len(COLUMNS) * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: Batch) -> Tensor:
        rows = self.embeddings(batch)  # "ids" [rows, columns, DIM], "ids.bias" [rows, columns, 1]
        logits = rows["ids.bias"].sum(1) + self.fm(rows["ids"]) + self.mlp(rows["ids"].flatten(1))
        return logits.squeeze(1)


class Die(Hook):
    """Kills the process at a step, as a power cut or the out-of-memory killer does: nothing is flushed or announced."""

    def __init__(self, step: int) -> None:
        self._step = step

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def new_run(model_dir: Path) -> Estimator:
    torch.manual_seed(0)  # the same initial dense weights in every run
    torch.set_num_threads(1)  # for layers this small, more threads are slower
    config = RunConfig(model_dir=str(model_dir), save_checkpoints_steps=10, seed=0, event_time="event_time")
    return Estimator(ClickModel(), config)


def train(model_dir: Path, steps: int, deadly_step: int) -> None:
    stream = ClickStream(ClickStreamConfig(**WORLD))
    new_run(model_dir).train(stream, max_steps=steps, hooks=[Die(deadly_step)])


def start(model_dir: Path, steps: int, deadly_step: int) -> int:
    """Train in a separate process. Returns its exit code, which is negative for a signal."""
    command = [sys.executable, __file__, "--steps", str(steps), "--model-dir", str(model_dir)]
    return subprocess.run([*command, "--die-at", str(deadly_step)], check=False).returncode


def weights(model_dir: Path) -> dict[str, Tensor]:
    """Return every dense weight, and every row with its optimizer state in the order of ids."""
    run = new_run(model_dir)
    run.trainer.restore()
    found = dict(run.model.state_dict())
    for name, (table,) in run.trainer.tables().items():
        entries = table.entries()
        order = entries.ids.argsort()
        columns = {"ids": entries.ids, "values": entries.values, **entries.slots}
        found |= {f"{name}/{part}": column[order] for part, column in columns.items()}
    return found


def main(steps: int, kills: int, folder: Path) -> bool:
    shutil.rmtree(folder, ignore_errors=True)
    for deadly_step in sorted(random.Random(1).sample(range(2, steps), kills)):
        ended = start(folder / "killed", steps, deadly_step)
        kept = restore_points(folder / "killed")
        print(f"signal {-ended} at step {deadly_step:,}; kept: step {kept[-1].step if kept else 0:,}")
    start(folder / "killed", steps, 0)
    start(folder / "undisturbed", steps, 0)

    killed, undisturbed = weights(folder / "killed"), weights(folder / "undisturbed")
    same = killed.keys() == undisturbed.keys() and all(torch.equal(killed[name], undisturbed[name]) for name in killed)
    rows = sum(len(tensor) for name, tensor in killed.items() if name.endswith("/ids"))
    print(f"step {steps:,}: {rows:,} rows and the dense weights are {'equal to the last bit' if same else 'NOT EQUAL'}")
    return same


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="batches of 1,024 impressions")
    parser.add_argument("--kills", type=int, default=4, help="runs that do not live to the end")
    parser.add_argument("--folder", type=Path, default=Path("build/examples/04_crash"), help="is emptied first")
    parser.add_argument("--model-dir", type=Path, help="of a run that this program starts")
    parser.add_argument("--die-at", type=int, help="step at which that run kills itself")
    arguments = parser.parse_args()
    if arguments.model_dir is not None:
        train(arguments.model_dir, arguments.steps, arguments.die_at)
        sys.exit(0)
    sys.exit(0 if main(arguments.steps, arguments.kills, arguments.folder) else 1)
