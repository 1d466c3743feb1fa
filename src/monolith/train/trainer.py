"""`Trainer`: the step loop with hooks. A plain PyTorch loop does the same. This one adds stopping, resuming and monitoring."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from monolith.data.prefetch import Prefetch
from monolith.data.sources.source import StreamLag
from monolith.data.transforms.rows import concat_rows
from monolith.errors import InvalidArgumentError, MemoryLimitError, MonolithError
from monolith.features.batch import Batch, as_batch, num_rows
from monolith.log.change_log import ChangeLog
from monolith.nn import auxiliary_loss, clip_grads_, dense_state_dict, embedding_collections
from monolith.nn.heads import Head, column, heads_of, logits_by_head, sums_over_examples, total_loss
from monolith.nn.layers.mlp import HasAuxiliaryLoss
from monolith.ranks.data_shards import (
    PartsAhead,
    ShardsInTurn,
    joined_position,
    shards_of_position,
    skip_history,
)
from monolith.state.model_dir import ModelDir
from monolith.table import EmbeddingTable, TableStats
from monolith.table.store import Position, Store
from monolith.train.checkpoints import TrainerSaving
from monolith.train.config import RunConfig
from monolith.train.device import BatchPlacement, device_of, find_device, move_model, require_same_parameters
from monolith.train.hooks.checkpoint import MetricSink, log_metric
from monolith.train.hooks.deep_insight import DeepInsightHook
from monolith.train.hooks.event_time import EventTimeHook
from monolith.train.hooks.hook import CheckpointSaverListener, Hook, Moments, hooks_running, overriding
from monolith.train.hooks.stop import NanGuardHook
from monolith.train.hooks.tide import SecondOrStepTimerWithTideSetting
from monolith.train.preconditions import is_resumable, require_limits, require_optimizer, require_scheduler
from monolith.train.processors import use_threads
from monolith.train.restoring import RestoreChoice, has_restore_settings, recover_servers, restore_chosen, warm_start
from monolith.train.updates import DenseState, SparsePush, WorkerPositions, decoded_position
from monolith.train.waiting import Pause, arriving, fix_start, require_one_pass, waits_for_records

if TYPE_CHECKING:
    from monolith.train.synchronous import SynchronousSteps

_log = logging.getLogger(__name__)

__all__ = ["DATA_ENDED", "StepResult", "Trainer"]

_OWN = object()
DATA_ENDED = "the data ended"
"""The `stop_reason` of a run that used its source up."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one step did."""

    step: int
    """The global step, counting from 1."""
    loss: Tensor
    """What `backward` starts from, a scalar: the sum over the examples for heads that sum. NaN while predicting."""
    grad_norm: Tensor | None
    """Joint norm of all gradients before clipping, scalar. None without clipping."""
    logits: dict[str, Tensor]
    """By head, before the update: predictions for examples the model had not seen. Empty for a rank whose data has ended."""
    batch: Batch
    """The columns it was made with. Empty for a rank whose data has ended."""
    examples: int
    """Rows of the batch. Loss, norm and rows of a synchronous run are those of the batches of all ranks."""
    loss_is_sum: bool = False
    """Whether `loss` grows with the number of examples."""

    @property
    def mean_loss(self) -> float:
        """The loss per example, for people and curves: comparable between batches of different sizes."""
        return self.loss.item() / (max(self.examples, 1) if self.loss_is_sum else 1)


