"""Keep NaN and infinity out of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monolith.errors import DivergedError
from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from torch import Tensor

    from monolith.train.trainer import Trainer

__all__ = ["NanGuardHook"]


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
