"""`Trainer`: the step loop with hooks. A plain PyTorch loop does the same; this one adds stopping, resuming and watching."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from monolith.data.prefetch import Prefetch
from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.features.batch import Batch, num_rows
from monolith.nn import auxiliary_loss, clip_grads_, embedding_collections
from monolith.nn.layers.auxiliary import HasAuxiliaryLoss
from monolith.table import TableStats
from monolith.table.store import Store
from monolith.train.config import RunConfig
from monolith.train.heads import Head, column, heads_of, logits_by_head, total_loss
from monolith.train.hooks.hook import Hook
from monolith.train.hooks.nan_guard import NanGuardHook
from monolith.train.hooks.run import hooks_running
from monolith.train.preconditions import is_resumable, require_limits, require_optimizer, require_same_model
from monolith.train.run_folder import RunFolder
from monolith.train.sparse_push import SparsePush

__all__ = ["DATA_ENDED", "StepResult", "Trainer"]

DATA_ENDED = "the data ended"
"""The `stop_reason` of a run that used its source up."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did."""

    step: int
    """The global step, counting from 1."""
    loss: Tensor
    """Scalar, before the update; NaN while predicting."""
    grad_norm: Tensor | None
    """Joint norm of all gradients before clipping, scalar; None without clipping."""
    logits: dict[str, Tensor]
    """By head, before the update: predictions for examples the model had not seen."""
    batch: Batch
    """The columns it was made with."""
    examples: int
    """Rows of the batch."""