class Trainer:
    """Trains `model`, whose forward maps a batch to logits (of its only head, or by name of head).

    A step: forward, the sum of the losses of heads and layers, backward, clipping of dense and sparse gradients, by their
    joint norm unless `config` says otherwise, the dense `optimizer`, the step of every `EmbeddingBagCollection`, global step + 1.
    A `scheduler` of torch, or of `monolith.optim.lr_scheduler`, is then brought to that step.

    Example:
        >>> from monolith.features import Feature
        >>> from monolith.nn import EmbeddingBagCollection
        >>> class Popularity(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embeddings = EmbeddingBagCollection([Feature(name="item", dim=1)])
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
        scheduler: LRScheduler | None = None,
        heads: Sequence[Head] | None = None,
        config: RunConfig | None = None,
        hooks: Sequence[Hook] = (),
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        """Of the dense learning rates. It follows the global step and is saved with the optimizer."""
        self.heads = heads_of(model, heads)
        self.config = config or RunConfig()
        self.hooks = (*hooks, *DeepInsightHook.of_run(self.config, type(model).__name__))
        self.accepts_lost_servers = False
        """Whether a run continues when a server has lost what was trained on it. See `RunnerConfig.partial_recovery`."""
        self.rewinds_servers = False
        """Whether servers go back to the checkpoint that a run starts from, or to nothing without one. So do runs whose processes
        restore data and dense parameters of one step. Other workers continue with the rows that servers have."""
        self.num_workers = 1
        """Workers of the run, among which the data is divided."""
        self.named_by_launch = False
        """Whether servers know this worker by a name of this launch alone: then an earlier incarnation had the same data."""
        self.save_listeners: tuple[CheckpointSaverListener, ...] = ()
        """Called around every full save of a run."""
        self.save_guards: tuple[CheckpointSaverListener, ...] = ()
        """Called before the first and after the last attempt of a full save, even if all fail."""
        self.on_save_metric: MetricSink = log_metric
        """Called with the count and duration of saves. See `NoFirstSaveCheckpointSaverHook`."""
        self.before_saving: list[Callable[[], None]] = []
        """Called before the state is taken, to apply what waits for the next step. See `AsyncFunctionManager.hooks`."""
        self.step = 0
        """Steps made since the model was new, earlier runs included."""
        self.epochs = 0
        """Complete passes over the data, earlier runs of an unfinished job included."""
        self.steps_made = 0
        """Steps of the last run alone."""
        self.stop_reason: str | None = None
        """Why the last run ended, or None while it runs."""
        self.interrupted: str | None = None
        """The reason that `interrupt` was called with during the last run, or None."""
        self.last_batch: Batch | None = None
        """The batch of the last step made."""
        if self.config.device is not None:
            move_model(model, find_device(self.config.device), optimizer)
        self.device = device_of(model)
        """Where the dense part of the model computes."""
        self._placement = BatchPlacement.needed(model, self.device, self.config.static_rows)
        self._collections = embedding_collections(model)
        # Asked once: finding out costs as much as a small layer.
        self._layers_have_losses = any(isinstance(module, HasAuxiliaryLoss) for module in model.modules())
        self._loss_is_sum = sums_over_examples(self.heads)
        self.push = SparsePush(
            model, delayed=self.config.enable_embedding_postpush, hold_at=self.config.hold_schedules_at
        )
        """Applies sparse gradients."""
        self.ranks: SynchronousSteps | None = None
        """How this process makes its steps together with others. None: it makes them alone."""
        self._positions = WorkerPositions()
        self._position: Position | None = None
        self.event_time = 0
        """The newest event time trained, if `config.event_time` names the column."""
        self.source_state: object = None
        """The position in the data after the last run, if its source has one."""
        self._reading: Prefetch | PartsAhead | None = None
        self._stream: Prefetch | None = None
        self._unfinished: tuple[Position, ...] = ()
        self._begins = False
        self._start_is_new = False
        self._loaded_place: object = None
        self._shares = 1
        """The `num_workers` of the run that the position in the data comes from."""
        self._restored: RestoreChoice | None = None
        self._restored_for: Literal["training", "reading"] | None = None
        self._clears_dense = False
        self._rounds = 0
        self._saving = None if self.config.model_dir is None else TrainerSaving(self)
        require_optimizer(model, optimizer)
        self.dense = DenseState(self)
        """What a checkpoint has of optimizer and scheduler."""

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """Called at the moments of each run, before the trainer's own hooks, which save."""
        return self._hooks

    @hooks.setter
    def hooks(self, hooks: tuple[Hook, ...]) -> None:
        self._hooks, self._updating = hooks, overriding(hooks, "before_update")

    @property
    def stores(self) -> list[Store]:
        """The distinct stores of the model's embeddings."""
        stores = {id(c.store): c.store for c in self._collections}
        return list(stores.values())

    @property
    def remote_stores(self) -> list[Store]:
        """Those of `stores` whose rows other processes hold."""
        return [store for store in self.stores if store.remote]

    @property
    def model_dir(self) -> ModelDir | None:
        """The folder with checkpoints and change log. None if the run is not saved."""
        return None if self._saving is None else self._saving.model_dir

    @property
    def change_log(self) -> ChangeLog | None:
        """The open change log of the run. None between runs, and if it has none."""
        return None if self._saving is None else self._saving.change_log

    @property
    def save_timers(self) -> Mapping[str, SecondOrStepTimerWithTideSetting]:
        """The timers of this run's checkpoints by kind, "full" and "dense_only". A hook may switch them on and off."""
        return {} if self._saving is None else self._saving.timers

    def tables(self) -> dict[str, list[EmbeddingTable]]:
        """Return the tables in this process by the name they have in checkpoints. Several of one name are its shards."""
        stores = self.stores
        if len(stores) == 1:
            return {name: [table] for name, table in stores[0].tables.items()}
        return {f"{n}/{name}": [table] for n, store in enumerate(stores) for name, table in store.tables.items()}

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever the state that would be saved changes."""
        return self._rounds, self.step

    def note_change(self) -> None:
        """Say that rows have changed without a step, so that the next save does not take the present state for saved."""
        self._rounds += 1

    def renew_snapshot(self) -> None:
        """Write a snapshot of all rows now. The next checkpoint then needs no rows that were written before."""
        if self._saving is not None:
            self._saving.renew_snapshot()

    def drop_checkpoints(self, names: Sequence[str]) -> None:
        """Remove older checkpoints of the run by name, and the rows that only they needed."""
        if self._saving is not None:
            self._saving.drop(names)

    def table_stats(self) -> dict[str, TableStats]:
        """Return the size of every table by name. With several stores, their numbers come before the names."""
        stores = self.stores
        if len(stores) == 1:
            return stores[0].stats()
        return {f"{n}/{name}": stats for n, store in enumerate(stores) for name, stats in store.stats().items()}

    def request_stop(self, reason: str) -> None:
        """End the run before the next step. The first reason given is kept."""
        self.stop_reason = self.stop_reason or reason

    def interrupt(self, reason: str) -> None:
        """End the run before the next step although its work is not done, as on a signal to end.

        Like `request_stop`, but in a run over several processes the work of this one is then left to its successor.
        """
        self.interrupted = self.interrupted or reason
        self.request_stop(reason)

    def fit(self, source: Iterable[Batch], *, steps: int | None = None, max_steps: int | None = None) -> int:
        """Train until the data has ended `config.epochs` times, `steps` more steps are made, or the global step is `max_steps`.

        With `config.model_dir` the run continues from what is saved there, and is saved now and then and when it ends. So is
        the position in the data, if the source has one: the saved one is loaded into `source` before the first step. A run
        that has made all its epochs before it was restored makes no step and says so, unless `steps` asks for more. A second call
        in the same process is a new pass over its data. The trainer's own hooks, which save, come after those given to it.

        A source that waits for records, such as a stream, is read once, whatever `config.epochs` says: the run ends with its
        steps, or with a source that ends. A later run continues with what has come since.

        Returns:
            The global step.
        """
        require_limits(steps, max_steps)
        require_one_pass(source, self.config.epochs)
        require_scheduler(self.scheduler)
        if self.stop_reason == DATA_ENDED:
            self.epochs = 0
        self.stop_reason, self.interrupted, self.steps_made = None, None, 0
        self._follow_model()
        use_threads(self.config.threads)
        hooks = self.hooks
        if self.ranks is None or self.ranks.is_chief:
            hooks = (*hooks, *EventTimeHook.of_run(self.config))
        if self._saving is not None:
            self._saving.create()
            hooks = (*hooks, *self._saving.hooks())
        try:
            with hooks_running(hooks, self, start=lambda: self._start(source)):
                last = max_steps if steps is None else self.step + steps
                if not self._has_finished(source, last, asked_for_more=bool(steps)):
                    self._clears_dense = False
                    self._loop(source, last, hooks)
            self._warn_of_short_data(steps)
        finally:
            if self._saving is not None:
                self._saving.close()
        if self.ranks is not None:
            self.ranks.end_run()
        return self.step

    def train_step(self, batch: Batch) -> StepResult:
        """Make one step. Of the hooks only `before_update` is called."""
        batch = as_batch(batch)
        batch, loss, logits = self.pass_forward(batch)
        if self.push.delayed:
            self.push.start()
        if loss.requires_grad:
            torch.autograd.backward(loss)
        if self.push.delayed:
            self.push.finish()
        loss, norm = loss.detach(), self.clip()
        event_time = 0 if self.config.event_time is None else self.event_time_of(batch, self.config.event_time)
        self.update(loss, norm, event_time)
        self.last_batch = batch
        return StepResult(
            step=self.step,
            loss=loss,
            grad_norm=norm,
            logits={name: tensor.detach() for name, tensor in logits.items()},
            batch=batch,
            examples=num_rows(batch),
            loss_is_sum=self._loss_is_sum,
        )

    def forward(self, batch: Batch) -> tuple[Batch, dict[str, Tensor]]:
        """Return the columns of `batch` where the model computes, and its logits for them by head."""
        if self._placement is None:
            return batch, logits_by_head(self.model(batch), self.heads)
        placed = self._placement(batch)
        return self._placement.real(batch, placed, logits_by_head(self.model(placed), self.heads))

    def pass_forward(
        self, batch: Batch, *, first: bool = True, share: float = 1.0
    ) -> tuple[Batch, Tensor, dict[str, Tensor]]:
        """Make a forward pass of training. Returns the columns where the model computes, the loss, and the logits by head.

        The `first` one of a step forgets the gradients of the step before. The losses of layers are multiplied by `share`, for
        one of several passes of a step whose losses are added.
        """
        self.model.train()
        if first:
            self.model.zero_grad(set_to_none=True)
            for collection in self._collections:
                collection.discard_gradients()
        if self._placement is None:
            logits = logits_by_head(self.model(batch), self.heads)
        else:
            batch, logits = self.forward(batch)
        loss = total_loss(logits, batch, self.heads)
        if self._layers_have_losses:
            loss = loss + share * auxiliary_loss(self.model)
        extra = getattr(self.model, "extra_loss", None)
        if extra is not None:
            loss = loss + extra(batch, logits)
        return batch, loss, logits

    def settle(self, *, here: bool = False) -> None:
        """Apply all updates that wait for the next step, so that the state and the number of steps agree.

        Ranks of a synchronous run do it together. With `here` this one does its part.
        """
        if self.ranks is not None and not here:
            self.ranks.settle()
            return
        self.push.settle()
        for apply in self.before_saving:
            apply()

    def state_dict(self, *, position: object = _OWN) -> dict[str, object]:
        """Everything but the tables: the step, dense parameters, the optimizer, random numbers, the position in the data.

        Another `position` than that of this run may be given.
        """
        if position is _OWN and self.ranks is None:
            position = self.source_state if self._reading is None else self._reading.state_dict()
        elif position is _OWN and self.ranks is not None:
            position = self.ranks.positions()
        batches = {"batches": self._positions.batches} if self._positions.active else {}
        return {
            **batches,
            "step": self.step,
            "epochs": self.epochs,
            "workers": self.num_workers,
            "event_time": self.event_time,
            "model": dense_state_dict(self.model),
            **self.dense.state(),
            "generator": torch.get_rng_state(),
            "source": position,
        }

    @property
    def position(self) -> object:
        """The position of this process in its data, if the source has one."""
        return self.source_state if self._reading is None else self._reading.state_dict()

    def lag(self) -> StreamLag | None:
        """Return how far this process is behind the stream that it reads, or read last. None for other sources."""
        return None if self._stream is None else self._stream.lag()

    @property
    def loaded_position(self) -> object:
        """The position that was restored, until a run continues from it."""
        return self._loaded_place

    def read_from(self, reading: PartsAhead) -> None:
        """Take the position in the data from `reading` during this pass, if the source has one."""
        if self._reading is not None:
            self._reading = reading

    def tell_position(self) -> None:
        """Report the position to those that record it, before the step with the batches that were taken last."""
        if self._positions.active:
            self._position = self._positions.tell(None if self._reading is None else self.position, self.epochs)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned. Random numbers only with a `config.seed`.

        Hyperparameters of the optimizer that the code declares otherwise than when the state was made keep the code's values.

        Raises:
            CheckpointMismatchError: the state is of another class of optimizer. Nothing has changed.
        """
        plan = self.dense.plan(state)
        plan.require("state")
        self.model.load_state_dict(state["model"])
        plan.apply()
        self.load_position(state)

    def load_position(self, state: Mapping[str, Any]) -> None:
        """Take the step, the position in the data and random numbers of `state`, and nothing else."""
        if self.config.seed is not None and isinstance(generator := state.get("generator"), Tensor):
            torch.set_rng_state(generator)
        self.source_state = state["source"]
        self._loaded_place = state["source"] if self.config.resume_data else None
        self.event_time = int(state.get("event_time", 0))
        self._positions.batches = int(state.get("batches", 0))
        self.epochs = int(state.get("epochs", 0)) if self.config.resume_data else 0
        self._shares = int(state.get("workers", 1))
        self.step = int(state["step"])

    def start_over(self, state: Mapping[str, Any]) -> None:
        """Go back to `state`, as if this process had just begun: the next run restores what is saved.

        Args:
            state: of this trainer from before its first step. Rows are not part of it.
        """
        self.model.zero_grad(set_to_none=True)
        for collection in self._collections:
            collection.discard_gradients()
        self.push.abandon()
        self.load_state_dict(deepcopy(dict(state)))
        self._restored = self._restored_for = self._reading = self._position = None
        self._positions, self._rounds, self._clears_dense = WorkerPositions(), 0, False
        if self._saving is not None:
            self._saving = TrainerSaving(self)

    def save(self) -> str | None:
        """Save now, and return when it is durable: the checkpoint's path, or None without a model_dir.

        During `fit`, in a hook or in another thread, see `NoFirstSaveCheckpointSaverHook.trigger_save`.
        """
        return None if self._saving is None else self._saving.save()

    def restore(self, *, training: bool = False) -> bool:
        """Load what the configuration says, once, before the first step. Returns whether this call did.

        With `training`, fields such as `restore_ckpt` are followed as training does, also after a call without it.
        """
        if not self._must_restore(training):
            return False
        # Until now the script may have changed hyperparameters of its optimizer.
        self.dense.declare()
        if self.config.seed is not None:
            torch.manual_seed(self.config.seed)
        choice, parent = restore_chosen(self, training=training)
        if choice is None and self.config.warm_start_from is not None:
            warm_start(self, self.config.warm_start_from)
        if self._saving is not None:
            self._saving.track(parent)
        # Only now: a run that could not be restored must not start from nothing when it is tried again.
        self._restored, self._restored_for = choice, "training" if training else "reading"
        self._clears_dense = choice is not None and choice.clear_nn
        return choice is not None

    def _must_restore(self, training: bool) -> bool:
        if self._restored_for is None:
            return self.step == 0
        again = training and self._restored_for == "reading"
        if self._restored is None:
            return again and self.rewinds_servers and self.step == 0
        settings = self.rewinds_servers or has_restore_settings(self.config)
        return again and settings and self.step == self._restored.point.step

    def _start(self, source: Iterable[Batch]) -> None:
        if self.ranks is not None and not self.ranks.is_chief:
            self.ranks.receive_start()
            return
        restored = self.restore(training=True)
        if not (waits_for_records(source) and self.remote_stores):
            self._require_own_share(source)
        if self._restored is not None and not self._rounds:
            point = self._restored.point
            _log.info("continuing from step %d of %s", point.step, point.checkpoint or f"the log of {point.model_dir}")
        if self._saving is not None:
            recover_servers(self)
        # Ranks know their positions by what was restored, all of them at one step.
        resume = is_resumable(source) and self._resumes
        followed = self.ranks is None and self._follow_predecessor(source, resume=resume)
        if not followed:
            self._require_own_share(source)
        if restored or followed:
            self._warn_of_unknown_place(source)
        if followed and not self._resumes:
            _log.warning(
                "resume_data=False: this worker has trained %d batches before, and begins with the first of its source; if it "
                "was restarted in the middle of a run, some count twice",
                self._positions.batches,
            )
        if self.ranks is not None:
            # Before anything is saved: all ranks must have what was restored.
            self.ranks.send_start()
        if self._saving is not None:
            self._saving.open(self._restored if restored else None)

    def _require_own_share(self, source: Iterable[Batch]) -> None:
        """Raise if the position in the data that was restored is one in another share of it than this worker has."""
        shards = shards_of_position(self._loaded_place)
        divided = self.ranks is not None and is_resumable(source) and not waits_for_records(source)
        fits = self._shares == self.num_workers
        if shards is not None:
            # One process reads the shards in turn, and how many shards there are is checked where they are made.
            fits = divided or self.num_workers == 1
        elif divided and self._loaded_place is not None:
            fits = False
        if fits or not self.config.resume_data or not (self.epochs or self._loaded_place is not None):
            self._shares = self.num_workers
            return
        then = _count(self._shares, "worker") if shards is None else f"ranks, in {_count(shards, 'data shard')}"
        now = _count(self.num_workers, "worker") if self.ranks is None else _count(self.ranks.num_ranks, "rank")
        raise InvalidArgumentError(
            f"the position in the data was saved by a run of {then}, and this is one of {now}: each has another share of the "
            f"data, and some of it would be trained twice or never. Continue with {then}, give another model_dir, or start with "
            "the first batch or other data with RunConfig(resume_data=False)"
        )

    def _warn_of_unknown_place(self, source: Iterable[Batch]) -> None:
        """Log that a run which continues does not know where in its data it stopped."""
        finished = self.config.epochs is not None and self.epochs >= self.config.epochs
        # Between two passes there is no place to know.
        unknown = not is_resumable(source) or (self._loaded_place is None and not self.epochs)
        if self.step and self.config.resume_data and not finished and unknown:
            _log.warning(
                "source: a %s has no position to resume from: the run continues at step %d with whatever the source gives now, "
                "also data that it was trained on before",
                type(source).__name__,
                self.step,
            )

    @property
    def _resumes(self) -> bool:
        """Whether an earlier incarnation of this worker trained on the data that it is given now."""
        return self.config.resume_data or self.named_by_launch

    def _follow_predecessor(self, source: Iterable[Batch], *, resume: bool) -> bool:
        """Resume from the last position of this worker that all servers have, if its data can be resumed.

        Returns:
            Whether there was an earlier incarnation.
        """
        before = self._positions.batches
        waits = resume and waits_for_records(source)
        join = source.join_state_dicts if waits else None  # type: ignore[attr-defined]
        place = self._positions.begin(self.stores, resume=resume, join=join)
        if place is not None and place.batches and self._resumes:
            _log.info(
                "continuing after batch %d of this worker%s",
                place.batches,
                f"; repeating {place.started} that not all servers have" * bool(place.started),
            )
        if place is not None:
            self._positions.batches, self._loaded_place = place.batches, place.state
            self._unfinished = place.ahead
            self.epochs = place.epochs if self._resumes else 0
        self.step += max(0, self._positions.batches - before)
        if place is not None:
            self._shares = self.num_workers
        self._begins = waits and self._positions.active and (place is None or not place.batches)
        return place is not None

    def _warn_of_short_data(self, steps: int | None) -> None:
        if steps is not None and self.stop_reason == DATA_ENDED:
            made, advice = self.steps_made, "" if self._stream is not None else "; epochs=None repeats it"
            _log.warning("the data ended after %d of the %d steps that were asked for%s", made, steps, advice)

    def _has_finished(self, source: Iterable[Batch], last: int | None, *, asked_for_more: bool) -> bool:
        """Whether a restored run has nothing left to do, which is then logged and becomes its `stop_reason`."""
        if last is not None and self.step >= last:
            self.request_stop(f"step {last} is reached")
            _log.warning("nothing to do: the run is at step %d of %d; to continue, raise max_steps", self.step, last)
            return True
        epochs = self.config.epochs
        if epochs is None or self.epochs < epochs or waits_for_records(source):
            return False
        cleared = self._clears_dense
        if asked_for_more or cleared:
            why = "dense parameters start again (clear_nn)" if cleared else "more steps were asked for"
            _log.info("the data has been read %d times and is read again: %s", self.epochs, why)
            self.epochs = 0
            return False
        self.request_stop(f"all {epochs} epochs are done" if epochs > 1 else "its epoch over the data is done")
        _log.warning(
            "nothing to do: the run has finished, %s at step %d. For another pass set epochs=%d, for other data "
            "resume_data=False",
            self.stop_reason,
            self.step,
            epochs + 1,
        )
        return True

    def _loop(self, source: Iterable[Batch], last: int | None, hooks: Sequence[Hook]) -> None:
        self._rounds += 1
        # Only once: a source that comes later is other data, or knows its place itself.
        place, self._loaded_place = self._loaded_place, None
        if place is None and self.epochs:
            skip_history(source)
        if self.ranks is not None:
            source = self.ranks.divided(source, place)
        elif waits_for_records(source) and isinstance(place, Mapping):
            place = joined_position(source, place)
        elif (shards := shards_of_position(place)) is not None and self.num_workers == 1:
            _log.info("the position is that of a run of ranks: the data is read in their %d shards, in turn", shards)
            source = ShardsInTurn(source, shards=shards)
        resumable = is_resumable(source)
        continues = place is not None and resumable
        if continues:
            source.load_state_dict(place)  # type: ignore[attr-defined]
        moments = Moments.of(hooks)
        # The next incarnation must begin where this one does, even if this one is killed before it has trained anything.
        self._start_is_new |= fix_start(source)
        if waits_for_records(source):
            unfinished, self._unfinished = self._unfinished, ()
            if self._begins:
                self._begins = False
                self._positions.tell_start(source.state_dict())  # type: ignore[attr-defined]
            self._repeat(source, unfinished, moments)
        with Prefetch(source, capacity=self.config.embedding_prefetch_capacity) as ahead:
            self._reading, self.source_state = (ahead, None) if resumable else (None, None)
            self._stream = ahead if ahead.waits else None
            try:
                if self.ranks is None:
                    self.save_start()
                while self.stop_reason is None:
                    make = self._pass if self.ranks is None else self.ranks.make_pass
                    examples = make(ahead, last, moments)
                    if self.stop_reason is None:
                        self._end_pass(source, examples, whole=not continues)
                        continues = False
                        if self.ranks is not None:
                            self.ranks.end_pass(ahead, source)
                if self._reading is not None:
                    self.source_state = self._reading.state_dict()
                if self.ranks is not None:
                    self.ranks.drain()
            except MemoryLimitError:
                # Nothing more fits: what was learned so far is saved, and the operator must free memory.
                self._save_what_there_is()
                raise
            finally:
                self._reading, self._position = None, None
                if self.ranks is None:
                    self.push.drain()
                else:
                    self.push.abandon()
        if self.ranks is not None and resumable and self.source_state is not None:
            # Batches that were shown and not trained are the next ones.
            source.load_state_dict(self.source_state)  # type: ignore[attr-defined]
        if self.stop_reason == DATA_ENDED and not waits_for_records(source):
            self._positions.tell_end(self.epochs)

    def save_start(self) -> None:
        """Save the position before the first batch, if that was decided only now. Ranks do it when they can save together.

        Servers that record positions have it already, see `WorkerPositions.tell_start`.
        """
        if self._start_is_new and self._saving is not None and not self._positions.active:
            self._saving.save()
        self._start_is_new = False

    def _repeat(self, source: Iterable[Batch], unfinished: Sequence[Position], moments: Moments) -> None:
        """Train the records that an earlier incarnation of this worker has trained on some servers and not on others.

        The servers that have had them skip them. Reading on would cut other batches, and count some records twice.
        """
        for position in unfinished:
            if position.state is None:
                raise InvalidArgumentError(
                    f"source: batch {position.batches} of this worker is on some servers only, and the position behind it is not "
                    "known; start from a checkpoint, or with RunConfig(resume_data=False) accept that some records count twice"
                )
            batches = list(source.replay(decoded_position(position.state)))  # type: ignore[attr-defined]
            _log.info(
                "batch %d of this worker was interrupted: its %d records are trained again where they are missing",
                position.batches,
                sum(map(num_rows, batches)),
            )
            if not batches:
                self._positions.skip(position)
                continue
            for hook in moments.before_step:
                hook.before_step(self)
            self._position = self._positions.repeat(position)
            result = self.train_step(concat_rows([as_batch(batch) for batch in batches]))
            self.steps_made += 1
            for hook in moments.after_step:
                hook.after_step(self, result)

    def _pass(self, ahead: Prefetch, last: int | None, moments: Moments) -> int:
        """Train on one pass over the data, or until the run stops. Returns the number of examples."""
        examples, batches = 0, iter(ahead)
        before, after = moments.before_step, moments.after_step
        if ahead.waits:
            batches = arriving(ahead, self, Pause(self, hooks=moments.while_waiting, last=last, source=ahead))
        while True:
            if last is not None and self.step >= last:
                self.request_stop(f"step {last} is reached")
            if self.stop_reason is None:
                for hook in before:
                    hook.before_step(self)
            if self.stop_reason is not None or (batch := next(batches, None)) is None:
                return examples
            if self._positions.active:
                state = None if self._reading is None else ahead.state_dict()
                self._position = self._positions.tell(state, self.epochs)
            result = self.train_step(batch)
            examples += result.examples
            self.steps_made += 1
            for hook in after:
                hook.after_step(self, result)

    def _end_pass(self, source: Iterable[Batch], examples: int, *, whole: bool) -> None:
        """Count a pass over the data, and stop if it was the last. `whole`: it began at the first batch."""
        if waits_for_records(source):
            # It is read on when more has come, so its position stays.
            self.request_stop(DATA_ENDED)
            self._rounds += 1
            return
        if not examples and whole:
            self._require_data(source)
        self.epochs += 1
        if self.config.epochs is not None and self.epochs >= self.config.epochs:
            self.request_stop(DATA_ENDED)
            self._reading = None
            self._rounds += 1
        else:
            _log.info("epoch %d ended at step %d, the data begins again", self.epochs, self.step)

    def _require_data(self, source: Iterable[Batch]) -> None:
        """Raise if `source` never gives a row. The share of one worker among several may be empty."""
        if self.epochs:
            raise InvalidArgumentError(
                f"source: a {type(source).__name__} gave no rows when it was read again for epoch {self.epochs + 1}; give "
                "a list, a Source, or IteratorSource(function)"
            )
        if self._positions.active or self.step > self.steps_made:
            _log.warning("source: it gave no rows; if this worker should have some, use more files or fewer workers")
            return
        raise InvalidArgumentError("source: the data has no rows; check its paths and filters")

    def _save_what_there_is(self) -> None:
        if self._saving is None:
            return
        try:
            self._saving.save()
        except MonolithError as error:
            _log.error("the run ends without a checkpoint of its last state: %s", error)

    def clip(self, sparse_squares: np.ndarray | None = None, *, weight: float = 1.0) -> Tensor | None:
        """Clip all gradients as the configuration says. Returns their norm before, None without clipping.

        Args:
            sparse_squares: see `clip_grads_`, for gradients of which other processes have a part.
            weight: what the gradients were multiplied by. Limits are multiplied by it too.
        """
        config = self.config
        if config.clip_norm is None:
            return None
        sparse_limit = config.sparse_clip_norm
        if config.sparse_norm_warmup_steps is not None:
            sparse_limit = (sparse_limit or config.clip_norm) * min(
                1.0, (self.step + 1) / config.sparse_norm_warmup_steps
            )
        return clip_grads_(
            self.model,
            config.clip_norm * weight,
            by=config.clip_type,
            sparse_limit=None if sparse_limit is None else sparse_limit * weight,
            sparse_squares=sparse_squares,
        )

    def update(self, loss: Tensor, norm: Tensor | None, event_time: int) -> None:
        """Change all parameters by the gradients that there are, and count the step.

        Args:
            loss: of the step, scalar.
            norm: of the gradients before clipping, if they were clipped.
            event_time: the newest of the batch, 0 if there is none.
        """
        if self.config.stop_on_nan and not (loss.isfinite() and (norm is None or norm.isfinite())):
            NanGuardHook.check(self.step + 1, loss, norm)
        for hook in self._updating:
            hook.before_update(self, loss, norm)
        if self.config.dense_weight_decay:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach(), alpha=self.config.dense_weight_decay)
        if self.optimizer is not None:
            if self.scheduler is not None:
                self.dense.follow(self.step)
            if (served := self.dense.served) is not None:
                served.set_position(self._position)
            self.optimizer.step()
        pushing = self.push if self.ranks is None else self.ranks
        pushing.push(self.step, event_time, self._position)
        self.step += 1
        if self.scheduler is not None:
            self.dense.follow(self.step)

    def event_time_of(self, batch: Batch, name: str) -> int:
        """Return the newest event time of a batch, which has them in the column `name`."""
        times = column(batch, name, "RunConfig.event_time")
        newest = int(times.max()) if times.numel() else 0
        self.event_time = max(self.event_time, newest)
        return newest

    def _follow_model(self) -> None:
        """Place batches where the model is now, if the caller has moved it."""
        device = device_of(self.model)
        if device == self.device:
            return
        if self.optimizer is not None:
            require_same_parameters(self.model, self.optimizer)
        self.device, self._placement = device, BatchPlacement.needed(self.model, device, self.config.static_rows)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
