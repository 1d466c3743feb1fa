"""The moments of a training run at which other code may act."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from monolith.train.trainer import StepResult, Trainer

__all__ = ["Hook"]


class Hook:
    """Subclass it and override the moments you need.

    Order of a run: `begin` of every hook, restore, `after_start` of every hook, then for each step `before_step` of every
    hook, the step with `before_update` of every hook inside, `after_step` of every hook; at last `end` of every hook.
    Within a moment hooks run in the order they were given. `evaluate` and `predict` have the same moments, without
    `before_update`.

    `trainer.request_stop` ends the run: asked for in `before_step` no batch is drawn, in `after_step` the step that was made
    was the last.

    Example:
        >>> class Patience(Hook):
        ...     def after_step(self, trainer, result):
        ...         if result.loss < 0.1:
        ...             trainer.request_stop("the loss is small enough")
    """

    def begin(self, trainer: Trainer) -> None:
        """The run starts; earlier state is not restored yet."""

    def after_start(self, trainer: Trainer) -> None:
        """State is restored, `trainer.step` is that of the last step made; no data has been read."""

    def before_step(self, trainer: Trainer) -> None:
        """A step may follow; its batch is not drawn yet, so waiting here holds back no data."""

    def before_update(self, trainer: Trainer, loss: Tensor, grad_norm: Tensor | None) -> None:
        """Loss and gradients (after clipping) are known, no weight has changed: raise to keep it so.

        `grad_norm` is the joint norm before clipping, None when `clip_norm` is None.
        """

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """A step was made and `trainer.step` counts it."""

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """The run is over. `error` is what broke it, or None. Called once for each hook whose `begin` returned."""
