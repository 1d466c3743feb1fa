"""A run in a thread that trains without end, for tests of what operators can ask of it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from monolith.features.batch import Batch
from monolith.train import RunConfig, Trainer
from monolith.train.control import Controller
from training import ClickModel, batch_of

SECONDS = 60.0


class Endless:
    """Batches without end. While `gate` is cleared, the next one does not come."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Event()
        self.closed = False
        self.given = 0

    def __iter__(self) -> Iterator[Batch]:
        for number in itertools.count():
            self.asked.set()
            self.gate.wait(SECONDS)
            if self.closed:
                return
            self.given = number + 1
            yield batch_of(number % 7)


class Run:
    """A trainer in a thread, with its controller."""

    def __init__(self, folder: Path | None, **config: Any) -> None:  # noqa: ANN401
        model = ClickModel()
        settings = RunConfig(
            model_dir=None if folder is None else str(folder), embedding_prefetch_capacity=0, threads=1, **config
        )
        self.trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), config=settings)
        self.controller = Controller(self.trainer)
        self.trainer.hooks = (self.controller,)
        self.data = Endless()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._fit, daemon=True)

    def _fit(self) -> None:
        try:
            self.trainer.fit(self.data)
        except BaseException as error:
            self.error = error
        finally:
            self.controller.close()

    def ended(self) -> str | None:
        """Wait for the end. Returns the reason."""
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.trainer.stop_reason


@contextmanager
def running(folder: Path | None = None, **config: Any) -> Iterator[Run]:  # noqa: ANN401
    """A run that has seen all of its batches."""
    run = Run(folder, **config)
    run.thread.start()
    try:
        while int(run.controller.variables(["global_step"], timeout=SECONDS)["global_step"]) < 7:
            pass
        yield run
    finally:
        run.data.closed = True
        run.data.gate.set()
        run.trainer.request_stop("the test is over")
        run.thread.join(SECONDS)
