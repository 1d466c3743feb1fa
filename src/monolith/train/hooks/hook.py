"""The moments of a training run at which other code may act."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self

from monolith.errors import InvalidArgumentError

if TYPE_CHECKING:
    from torch import Tensor

    from monolith.train.trainer import StepResult, Trainer

__all__ = ["CheckpointSaverListener", "EverySteps", "Hook", "Moments", "hooks_running", "overriding"]

_log = logging.getLogger(__name__)


class Hook:
    """Subclass it and override the moments you need.

    Order of a run: `begin` of every hook, restore, `after_start` of every hook, then for each step `before_step` of every
    hook, the step with `before_update` of every hook inside, `after_step` of every hook, and at last `end` of every hook.
    Within a moment hooks run in the order they were given. `evaluate` and `predict` have the same moments, without
    `before_update`.

    `trainer.request_stop` ends the run: asked for in `before_step` no batch is drawn, in `after_step` the step that was made
    was the last.

    On a stream, `while_waiting` of every hook is called ten times a second between `before_step` and the step, as long as no
    record comes. What is done by time after a step belongs there too.

    Example:
        >>> class Patience(Hook):
        ...     def after_step(self, trainer, result):
        ...         if result.loss < 0.1:
        ...             trainer.request_stop("the loss is small enough")
    """

    def begin(self, trainer: Trainer) -> None:
        """The run starts. Earlier state is not restored yet."""

    def after_start(self, trainer: Trainer) -> None:
        """State is restored, `trainer.step` is that of the last step made, and no data has been read."""

    def before_step(self, trainer: Trainer) -> None:
        """A step may follow. Its batch is not drawn yet, so waiting here holds back no data."""

    def while_waiting(self, trainer: Trainer) -> None:
        """The source waits for records that do not exist yet. All steps are made and their updates applied."""

    def before_update(self, trainer: Trainer, loss: Tensor, grad_norm: Tensor | None) -> None:
        """Loss and gradients (after clipping) are known, no weight has changed: raise to keep it so.

        `grad_norm` is the joint norm before clipping, None when `clip_norm` is None.
        """

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """A step was made and `trainer.step` counts it."""

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """The run is over. `error` is what broke it, or None. Called once for each hook whose `begin` returned."""


class EverySteps:
    """Says whether a multiple of `every` was reached or passed since it was asked last.

    Example:
        >>> timer = EverySteps(10)
        >>> [step for step in (3, 9, 11, 12, 20, 45, 49) if timer.is_due(step)]
        [11, 20, 45]
    """

    def __init__(self, every: int) -> None:
        if every < 1:
            raise InvalidArgumentError(f"every: expected at least one step, got {every}")
        self._every = every
        self._asked: int | None = None

    def is_due(self, step: int) -> bool:
        """Return whether it is time at `step`. The first time, whether `step` is a multiple."""
        before = step - 1 if self._asked is None else self._asked
        self._asked = step
        return step // self._every > before // self._every


def overriding(hooks: Iterable[Hook], moment: str) -> list[Hook]:
    """Return those of `hooks` that do something at `moment`, the name of a method of `Hook`.

    Example:
        >>> class Patience(Hook):
        ...     def after_step(self, trainer, result): ...
        >>> [len(overriding([Patience()], moment)) for moment in ("before_step", "after_step")]
        [0, 1]
    """
    nothing = getattr(Hook, moment)
    return [hook for hook in hooks if getattr(getattr(hook, moment), "__func__", None) is not nothing]


@dataclass(frozen=True, kw_only=True)
class Moments:
    """The hooks of a run that do something at the moments around its steps, so that the others cost nothing.

    Example:
        >>> Moments.of([Hook()])
        Moments(before_step=[], after_step=[], while_waiting=[])
    """

    before_step: Sequence[Hook]
    after_step: Sequence[Hook]
    while_waiting: Sequence[Hook]

    @classmethod
    def of(cls, hooks: Iterable[Hook]) -> Self:
        """Return those of `hooks`, in their order."""
        given = list(hooks)
        return cls(**{field.name: overriding(given, field.name) for field in fields(cls)})


@contextmanager
def hooks_running(hooks: Sequence[Hook], trainer: Trainer, start: Callable[[], object]) -> Iterator[None]:
    """Call `begin` of every hook, `start` and `after_start` of every hook, and after the body `end` of all that began.

    Example:
        >>> class Diary(Hook):
        ...     def begin(self, trainer): print("begin")
        ...     def end(self, trainer, error): print("end", repr(error))
        >>> from monolith.train import Trainer
        >>> from torch import nn
        >>> with hooks_running([Diary()], Trainer(nn.Identity()), start=lambda: print("start")):
        ...     print("body")
        begin
        start
        body
        end None
    """
    began: list[Hook] = []
    error: BaseException | None = None
    try:
        for hook in hooks:
            hook.begin(trainer)
            began.append(hook)
        start()
        for hook in hooks:
            hook.after_start(trainer)
        yield
    except BaseException as caught:
        # Who lets go of a generator of predictions has seen enough; nothing broke.
        error = None if isinstance(caught, GeneratorExit) else caught
        raise
    finally:
        with ExitStack() as ends:
            for hook in reversed(began):
                ends.callback(_end, hook, trainer, error)


def _end(hook: Hook, trainer: Trainer, error: BaseException | None) -> None:
    try:
        hook.end(trainer, error)
    except Exception as failure:
        if error is None:
            raise
        # What broke the run decides what happens next, such as another attempt. The end of a hook often fails with it.
        _log.warning("%s could not end after the run had failed: %s", type(hook).__name__, failure)


class CheckpointSaverListener:
    """Subclass it and override the moments you need.

    Order of one save: `before_save` of every listener, the cut, `after_cut` of every listener, writing, `after_save` of every
    listener, all in the order they were given. A save that is tried again starts over with `before_save`. When the run ends,
    after the last save, `end` of every listener in the same order. All of it in the training thread, between steps. With a save
    that is written in the background, steps are made between `after_cut` and `after_save`.

    Guard listeners are called for a save and for each of its attempts: first `before_save` of each in order, then for every
    attempt `before_cut` of each in order and, as soon as the state is taken, `after_cut` of each in reverse order, and last
    `after_save` of each in reverse order, even if all attempts fail. An error in a guard's own methods is logged.

    Example:
        >>> class Announce(CheckpointSaverListener):
        ...     def after_save(self, trainer, step):
        ...         print(f"step {step} is safe")
    """

    def begin(self, trainer: Trainer) -> None:
        """The run has started and is restored."""

    def before_save(self, trainer: Trainer, step: int) -> None:
        """The state of `step` is about to be saved. Raise to prevent it."""

    def before_cut(self, trainer: Trainer, step: int) -> None:
        """Of guards: an attempt is about to take the state."""

    def after_cut(self, trainer: Trainer, step: int) -> None:
        """The state of `step` is taken: what happens from now on is not part of it."""

    def after_save(self, trainer: Trainer, step: int) -> None:
        """The state of `step` is saved and durable. `trainer.request_stop` ends the run here."""

    def end(self, trainer: Trainer, step: int) -> None:
        """The run is over at `step`."""
