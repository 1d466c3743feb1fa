"""The cases of the original's `cpu_sync_training_test`, made by every rank of a launch. Rank 0 prints one line of JSON."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator

import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes seconds
from torch import Tensor, nn

from monolith.data.sources.source import Source, SourcePosition
from monolith.features import Feature, Ragged
from monolith.features.batch import Batch
from monolith.nn import EmbeddingBagCollection
from monolith.table import Adagrad, Zeros
from monolith.train import Head, RunConfig, RunnerConfig, StepResult, Trainer
from monolith.train.distributed.ranks import distributed_sync_train
from monolith.train.hooks import Hook

PIPELINES = [
    {"enable_pipelined_fwda2a": forward, "enable_pipelined_bwda2a": backward, "enable_async_optimize": optimize}
    for forward, backward, optimize in itertools.product([False, True], repeat=3)
]


class Repeated(Source):
    """The same rows again and again, other ones for each rank."""

    def _start(self) -> SourcePosition:
        return {"next": 0}

    def _read(self, position: SourcePosition) -> Iterator[tuple[Batch, SourcePosition]]:
        for number in range(int(position["next"]), 100):
            rows = [[1, 2, 3, 4], [4 - self._shard_index % 3], [], [1, 1, 2 + self._shard_index % 2]]
            yield (
                {
                    "ids": Ragged.from_lists(rows),
                    "float": torch.tensor([0.5, 1.0, 1.5, 2.0]).reshape(4, 1),
                    "label": torch.tensor([1.0, 0.0, 1.0, 0.5]) + number % 3,
                },
                {"next": number + 1},
            )


class RaggedTask(nn.Module):
    """A pooled feature."""

    heads = (Head(name="y", label="label", kind="regression"),)

    def __init__(self, **feature: object) -> None:
        super().__init__()
        settings = {
            "dim": 5,
            "initializer": Zeros(),
            "optimizer": Adagrad(learning_rate=0.1, initial_accumulator_value=1.0),
        }
        self.embeddings = EmbeddingBagCollection([Feature(name="ids", **settings, **feature)])  # type: ignore[arg-type]

    def forward(self, batch: Batch) -> Tensor:
        return self.embeddings(batch)["ids"].flatten(1).sum(1)  # type: ignore[union-attr]


class FloatTask(RaggedTask):
    """A pooled feature and a column of floats."""

    def forward(self, batch: Batch) -> Tensor:
        return super().forward(batch) + batch["float"].squeeze(1)  # type: ignore[union-attr]


class SequenceTask(RaggedTask):
    """The first two ids of each row, in a table that begins with room for many."""

    def __init__(self) -> None:
        super().__init__(pooling="first_n", max_length=2)


class NonFeatureTask(nn.Module):
    """Dense parameters alone."""

    heads = RaggedTask.heads

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(1, 1)

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(batch["float"]).squeeze(1)  # type: ignore[no-any-return]


class EquivalentTask(RaggedTask):
    """The same feature in a hash table and in a dense one of 4 rows, each trained for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(4, 5, mode="sum")
        nn.init.zeros_(self.table.weight)
        self.difference = 0.0

    def extra_loss(self, batch: Batch, logits: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        assert isinstance(ids, Ragged)
        dense = self.table(ids.values - 1, torch.as_tensor(ids.offsets[:-1])).sum(1)
        self.difference = max(self.difference, (dense - logits["y"]).abs().max().item())
        return ((dense - batch["label"]) ** 2).sum()  # type: ignore[operator, no-any-return]


class Steps(Hook):
    """Counts steps and notes losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.losses.append(result.mean_loss)


def run(task: nn.Module, *, max_steps: int, prefetch: int = 1, **settings: bool) -> dict[str, object]:
    """Train `task` as this process says that it is."""
    parameters = list(task.parameters())
    adagrad = torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=1.0, eps=0.0) if parameters else None
    trainer = Trainer(task, adagrad, config=RunConfig(embedding_prefetch_capacity=prefetch, clip_norm=None))
    runner = RunnerConfig.from_env(defaults=RunnerConfig(enable_sync_training=True, **settings))  # type: ignore[arg-type]
    steps = Steps()
    made = distributed_sync_train(trainer, Repeated(), runner, max_steps=max_steps, hooks=[steps])
    return {"steps": made, "losses": steps.losses, "difference": getattr(task, "difference", None)}


def main() -> None:
    """Run all cases."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    found = {
        "ragged": run(RaggedTask(), max_steps=2),
        "float": run(FloatTask(), max_steps=2),
        "sequence": run(SequenceTask(), max_steps=2),
        "non_feature": run(NonFeatureTask(), max_steps=2),
        "equivalent": run(EquivalentTask(), max_steps=10, prefetch=0),
    }
    for steps, (number, pipeline) in itertools.product((2, 4), enumerate(PIPELINES)):
        found[f"{steps} steps, {number}"] = run(RaggedTask(), max_steps=steps, **pipeline)
    sys.stdout.write(json.dumps({"rank": RunnerConfig.from_env().index, **found}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
