"""The global step of a run with several workers: the servers count the batches of all, and each worker follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.cluster.coordination import Coordination
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["GlobalStepHook"]


class GlobalStepHook(Hook):
    """Makes `trainer.step` the number of steps of all workers together.

    During training it is that of the step before, so that no step waits for the answer. At the start and at the end it is
    exact; in the chief the hook must come after `ChiefSyncHook`, which waits until nobody makes further steps.

    Example:
        >>> from monolith.ps import ParameterServer
        >>> from monolith.ps.client.coordination_client import CoordinationClient
        >>> with ParameterServer() as server, CoordinationClient([server.address], index=0, epoch=1) as client:
        ...     hook = GlobalStepHook(client)
    """

    def __init__(self, client: Coordination) -> None:
        self._client = client

    def after_start(self, trainer: Trainer) -> None:
        """Begin with what the servers have counted."""
        trainer.step = self._client.members().step

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Follow the steps of the others, without waiting."""
        # Never more than there are: the trainer has counted its own step, and the answer what was applied when it was given.
        trainer.step = max(trainer.step, self._client.report().step)

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Take over the exact number."""
        if error is None:
            trainer.step = max(trainer.step, self._client.members().step)
