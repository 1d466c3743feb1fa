"""Code that runs around every save."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["CheckpointSaverListener"]


class CheckpointSaverListener:
    """Subclass it and override the moments you need.

    Order of one save: `before_save` of every listener, the save, `after_save` of every listener, all in the order they were
    given; a save that is tried again starts over with `before_save`. When the run ends, after the last save, `end` of every
    listener in the same order.

    Guard listeners stand around all tries: `before_save` of each in order, the tries, `after_save` of each in reverse order,
    whatever has happened in between. An error in a guard's own methods is logged and stops nothing.

    Where a save goes on in the background, `after_save` runs when it is durable, still in the training thread.

    Example:
        >>> class Announce(CheckpointSaverListener):
        ...     def after_save(self, trainer, step):
        ...         print(f"step {step} is safe")
    """

    def begin(self, trainer: Trainer) -> None:
        """The run has started and is restored."""

    def before_save(self, trainer: Trainer, step: int) -> None:
        """The state of `step` is about to be saved; raise to keep it from being."""

    def after_save(self, trainer: Trainer, step: int) -> None:
        """The state of `step` is saved and durable; `trainer.request_stop` ends the run here."""

    def end(self, trainer: Trainer, step: int) -> None:
        """The run is over at `step`."""
