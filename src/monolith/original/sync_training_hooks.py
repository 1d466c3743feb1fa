"""Hooks of synchronous training, as the original names them: control files that rank 0 reads and all ranks follow.

Each hook is given to every rank. Rank 0 reads the files and the clock, and an action of the `Agreement` carries the decision to
the others, so that all ranks decide alike at the same step. In a run of one process the same hooks work without ranks.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from pydantic import JsonValue
from torch import Tensor, nn

from monolith.dataservice.dataset import DatasetConfig
from monolith.dataservice.source import DataServiceSource
from monolith.errors import InvalidArgumentError, MonolithError
from monolith.features.batch import Batch, as_batch
from monolith.state.storage import open_folder
from monolith.train.hooks.hook import CheckpointSaverListener, EverySteps, Hook
from monolith.train.hooks.tide import SecondOrStepTimerWithTideSetting, utc_now
from monolith.train.preconditions import is_resumable

if TYPE_CHECKING:
    from monolith.ranks.agreement import Agreement
    from monolith.train.trainer import StepResult, Trainer

__all__ = [
    "EofAwareTask",
    "ReqTimeControlDumpHook",
    "SyncTrainingBarrierSaverListener",
    "SyncTrainingForceDumpHook",
    "SyncTrainingInfoHook",
    "SyncTrainingSaverControlHook",
]

DUMP_HOURS = range(18, 21)
"""Hours (UTC) in which `SyncTrainingForceDumpHook` lets checkpoints be written."""
ONLINE = "ONLINE"
"""The file that switches the saver of `SyncTrainingSaverControlHook` on."""
LIMIT = "limit_req_time"
"""The file with the request time at which `ReqTimeControlDumpHook` stops."""
_CONTROL_FILE = re.compile(r"(dump|stop)_(\d{1,18})")
_log = logging.getLogger(__name__)


def _agreement(trainer: Trainer) -> Agreement | None:
    """Return what the ranks of the run agree with, or None in a run of one process."""
    return None if trainer.ranks is None else trainer.ranks.agreement


def _is_chief(trainer: Trainer) -> bool:
    return trainer.ranks is None or trainer.ranks.is_chief


class SyncTrainingBarrierSaverListener(CheckpointSaverListener):
    """After each save, waits until all ranks are between two steps and know that the checkpoint is there.

    An error is logged: the checkpoint is durable in any case.

    Example:
        >>> from torch import nn
        >>> from monolith.train import Trainer
        >>> trainer = Trainer(nn.Identity())
        >>> trainer.save_listeners = (SyncTrainingBarrierSaverListener(),)
    """

    def after_save(self, trainer: Trainer, step: int) -> None:
        """Wait for all ranks."""
        agreement = _agreement(trainer)
        if agreement is None:
            return
        try:
            agreement.barrier()
        except MonolithError:
            _log.exception("the ranks could not be told that step %d is saved", step)


class _ControlHook(Hook):
    """Lets rank 0 decide something every `step_interval` steps, and all ranks follow the decision."""

    def __init__(
        self, model_dir: str, target_timer: SecondOrStepTimerWithTideSetting | None = None, step_interval: int = 100
    ) -> None:
        self._folder, self._timer = open_folder(model_dir), target_timer
        self._due = EverySteps(step_interval)
        self._trainer: Trainer | None = None

    def begin(self, trainer: Trainer) -> None:
        """Follow the decisions of rank 0."""
        self._trainer = trainer
        agreement = _agreement(trainer)
        if agreement is not None:
            agreement.actions[type(self).__name__] = self._follow

    def after_start(self, trainer: Trainer) -> None:
        """Begin to count."""
        self._due.is_due(trainer.step)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """On rank 0: decide, if it is time, and let all ranks follow."""
        if not self._due.is_due(trainer.step) or not _is_chief(trainer):
            return
        decision, agreement = self._decide(trainer), _agreement(trainer)
        if agreement is None:
            self._follow(decision)
        else:
            agreement.run(type(self).__name__, decision)

    def _decide(self, trainer: Trainer) -> JsonValue:
        raise NotImplementedError

    def _follow(self, decision: JsonValue) -> JsonValue:
        raise NotImplementedError

    def _timer_of_run(self) -> SecondOrStepTimerWithTideSetting | None:
        """Return the timer that was given, or that of the run's checkpoints. None on ranks that save nothing."""
        assert self._trainer is not None
        return self._timer or self._trainer.save_timers.get("full")

    def _enable(self, on: bool) -> None:
        if (timer := self._timer_of_run()) is not None:
            timer.enable() if on else timer.disable()

    def _make_due(self) -> None:
        if (timer := self._timer_of_run()) is not None:
            timer.enable()
            timer.reset()


