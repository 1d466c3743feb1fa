"""The global step of a run with several workers: each tells its steps, and learns those of all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.ps.client.coordination_client import CoordinationClient
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["GlobalStepHook"]


class GlobalStepHook(Hook):
    """Makes `trainer.step` the number of steps of all workers together, as of the step before: it is asked for beside a step.

    At the end it is asked for once more; in the chief best after `ChiefSyncHook`, when nobody makes further steps.

    Example:
        >>> from monolith.ps import ParameterServer
        >>> from monolith.ps.client.coordination_client import CoordinationClient
        >>> with ParameterServer() as server, CoordinationClient(server.address, index=0, epoch=1) as client:
        ...     hook = GlobalStepHook(client)
    """

    def __init__(self, client: CoordinationClient) -> None:
        self._client = client

    def after_start(self, trainer: Trainer) -> None:
        """Begin with what was restored and what others have made since."""
        self._follow(trainer)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Tell of the step."""
        trainer.step = max(trainer.step, self._client.report().step + 1)

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Learn of the last steps."""
        if error is None:
            self._follow(trainer)

    def _follow(self, trainer: Trainer) -> None:
        trainer.step = max(trainer.step, self._client.members().step)