class Trainer:
    """Trains `model`, whose forward maps a batch to logits (of its only head, or by name of head).

    A step: forward, the sum of the losses of heads and layers, backward, clipping of dense and sparse gradients, by their
    joint norm unless `config` says otherwise, the dense `optimizer`, the step of every `EmbeddingCollection`, global step + 1.

    Example:
        >>> from monolith.features import Feature
        >>> from monolith.nn import EmbeddingCollection
        >>> class Popularity(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embeddings = EmbeddingCollection([Feature(name="item", dim=1)])
        ...     def forward(self, batch):
        ...         return self.embeddings(batch)["item"]
        >>> data = [{"item": torch.tensor([1, 2]), "label": torch.tensor([0.0, 1.0])}] * 3
        >>> trainer = Trainer(Popularity())
        >>> trainer.fit(data)
        3
        >>> trainer.stop_reason
        'the data ended'
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        heads: Sequence[Head] | None = None,
        config: RunConfig | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.heads = heads_of(model, heads)
        self.config = config or RunConfig()
        self.hooks: tuple[Hook, ...] = tuple(hooks)
        self.step = 0
        """Steps made since the model was new, earlier runs included."""
        self.stop_reason: str | None = None
        """Why the last run ended, or None while it runs."""
        self.last_batch: Batch | None = None
        """The batch of the last step made."""
        self._collections = embedding_collections(model)
        # Asked once: finding out costs as much as a small layer.
        self._layers_have_losses = any(isinstance(module, HasAuxiliaryLoss) for module in model.modules())
        self._push = SparsePush(model, delayed=self.config.enable_embedding_postpush)
        self._source_state: object = None
        self._loaded_place: object = None
        self._restored = False
        require_optimizer(model, optimizer)

    @property
    def stores(self) -> list[Store]:
        """The distinct stores of the model's embeddings."""
        stores = {id(c.store): c.store for c in self._collections}
        return list(stores.values())

    def table_stats(self) -> dict[str, TableStats]:
        """The size of every table by name; with several stores, their numbers come before the names."""
        stores = self.stores
        if len(stores) == 1:
            return stores[0].stats()
        return {f"{n}/{name}": stats for n, store in enumerate(stores) for name, stats in store.stats().items()}

    def request_stop(self, reason: str) -> None:
        """End the run before the next step; the first reason given is kept."""
        self.stop_reason = self.stop_reason or reason

    def fit(self, source: Iterable[Batch], *, steps: int | None = None, max_steps: int | None = None) -> int:
        """Train until the data ends, `steps` more steps are made, or the global step is `max_steps`; returns the global step.

        With `config.model_dir` the run continues from what is saved there and is saved when it ends. So is the place in the
        data, if the source can tell it: the saved one is loaded into `source` before the first step. A source that was used up
        starts again.
        """
        require_limits(steps, max_steps)
        if self.config.model_dir is not None:
            RunFolder(self.config.model_dir).create()
        self.stop_reason = None
        with hooks_running(self.hooks, self, start=self.restore):
            self._loop(source, max_steps if steps is None else self.step + steps)
            self.save()
        return self.step

    def train_step(self, batch: Batch) -> StepResult:
        """Make one step; of the hooks only `before_update` is called."""
        if not isinstance(batch, Mapping):
            raise InvalidArgumentError(f"batch: expected a dict of columns by name, got {type(batch).__name__}")
        self.model.train()
        self._discard_gradients()
        logits = logits_by_head(self.model(batch), self.heads)
        loss = total_loss(logits, batch, self.heads)
        if self._layers_have_losses:
            loss = loss + auxiliary_loss(self.model)
        extra = getattr(self.model, "extra_loss", None)
        if extra is not None:
            loss = loss + extra(batch, logits)
        self._push.start()
        if loss.requires_grad:
            torch.autograd.backward(loss)
        self._push.finish()
        norm = self._clip()
        if self.config.stop_on_nan:
            NanGuardHook.check(self.step + 1, loss.detach(), norm)
        for hook in self.hooks:
            hook.before_update(self, loss.detach(), norm)
        self._update(batch)
        self.last_batch = batch
        return StepResult(
            step=self.step,
            loss=loss.detach(),
            grad_norm=norm,
            logits={name: tensor.detach() for name, tensor in logits.items()},
            batch=batch,
            examples=num_rows(batch),
        )

    def state_dict(self) -> dict[str, object]:
        """Everything but the tables: the step, dense parameters, the optimizer, the place in the data."""
        state: dict[str, object] = {
            "step": self.step,
            "model": dict(self.model.state_dict()),
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "source": self._source_state,
        }
        if self.config.seed is not None:
            state["generator"] = torch.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from what `state_dict` returned."""
        self.model.load_state_dict(state["model"])  # type: ignore[arg-type]
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]
        if self.config.seed is not None and isinstance(generator := state.get("generator"), Tensor):
            torch.set_rng_state(generator)
        self._source_state = self._loaded_place = state["source"]
        self.step = int(state["step"])  # type: ignore[call-overload]

    def save(self) -> None:
        """Keep state and tables in `config.model_dir`, if there is one."""
        if self.config.model_dir is not None:
            RunFolder(self.config.model_dir).save(self.state_dict(), self.stores)

    def restore(self) -> bool:
        """Load what `config.model_dir` holds, once, before the first step; whether this call did."""
        if self._restored or self.step:
            return False
        if self.config.seed is not None:
            torch.manual_seed(self.config.seed)
        found = self.config.model_dir is not None and RunFolder(self.config.model_dir).exists()
        if found:
            self._load(RunFolder(str(self.config.model_dir)))
        elif self.config.warm_start_from is not None:
            self._warm_start(RunFolder(self.config.warm_start_from))
        # Only now: a run that could not be restored must not start from nothing when it is tried again.
        self._restored = True
        return found

    def _load(self, folder: RunFolder) -> None:
        state = self._read_state(folder)
        folder.restore(self.stores)
        self.load_state_dict(state)

    def _warm_start(self, folder: RunFolder) -> None:
        if not folder.exists():
            raise InvalidArgumentError(
                f"RunConfig.warm_start_from: expected the model_dir of a saved run, got {self.config.warm_start_from!r}"
            )
        state = self._read_state(folder)
        folder.restore(self.stores)
        self.model.load_state_dict(state["model"])
        for collection in self._collections:
            collection.steps.zero_()

    def _read_state(self, folder: RunFolder) -> dict[str, Any]:
        state = folder.state()
        if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
            raise CorruptFileError(f"{folder.latest()}: expected the state of a run")
        require_same_model(self.model, state["model"], folder.latest())
        return state

    def _loop(self, source: Iterable[Batch], last: int | None) -> None:
        resumable = is_resumable(source)
        # Only once: a source that comes later is other data, or knows its place itself.
        place, self._loaded_place = self._loaded_place, None
        if place is not None and resumable and self.config.resume_data:
            source.load_state_dict(place)  # type: ignore[attr-defined]
        with Prefetch(source, capacity=self.config.embedding_prefetch_capacity) as ahead:
            batches = iter(ahead)
            try:
                while not self._stops(last):
                    batch = next(batches, None)
                    if batch is None:
                        self.request_stop(DATA_ENDED)
                        resumable = False
                        break
                    result = self.train_step(batch)
                    for hook in self.hooks:
                        hook.after_step(self, result)
            finally:
                self._push.drain()
            self._source_state = ahead.state_dict() if resumable else None

    def _stops(self, last: int | None) -> bool:
        if last is not None and self.step >= last:
            self.request_stop(f"step {last} is reached")
        if self.stop_reason is None:
            for hook in self.hooks:
                hook.before_step(self)
        return self.stop_reason is not None

    def _clip(self) -> Tensor | None:
        config = self.config
        if config.clip_norm is None:
            return None
        return clip_grads_(self.model, config.clip_norm, by=config.clip_type, sparse_limit=config.sparse_clip_norm)

    def _update(self, batch: Batch) -> None:
        if self.config.dense_weight_decay:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach(), alpha=self.config.dense_weight_decay)
        if self.optimizer is not None:
            self.optimizer.step()
        self._push.push(self.step, self._event_time(batch))
        self.step += 1

    def _event_time(self, batch: Batch) -> int:
        name = self.config.event_time
        if name is None:
            return 0
        times = column(batch, name, "RunConfig.event_time")
        return int(times.max()) if times.numel() else 0

    def _discard_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)
        for collection in self._collections:
            collection.discard_gradients()