class SyncTrainingForceDumpHook(_ControlHook):
    """Lets checkpoints be written from 18 to 20 o'clock UTC, and at any time when an operator asks for one.

    Every `step_interval` steps rank 0 looks at the files of `model_dir`: `dump_<step>` makes a checkpoint due at once, and
    `stop_<step>` ends the run, both when `step` is reached. In the hours from 18 to 20 the timer is on, otherwise off.

    Args:
        model_dir: where the files are.
        target_timer: of the checkpoints. None: that of the run.
        step_interval: steps between two looks.
        now: the present, in UTC.

    Example:
        >>> hook = SyncTrainingForceDumpHook("runs/ctr", step_interval=10)
    """

    def __init__(
        self,
        model_dir: str,
        target_timer: SecondOrStepTimerWithTideSetting | None = None,
        step_interval: int = 100,
        *,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        super().__init__(model_dir, target_timer, step_interval)
        self._now = now
        self._looked_at = 0

    def after_start(self, trainer: Trainer) -> None:
        """Ignore files of steps that an earlier run has made."""
        super().after_start(trainer)
        self._looked_at = trainer.step

    def _decide(self, trainer: Trainer) -> JsonValue:
        found = [match for name in self._folder.names() if (match := _CONTROL_FILE.fullmatch(name)) is not None]
        # Also of steps since the last look: a global step may have passed the one that was meant.
        asked = {match[1] for match in found if self._looked_at < int(match[2]) <= trainer.step}
        self._looked_at = trainer.step
        return {"dump": "dump" in asked, "stop": "stop" in asked, "hours": self._now().hour in DUMP_HOURS}

    def _follow(self, decision: JsonValue) -> JsonValue:
        told = cast("dict[str, bool]", decision)
        self._enable(told["hours"])
        if told["dump"]:
            self._make_due()
        if told["stop"] and self._trainer is not None:
            self._trainer.request_stop("the file stop_<step> asks for it")
        return None


class SyncTrainingSaverControlHook(_ControlHook):
    """Switches a saver on while the file `ONLINE` is in `model_dir`, and off while it is not.

    Args:
        model_dir: where the file is.
        target_timer: of the saver. None: that of the dense-only checkpoints of the run.
        step_interval: steps between two looks.

    Example:
        >>> hook = SyncTrainingSaverControlHook("runs/ctr")
    """

    def _decide(self, trainer: Trainer) -> JsonValue:
        return self._folder.size(ONLINE) is not None

    def _follow(self, decision: JsonValue) -> JsonValue:
        self._enable(bool(decision))
        return None

    def _timer_of_run(self) -> SecondOrStepTimerWithTideSetting | None:
        assert self._trainer is not None
        return self._timer or self._trainer.save_timers.get("dense_only")


class ReqTimeControlDumpHook(_ControlHook):
    """Saves and ends the run when it has trained data of the request time in the file `limit_req_time`.

    The request time is the newest event time that any rank has trained (`RunConfig.event_time`). A file with 0 or no file sets no
    limit.

    Args:
        model_dir: where the file is.
        target_timer: of the checkpoints. None: that of the run.
        step_interval: steps between two looks.

    Example:
        >>> hook = ReqTimeControlDumpHook("runs/ctr")
    """

    def __init__(
        self, model_dir: str, target_timer: SecondOrStepTimerWithTideSetting | None = None, step_interval: int = 1000
    ) -> None:
        super().__init__(model_dir, target_timer, step_interval)

    def begin(self, trainer: Trainer) -> None:
        """Require a request time."""
        super().begin(trainer)
        if trainer.config.event_time is None:
            raise InvalidArgumentError(
                "ReqTimeControlDumpHook: the run knows no request time; name its column with RunConfig.event_time"
            )

    def _decide(self, trainer: Trainer) -> JsonValue:
        if self._folder.size(LIMIT) is None:
            return [trainer.event_time, 0]
        text = self._folder.read(LIMIT).decode(errors="replace").strip()
        if not text.isdecimal():
            _log.warning("%s/%s: expected seconds since 1970, got %r; there is no limit", self._folder, LIMIT, text)
            return [trainer.event_time, 0]
        return [trainer.event_time, int(text)]

    def _follow(self, decision: JsonValue) -> JsonValue:
        req_time, limit = cast("list[int]", decision)
        if 0 < limit <= req_time and self._trainer is not None:
            self._make_due()
            self._trainer.request_stop(f"request time {req_time} has reached the limit of {limit}")
        return None


class SyncTrainingInfoHook(Hook):
    """Logs the rows and bytes of all tables every 600 seconds, on rank 0.

    Example:
        >>> hook = SyncTrainingInfoHook()
    """

    def __init__(self, *, every_secs: float = 600.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_secs, self._clock = every_secs, clock
        self._next = 0.0

    def after_start(self, trainer: Trainer) -> None:
        """Begin to count."""
        self._next = self._clock() + self._every_secs

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Log, if it is time."""
        if self._clock() < self._next or not _is_chief(trainer):
            return
        self._next = self._clock() + self._every_secs
        for name, stats in trainer.table_stats().items():
            _log.info("step %d: table %s has %d rows in %d bytes", trainer.step, name, stats.rows, stats.bytes)


class EofAwareTask(nn.Module):
    """Ends a synchronous run on all ranks as soon as one of them has had its last element, which is still trained.

    Its data looks one element ahead and says of each whether it is the last. An element that is a dict gets the key
    `__EofAwareTask_eof`, and any other becomes `{"1": element, "2": whether it is the last}`. `task` sees the elements as they
    were. `RunnerConfig(end_of_data="stop")` does the same for any model, also with a data service.

    Args:
        task: a model with `input_fn(mode)`.
        use_dataservice: False changes nothing: the data is passed on as it is.

    Example:
        >>> class Task(nn.Module):
        ...     def input_fn(self, mode):
        ...         return [1, 2]
        >>> list(EofAwareTask(Task(), use_dataservice=True).input_fn("train"))
        [{'1': 1, '2': False}, {'1': 2, '2': True}]
    """

    EOF_KEY = "__EofAwareTask_eof"

    def __init__(self, task: nn.Module, use_dataservice: bool = False) -> None:
        super().__init__()
        self.task = task
        self.use_dataservice = use_dataservice

    def input_fn(self, mode: str) -> Iterable[Any]:
        """Return the data of the task. That to train with says which element is the last."""
        data: Iterable[Any] = self.task.input_fn(mode)  # type: ignore[operator]
        return _EofAwareData(data) if self.use_dataservice and mode == "train" else data

    def forward(self, batch: Mapping[str, Any]) -> Tensor | dict[str, Tensor]:
        """Pass the element on as the task gave it."""
        return self.task(self.element(batch))  # type: ignore[no-any-return]

    def extra_loss(self, batch: Batch, logits: Mapping[str, Tensor]) -> Tensor | float:
        """The extra loss of the task, 0 if it has none."""
        extra = getattr(self.task, "extra_loss", None)
        return 0.0 if extra is None else extra(self.element(batch), logits)

    def training_hooks(self) -> list[Hook]:
        """Return the hook that ends the run. Give it to `Estimator.train`."""
        return [_EofHook()] if self.use_dataservice else []

    def element(self, batch: Mapping[str, Any]) -> Any:  # noqa: ANN401 - whatever the task's data consists of
        """Return an element as the task's data had it."""
        if self.EOF_KEY in batch:
            return {name: column for name, column in batch.items() if name != self.EOF_KEY}
        return batch["1"] if set(batch) == {"1", "2"} and isinstance(batch["2"], bool) else batch

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - heads, configure_optimizer and so on of the task
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "task":
                raise
            return getattr(self.task, name)


class _EofHook(Hook):
    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        # The ranks learn of it in the word before the next step, which none of them makes.
        columns: Mapping[str, object] = result.batch
        if columns.get(EofAwareTask.EOF_KEY) is True or columns.get("2") is True:
            trainer.request_stop("a rank has had its last element")


class _EofAwareData:
    """Elements that say whether they are the last. It is resumed, and shared among workers, as its data is."""

    def __init__(self, data: Iterable[Any]) -> None:
        if isinstance(data, DatasetConfig | DataServiceSource):
            raise InvalidArgumentError(
                f"EofAwareTask: a {type(data).__name__} is read ahead by the data service; set RunnerConfig(end_of_data='stop') "
                "instead"
            )
        self._data = data
        self._state: object = None
        if is_resumable(data):
            self.state_dict = lambda: self._state
            self.load_state_dict = self._load_state_dict
        if hasattr(data, "shard"):
            self.shard = lambda index, count: _EofAwareData(data.shard(index, count))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        elements, missing = iter(self._data), object()
        element = next(elements, missing)
        while element is not missing:
            # Where this element ends: the next one is only looked at.
            self._state = self._data.state_dict() if is_resumable(self._data) else None  # type: ignore[attr-defined]
            following = next(elements, missing)
            is_last = following is missing
            if isinstance(element, Mapping):
                yield {**as_batch(element), EofAwareTask.EOF_KEY: is_last}
            else:
                yield {"1": element, "2": is_last}
            element = following

    def _load_state_dict(self, state: object) -> None:
        self._state = state
        self._data.load_state_dict(state)  # type: ignore[attr-defined]
