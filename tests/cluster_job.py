"""The script of the tests that run a cluster as processes: the same for servers and workers, configured by the environment
alone.

What the original's distributed test binary does: `--case normal`, `deaf` (servers that never shut down), `slow` (a deadline is
exceeded before the first step). And `hang`: the chief stands still after two steps.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer of a process imports it, which takes seconds
from torch import Tensor, nn

from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.errors import DeadlineExceededError
from monolith.features import Batch, Feature
from monolith.nn import EmbeddingBagCollection
from monolith.ps import ParameterServer
from monolith.table import Adagrad
from monolith.train import Estimator, RunConfig, RunnerConfig, StepResult, Trainer
from monolith.train.hooks import Hook

COLUMNS = ("user_id", "item_id", "category_id")
BATCHES = 12


class ClickModel(nn.Module):
    """Embeddings of three columns and a layer; with `stack` as one tensor, with `one_table` out of one table."""

    def __init__(self, *, stack: bool = False, one_table: bool = False) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection(
            [
                Feature(
                    name=name,
                    dim=4,
                    optimizer=Adagrad(learning_rate=0.1),
                    slot=place + 1 if one_table else None,
                    stack="all" if stack else None,
                )
                for place, name in enumerate(COLUMNS)
            ]
        )
        self.dense = nn.Linear(12, 1)

    def forward(self, batch: Batch) -> Tensor:
        rows = torch.cat([output.flatten(1) for output in self.embeddings(batch).values()], dim=1)  # type: ignore[union-attr]
        return self.dense(rows).squeeze(1)  # type: ignore[no-any-return]

    def input_fn(self, mode: str) -> ClickStream:
        return ClickStream(ClickStreamConfig(users=100, items=100, batches=BATCHES, batch_size=32))


class Hang(Hook):
    """Goes on after its second step only when the file `go` is there; the file beside it says that it waits."""

    def __init__(self, go: Path) -> None:
        self._go, self._made = go, 0

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self._made += 1
        if self._made == 2:
            self._go.with_name("waits").touch()
            while not self._go.exists():
                time.sleep(0.02)


class SlowOnce(Hook):
    """A deadline is exceeded before the first step, the first time."""

    raised = False

    def before_step(self, trainer: Trainer) -> None:
        if not self.raised:
            self.raised = True
            raise DeadlineExceededError("a step took too long")


def run(
    case: str = "normal",
    environ: Mapping[str, str] | None = None,
    *,
    stack: bool = False,
    one_table: bool = False,
    epochs: int = 1,
) -> None:
    """Be the process that `environ` says."""
    torch.set_num_threads(1)
    if case == "deaf":
        ParameterServer.wait = lambda self, timeout=None: threading.Event().wait()  # type: ignore[method-assign]
    config = RunConfig(embedding_prefetch_capacity=1, enable_embedding_postpush=True, epochs=epochs)
    estimator = Estimator(ClickModel(stack=stack, one_table=one_table), config, runner=RunnerConfig.from_env(environ))
    hooks: list[Hook] = [SlowOnce()] if case == "slow" else []
    if case == "hang" and estimator.runner.is_chief:
        hooks = [Hang(Path(estimator.runner.model_dir, "go"))]
    step = estimator.train(hooks=hooks)
    sys.stdout.write(f"{estimator.runner.server_type} {estimator.runner.index} ends at {step}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=["normal", "deaf", "slow", "hang"], default="normal")
    run(parser.parse_args().case)
