"""`Controller`: what an operator may ask of a running job. The chief does it between two steps."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from monolith.console import Reminder
from monolith.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    MonolithError,
    RankLostError,
    RanksDisagreeError,
)
from monolith.features.ids import to_fids
from monolith.nn import dense_state_dict, embedding_collections
from monolith.table.arrays import id_array
from monolith.table.entries import Entries
from monolith.train.distributed.barrier import HOLD, STOP, LocalBarrier, WorkerBarrier
from monolith.train.forgetting import Forgotten, forget_rows
from monolith.train.hooks.hook import Hook
from monolith.train.run_feed import RunFeed

if TYPE_CHECKING:
    from monolith.nn import EmbeddingBagCollection
    from monolith.table.arrays import Ids
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["ANSWER_SECS", "BlockStatus", "Controller", "FeatureRows", "ModelDescription", "TrainingStatus"]

ANSWER_SECS = 60.0
"""Seconds that a caller waits by default until the run is between two steps."""
MAX_IDS = 10_000
"""Ids that may be asked for at once."""
END_REASON = "an operator has ended the run"

T = TypeVar("T")
RunState = Literal["starting", "training", "stopped", "ending"]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BlockStatus:
    """Which workers are held between two steps."""

    stopped: bool
    """Whether training is stopped."""
    blocked: tuple[int, ...]
    """The workers that are held. 0 is the chief."""
    unblocked: tuple[int, ...]
    """The workers that still train. Those that have ended are in neither list."""


@dataclass(frozen=True, kw_only=True)
class TrainingStatus:
    """How far a run is."""

    state: RunState
    """"starting" until it is restored, "ending" while the last checkpoint is written."""
    step: int
    """The global step."""
    seconds_since_step: float | None
    """Seconds since the chief made its last step. None before the first."""
    examples_per_second: float | None
    """Of the chief, since the run began or was resumed. None before the first step."""
    epochs: int
    """Complete passes of the chief over its data."""
    event_time: int
    """The newest event time trained, 0 if the run does not know any."""
    num_workers: int
    """Workers of the run, the chief included."""
    stop_reason: str | None
    """Why the run ends. None while it goes on."""
    last_checkpoint: str | None
    """Path of the newest checkpoint that an operator has asked for."""
    lag_records: int | None = None
    """Records of its stream that the chief has not read yet. None for a run without a stream."""
    lag_seconds: float | None = None
    """How old the newest record was that it has read, where it is furthest behind. None if that is not known."""
    bad_records: int = 0
    """Records of the stream that could not be used."""
    late_records: int = 0
    """Records that came after the watermark had passed their event time."""


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """What can be asked of a model."""

    num_workers: int
    """Workers of the run, the chief included."""
    servers: tuple[str, ...]
    """Addresses of the parameter servers."""
    features: dict[str, str]
    """The table of each feature."""
    variables: dict[str, tuple[int, ...]]
    """The shape of each dense value."""


@dataclass(frozen=True, kw_only=True)
class FeatureRows:
    """Rows of one feature."""

    feature: str
    table: str
    ids: tuple[int, ...]
    """The ids that were asked for, as they are in a batch."""
    entries: Entries
    """Their rows in the same order. Its ids are those of the table, which differ for features with slots."""


@dataclass(eq=False)
class _Command:
    action: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)


class Controller(Hook):
    """A hook that does what other threads ask of a run, in the thread that trains and between two steps.

    Methods with a `timeout` may be called by any thread. They wait at most so many seconds until the run is between two steps. A
    request that was not begun by then is withdrawn.

    Example:
        >>> from torch import nn
        >>> from monolith.train import Trainer
        >>> trainer = Trainer(nn.Identity())
        >>> controller = Controller(trainer)
        >>> trainer.hooks = (controller,)
        >>> controller.status().state
        'starting'
    """

    poll_seconds = 0.5

    def __init__(
        self,
        trainer: Trainer,
        *,
        num_workers: int = 1,
        feed: RunFeed | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trainer, self._num_workers, self._clock = trainer, num_workers, clock
        self._barrier: WorkerBarrier = LocalBarrier(1)
        self._servers: Callable[[], Sequence[str]] = tuple
        self._state: RunState = "starting"
        self._stopped = self._ended_all = False
        self._commands: deque[_Command] = deque()
        self._changed = threading.Condition()
        self._thread: int | None = None
        self._stepped: float | None = None
        self._since, self._examples = 0.0, 0
        self._held_seconds = 0.0
        self._checkpoint: str | None = None
        self.feed = feed or RunFeed(trainer)
        """What replicas follow."""

    def attach(self, barrier: WorkerBarrier, *, servers: Callable[[], Sequence[str]] = tuple) -> None:
        """Say what the next attempt of the run consists of.

        Args:
            barrier: holds the other workers.
            servers: returns the addresses of the parameter servers.
        """
        self._barrier, self._servers = barrier, servers
        self.feed.servers = servers

    def status(self) -> TrainingStatus:
        """Return how far the run is, without waiting for the end of a step."""
        trainer, now = self._trainer, self._clock()
        seconds = None if self._stepped is None else self._stepped - self._since
        lag = trainer.lag()
        return TrainingStatus(
            state="stopped" if self._stopped and self._state == "training" else self._state,
            step=trainer.step,
            seconds_since_step=None if self._stepped is None else now - self._stepped,
            examples_per_second=self._examples / seconds if seconds else None,
            epochs=trainer.epochs,
            event_time=trainer.event_time,
            num_workers=self._num_workers,
            stop_reason=trainer.stop_reason,
            last_checkpoint=self._checkpoint,
            lag_records=None if lag is None else lag.records,
            lag_seconds=None if lag is None else lag.seconds,
            bad_records=0 if lag is None else lag.bad,
            late_records=0 if lag is None else lag.late,
        )

    def block_status(self) -> BlockStatus:
        """Return which workers are held, without waiting for the end of a step."""
        stopped = self._stopped and self._state == "training"
        if not stopped:
            return BlockStatus(stopped=False, blocked=(), unblocked=tuple(range(self._num_workers)))
        barrier = self._barrier
        return BlockStatus(stopped=True, blocked=tuple(barrier.held()), unblocked=tuple(barrier.unblocked()))

    def stop(self, *, timeout: float = ANSWER_SECS) -> BlockStatus:
        """Hold all workers between two steps until `resume`. Others than the chief may still be in a step when it returns.

        Raises:
            InvalidArgumentError: training is stopped already.
        """
        self._submit(self._stop, timeout)
        return self.block_status()

    def resume(self, *, timeout: float = ANSWER_SECS) -> None:
        """Let a run that was stopped continue. Does nothing to one that trains."""
        self._submit(self._resume, timeout)

    def save(self, *, timeout: float = ANSWER_SECS) -> str:
        """Save a checkpoint now, also while training is stopped. Returns its path once it is durable.

        Raises:
            InvalidArgumentError: the run has no model_dir.
            StorageError: it could not be written in two attempts. Training continues.
        """
        return self._submit(self._save, timeout)

    def end_run(self, *, timeout: float = ANSWER_SECS) -> None:
        """End the run in all workers before their next step, with a checkpoint. A later run with the same model_dir resumes."""
        self._submit(self._end_run, timeout)

    def describe(self) -> ModelDescription:
        """Return what can be asked of the model, without waiting for the end of a step."""
        model = self._trainer.model
        return ModelDescription(
            num_workers=self._num_workers,
            servers=tuple(self._servers()),
            features={
                name: table for c in embedding_collections(model) for name, table in c.declaration.assignment.items()
            },
            variables={
                "global_step": (),
                **{name: tuple(value.shape) for name, value in dense_state_dict(model).items()},
            },
        )

    def variables(self, names: Sequence[str], *, timeout: float = ANSWER_SECS) -> dict[str, torch.Tensor]:
        """Return copies of dense values by name, those that exist. "global_step" is one of them.

        Where servers train them, they are those of the servers.
        """
        return self._submit(lambda: self._variables(names), timeout)

    def features(self, names: Sequence[str], ids: Ids, *, timeout: float = ANSWER_SECS) -> dict[str, FeatureRows]:
        """Return the rows that features have for `ids`, with optimizer state. Features that do not exist are left out."""
        wanted = id_array(ids).reshape(-1)
        if wanted.size * len(names) > MAX_IDS:
            raise InvalidArgumentError(
                f"ids: expected at most {MAX_IDS:,} rows at once, got {wanted.size:,} ids of {len(names)} features"
            )
        return self._submit(lambda: self._features(names, [int(one) for one in wanted]), timeout)

    def forget(
        self,
        ids: Ids,
        *,
        tables: Sequence[str] = (),
        features: Sequence[str] = (),
        renew: bool = False,
        timeout: float = ANSWER_SECS,
    ) -> Forgotten:
        """Remove the rows of `ids` between two steps and save a checkpoint. The arguments are those of `forget_rows`."""
        wanted = id_array(ids).reshape(-1)
        if not 0 < wanted.size <= MAX_IDS:
            raise InvalidArgumentError(f"ids: expected 1 to {MAX_IDS:,} ids at once, got {wanted.size:,}")
        return self._submit(
            lambda: forget_rows(self._trainer, wanted, tables=tables, features=features, renew=renew), timeout
        )

    def drop_checkpoints(self, names: Sequence[str], *, timeout: float = ANSWER_SECS) -> None:
        """Remove older checkpoints of the run by name between two steps, and the rows that only they needed."""
        self._submit(lambda: self._trainer.drop_checkpoints(names), timeout)

    def running_clock(self) -> float:
        """Return a clock in seconds that stands still while training is stopped, for limits on how long others may take."""
        return self._clock() - self._held_seconds

    def begin(self, trainer: Trainer) -> None:
        """Another attempt of the run begins."""
        self._thread, self._state = threading.get_ident(), "starting"

    def after_start(self, trainer: Trainer) -> None:
        """The run is restored."""
        self._since, self._state = self._clock(), "training"
        self.feed.after_start(trainer)

    def before_step(self, trainer: Trainer) -> None:
        """Do what was asked for."""
        self.serve()

    def while_waiting(self, trainer: Trainer) -> None:
        """Do what was asked for."""
        self.serve()

    def before_update(self, trainer: Trainer, loss: torch.Tensor, grad_norm: torch.Tensor | None) -> None:
        """Weights change from here on."""
        self.feed.before_update(trainer, loss, grad_norm)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Count the step."""
        self._stepped = self._clock()
        self._examples += result.examples
        self.feed.after_step(trainer, result)

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Do what was asked for during the last step. After an error, requests wait for another attempt or for `close`."""
        if error is None:
            self._run_commands()
        self.feed.end(trainer, error)
        # Only now: a run that ends while it is stopped must not hold the others.
        if self._stopped or self._ended_all:
            self._stopped = self._ended_all = False
            try:
                self._barrier.remove()
            except MonolithError as failure:
                # What broke the run must not be hidden by it. The barrier falls with this process.
                if error is None:
                    raise
                _log.warning("the workers are held until the chief is gone: %s", failure)
        with self._changed:
            self._thread, self._state = None, "starting" if error is not None else "ending"

    def close(self) -> None:
        """Refuse whatever is still asked for: the run is over."""
        with self._changed:
            self._state = "ending"
            left, self._commands = self._commands, deque()
        for command in left:
            command.result.set_exception(InvalidArgumentError("the run has ended without doing it"))
        self.feed.close()

    def _submit(self, action: Callable[[], T], timeout: float) -> T:
        if threading.get_ident() == self._thread:
            return action()
        command = _Command(action)
        with self._changed:
            if self._state == "ending":
                raise InvalidArgumentError(f"the run is ending, at step {self._trainer.step}; nothing was done")
            self._commands.append(command)
            self._changed.notify_all()
        try:
            result: T = command.result.result(timeout)
        except TimeoutError:
            if command.result.done():
                raise
            raise DeadlineExceededError(self._overdue(command, timeout)) from None
        return result

    def _overdue(self, command: _Command, timeout: float) -> str:
        with self._changed:
            begun = command not in self._commands
            if not begun:
                self._commands.remove(command)
        if begun:
            return f"the run has begun to do it, and has not finished within {timeout:g} s; it goes on"
        at = "before its first step" if self._stepped is None else f"after step {self._trainer.step}"
        return f"the run was not between two steps for {timeout:g} s ({self._state}, {at}); nothing was done"

    def _stop(self) -> None:
        if self._stopped:
            raise InvalidArgumentError("stop: training is stopped already")
        self._barrier.place(HOLD)
        self._stopped = True
        _log.warning("training is stopped after step %d, until it is resumed", self._trainer.step)

    def _resume(self) -> None:
        if not self._stopped:
            return
        self._stopped, self._stepped, self._examples = False, None, 0
        self._barrier.remove()
        _log.info("training is resumed after step %d", self._trainer.step)

    def _save(self) -> str:
        path = self._trainer.save()
        if path is None:
            raise InvalidArgumentError("save: the run has no model_dir to save in")
        self._checkpoint = path
        return path

    def _end_run(self) -> None:
        if self._ended_all:
            return
        self._resume()
        if self._barrier.capacity > 1:
            # It stays until the chief ends: workers that come by later see it too.
            self._barrier.place(STOP)
            self._ended_all = True
        self._trainer.request_stop(END_REASON)

    def _variables(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        trainer = self._trainer
        known: dict[str, torch.Tensor] = {"global_step": torch.tensor(trainer.step), **dense_state_dict(trainer.model)}
        served = trainer.dense.served
        if served is not None:
            known |= served.values_in(trainer.model, served.origin.read())
        return {name: known[name].detach().cpu().clone() for name in names if name in known}

    def _features(self, names: Sequence[str], ids: list[int]) -> dict[str, FeatureRows]:
        # Updates that wait for the next step belong to the step that was made.
        self._trainer.settle()
        homes = {f.name: c for c in embedding_collections(self._trainer.model) for f in c.features}
        return {name: _rows(homes[name], name, ids) for name in names if name in homes}

    def serve(self) -> None:
        """Do what was asked for, in the thread that trains. While training is stopped, wait here until it is resumed."""
        if not self._commands and not self._stopped:
            return
        self._run_commands()
        trainer, began = self._trainer, self._clock()
        reminder, ended = Reminder(_log, who="the chief", clock=self._clock), (trainer.stop_reason, trainer.interrupted)
        while self._stopped and (trainer.stop_reason, trainer.interrupted) == ended:
            reminder.waiting("`resume`: an operator has stopped training after step %d", self._trainer.step)
            self._barrier.keep()
            with self._changed:
                if not self._commands:
                    self._changed.wait(self.poll_seconds)
            self._run_commands()
        self._held_seconds += self._clock() - began
        # A chief that must end waits for the others, which must not wait for it.
        self._resume()

    def _run_commands(self) -> None:
        while self._commands:
            with self._changed:
                command = self._commands.popleft()
            try:
                command.result.set_result(command.action())
            except BaseException as error:
                command.result.set_exception(error)
                # Such an error of one rank breaks the run of all. Any other is that of the caller alone.
                if not isinstance(error, Exception) or isinstance(error, RankLostError | RanksDisagreeError):
                    raise


def _rows(collection: EmbeddingBagCollection, feature: str, ids: list[int]) -> FeatureRows:
    name = collection.declaration.assignment[feature]
    table = collection.declaration[name]
    slot = next(slot for one, slot in zip(table.features, table.slots, strict=True) if one.name == feature)
    keys = torch.tensor(ids, dtype=torch.int64) if slot is None else to_fids(ids, slot)
    return FeatureRows(feature=feature, table=name, ids=tuple(ids), entries=collection.store.lookup_entry(name, keys))
