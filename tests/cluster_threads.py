"""A run over servers and workers as threads of one process: quick, and every clock that waits in it is short."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from monolith.cluster import HostServiceDiscovery
from monolith.cluster.coordination import Members
from monolith.features import Batch, Feature, Ragged
from monolith.nn import EmbeddingBagCollection
from monolith.ps import ClientConfig
from monolith.ps.client.server_group import link_to
from monolith.ps.protocol.calls import Call
from monolith.table import SGD, Zeros
from monolith.train import RunConfig, RunnerConfig, Trainer
from monolith.train.distributed.run import distributed_train
from monolith.train.hooks import Hook

BATCH: Batch = {"feature": Ragged.from_lists([[0, 1]]), "label": torch.ones(1)}


class FeatureModel(nn.Module):
    """The task of the original's test: one feature of ids 0 and 1; every step takes the same from the rows of both."""

    def __init__(self) -> None:
        super().__init__()
        feature = Feature(name="feature", dim=5, initializer=Zeros(), optimizer=SGD(learning_rate=1.0))
        self.embeddings = EmbeddingBagCollection([feature])
        self.dense = nn.Linear(5, 1)

    def forward(self, batch: Batch) -> Tensor:
        return self.dense(self.embeddings(batch)["feature"]).squeeze(1)  # type: ignore[no-any-return]


def sleep(seconds: float) -> None:
    time.sleep(min(seconds, 0.02))


class Cluster:
    """All processes of a run, each a thread."""

    def __init__(
        self,
        folder: Path,
        *,
        num_ps: int,
        num_workers: int,
        config: RunConfig | None = None,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        scheduler: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
        **given: object,
    ) -> None:
        settings: dict[str, Any] = {"retry_wait_in_secs": 0.1, "start_timeout_secs": 60.0, "chief_timeout_secs": 60.0}
        self.folder = folder
        self.settings = settings | {"num_ps": num_ps, "num_workers": num_workers, "model_dir": str(folder)} | given
        self._config, self._optimizer, self._scheduler = config, optimizer, scheduler
        self.trainers: dict[int, Trainer] = {}

    def runner(self, kind: str, index: int) -> RunnerConfig:
        return RunnerConfig(server_type=kind, index=index, **self.settings)

    def start(
        self,
        kind: str,
        index: int,
        source: Iterable[Batch] = (),
        hooks: Sequence[Hook] = (),
        *,
        sleep: Callable[[float], None] = sleep,
        **limits: int,
    ) -> Future[int]:
        torch.manual_seed(0)
        model = FeatureModel()
        optimizer = self._optimizer(model)
        scheduler = None if self._scheduler is None else self._scheduler(optimizer)
        config = self._config
        if config is not None and index > 0:
            # As an Estimator does: the chief saves for all.
            config = config.model_copy(update={"model_dir": None, "warm_start_from": None})
        trainer = Trainer(model, optimizer, scheduler=scheduler, config=config)
        if kind == "worker":
            self.trainers[index] = trainer
        discovery = HostServiceDiscovery(self.folder / "discovery")
        runner = self.runner(kind, index)
        return started(
            lambda: distributed_train(trainer, source, runner, discovery, hooks=hooks, sleep=sleep, **limits)
        )

    def servers(self) -> list[Future[int]]:
        runner = self.runner("ps", 0)
        count = runner.num_required_ps + runner.num_redundant_ps
        return [self.start("ps", index) for index in range(count)]


def phases(address: str) -> dict[int, str]:
    """How far the workers of a run are, as its first server knows it."""
    link = link_to(address, ClientConfig())
    try:
        members = Members.from_json(link.call(Call.MEMBERS).text).members
    finally:
        link.close()
    return {member.index: member.phase for member in members}


def started(run: Callable[[], int]) -> Future[int]:
    """`run` in a thread that does not keep a test which failed from ending."""
    future: Future[int] = Future()

    def tell() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=tell, daemon=True).start()
    return future
