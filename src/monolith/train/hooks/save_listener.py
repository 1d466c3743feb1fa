"""Code that runs around every save."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["CheckpointSaverListener"]


class CheckpointSaverListener:
    """Subclass it and override the moments you need.

    Order of one save: `before_save` of every listener, the cut, `after_cut` of every listener, writing, `after_save` of every
    listener, all in the order they were given; a save that is tried again starts over with `before_save`. When the run ends,
    after the last save, `end` of every listener in the same order. All of it in the training thread, between steps; a save
    that is written in the background lets steps pass between `after_cut` and `after_save`.

    Guard listeners are called for a save and for each of its attempts: `before_save` of each in order; for every attempt
    `before_cut` of each in order and, as soon as the state is taken, `after_cut` of each in reverse order; and last
    `after_save` of each in reverse order, even if all attempts fail. An error in a guard's own methods is logged.

    Example:
        >>> class Announce(CheckpointSaverListener):
        ...     def after_save(self, trainer, step):
        ...         print(f"step {step} is safe")
    """

    def begin(self, trainer: Trainer) -> None:
        """The run has started and is restored."""

    def before_save(self, trainer: Trainer, step: int) -> None:
        """The state of `step` is about to be saved; raise to keep it from being."""

    def before_cut(self, trainer: Trainer, step: int) -> None:
        """Of guards: an attempt is about to take the state."""

    def after_cut(self, trainer: Trainer, step: int) -> None:
        """The state of `step` is taken: what happens from now on is not part of it."""

    def after_save(self, trainer: Trainer, step: int) -> None:
        """The state of `step` is saved and durable; `trainer.request_stop` ends the run here."""

    def end(self, trainer: Trainer, step: int) -> None:
        """The run is over at `step`."""
