"""Stop a run at a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monolith.errors import DivergedError, InvalidArgumentError
from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from torch import Tensor

    from monolith.train.trainer import StepResult, Trainer

__all__ = ["NanGuardHook", "StopAtStepHook"]


class StopAtStepHook(Hook):
    """Stop after `num_steps` more steps, or when the global step reaches `last_step`. Give exactly one of them.

    Example:
        >>> StopAtStepHook(last_step=100)
        StopAtStepHook(num_steps=None, last_step=100)
    """

    def __init__(self, *, num_steps: int | None = None, last_step: int | None = None) -> None:
        if (num_steps is None) == (last_step is None):
            raise InvalidArgumentError(
                f"StopAtStepHook: expected num_steps or last_step, got num_steps={num_steps}, last_step={last_step}"
            )
        for name, value in (("num_steps", num_steps), ("last_step", last_step)):
            if value is not None and value < 0:
                raise InvalidArgumentError(f"StopAtStepHook.{name}: expected at least 0, got {value}")
        self.num_steps, self.last_step = num_steps, last_step
        self._last = 0

    def __repr__(self) -> str:
        return f"StopAtStepHook(num_steps={self.num_steps}, last_step={self.last_step})"

    def after_start(self, trainer: Trainer) -> None:
        """Count from the restored step."""
        self._last = trainer.step + self.num_steps if self.num_steps is not None else self.last_step or 0

    def before_step(self, trainer: Trainer) -> None:
        """Stop before the first step if there is none to make."""
        self._check(trainer)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Stop after the last step."""
        self._check(trainer)

    def _check(self, trainer: Trainer) -> None:
        if trainer.step >= self._last:
            trainer.request_stop(f"step {self._last} is reached")


class NanGuardHook(Hook):
    """Raise `DivergedError` when a loss or a gradient is NaN or infinite, before the step changes any weight.

    Example:
        >>> import torch
        >>> NanGuardHook.check(7, torch.tensor(float("nan")), torch.tensor(1.0))
        Traceback (most recent call last):
        monolith.errors.DivergedError: step 7: the loss is nan; no weight was changed. Look for extreme inputs, lower the
        learning rate or clip_norm
    """

    def before_update(self, trainer: Trainer, loss: Tensor, grad_norm: Tensor | None) -> None:
        """Look at both numbers."""
        self.check(trainer.step + 1, loss, grad_norm)

    @staticmethod
    def check(step: int, loss: Tensor, grad_norm: Tensor | None) -> None:
        """Raise if either is not a finite number."""
        for name, value in (("loss", loss), ("norm of the gradients", grad_norm)):
            if value is not None and not bool(value.isfinite()):
                raise DivergedError(
                    f"step {step}: the {name} is {value.item()}; no weight was changed. "
                    "Look for extreme inputs, lower the learning rate or clip_norm"
                )
