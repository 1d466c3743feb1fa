"""Checkpoints for a training loop of one's own."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from monolith.state_bytes import Stateful
from monolith.train.config import RunConfig
from monolith.train.trainer import Trainer

__all__ = ["ModelCheckpoints"]


class ModelCheckpoints:
    """Saves and restores a model, its embedding tables, its optimizer and the position in the data, in one folder.

    A checkpoint costs what changed since the last one, is durable when `save` returns, and is the same that `Trainer` writes and
    continues from.

    Args:
        model_dir: a path or a URL.
        model: dense parameters, buffers, and every `EmbeddingBagCollection` inside.
        optimizer: of the dense parameters.
        scheduler: of the optimizer's learning rates. If it is not given the rates continue where they were, but a scheduler that
            the loop makes counts from its beginning.
        source: what the batches come from, if it has a position: anything with `state_dict` and `load_state_dict`.
        max_to_keep: checkpoints that stay. None keeps all.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as model_dir:
        ...     model = nn.Linear(2, 1)
        ...     checkpoints = ModelCheckpoints(model_dir, model, torch.optim.SGD(model.parameters()))
        ...     for step in range(checkpoints.restore(), 3):
        ...         pass  # forward, backward, optimizer.step(), embeddings.step()
        ...     path = checkpoints.save(step + 1)
        ...     ModelCheckpoints(model_dir, model, torch.optim.SGD(model.parameters())).restore()
        3
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scheduler: LRScheduler | None = None,
        source: Stateful | None = None,
        max_to_keep: int | None = 10,
    ) -> None:
        config = RunConfig(model_dir=os.fspath(model_dir), checkpoints_max_to_keep=max_to_keep)
        self._trainer = Trainer(model, optimizer, scheduler=scheduler, config=config)
        self._source = source

    def restore(self) -> int:
        """Continue from the newest checkpoint. Returns the steps made until then, 0 if there is none.

        On an error nothing has changed.
        """
        self._trainer.restore(training=True)
        place = self._trainer.source_state
        if self._source is not None and place is not None:
            self._source.load_state_dict(place)
        return self._trainer.step

    def save(self, step: int, *, event_time: int = 0) -> str:
        """Save between two steps, after `step` steps. Returns the path of the checkpoint, which is durable then."""
        self._trainer.step, self._trainer.event_time = step, event_time
        self._trainer.source_state = None if self._source is None else dict(self._source.state_dict())
        return str(self._trainer.save())
