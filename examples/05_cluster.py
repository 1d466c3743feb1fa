"""The same training over many processes, with the model unchanged.

Run alone, it trains in this process. The launcher runs the same file as servers and workers, or as ranks, and restarts them:

    monolith launch --ps 2 --workers 3 --model-dir build/clicks examples/05_cluster.py
    monolith launch --ranks 2 --model-dir build/clicks-ranks examples/05_cluster.py

With servers, the rows and the dense weights are on them, and each worker trains at its own pace. Ranks hold the rows themselves,
and every step is one step of all ranks on a global batch. In both, the data is divided into shards, and process 0, the chief,
saves for all. The role of a process comes from the environment: our variables, TF_CONFIG, the MLP scheduler, `torchrun`, `mpirun`
or `srun`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.features import Batch, Feature
from monolith.nn import FM, EmbeddingBagCollection
from monolith.table import Adagrad
from monolith.train import Estimator, Head, RunConfig, RunnerConfig
from monolith.train.hooks import ProgressHook, ProgressReport

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


def who(runner: RunnerConfig) -> str:
    return "alone" if runner.is_local else f"{runner.server_type} {runner.index}"


def main(steps: int, model_dir: Path) -> None:
    torch.manual_seed(0)  # the initial dense weights, which the chief gives to all
    torch.set_num_threads(1)  # several processes share a machine here
    runner = RunnerConfig.from_env()
    # A launcher sets the folder, which all processes must share.
    config = RunConfig(model_dir=None if runner.model_dir else str(model_dir), event_time="event_time")
    estimator = Estimator(ClickModel(), config, runner=runner)

    def report(now: ProgressReport) -> None:
        auc = f"AUC of the last batches {now.auc['click']:.4f}"
        print(f"{who(runner)}: step {now.step:,}, {now.rows:,} rows, {auc}", flush=True)

    # An endless stream, of which each process reads its shard. The limit counts the steps of all workers, or those that all
    # ranks make together.
    stream = ClickStream(ClickStreamConfig(**WORLD))
    step = estimator.train(stream, max_steps=steps, hooks=[ProgressHook(report, every_steps=max(1, steps // 5))])
    print(f"{who(runner)}: ends at step {step:,}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="global steps, see max_steps of Estimator.train")
    parser.add_argument(
        "--model-dir", type=Path, default=Path("build/examples/05_cluster"), help="of a run that is alone"
    )
    arguments = parser.parse_args()
    sys.exit(main(arguments.steps, arguments.model_dir))
