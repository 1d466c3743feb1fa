"""The dense optimizer and learning-rate scheduler of a trainer: what a checkpoint has of them, and how they continue from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from monolith.ps.client.server_parameters import ServerOptimizer
from monolith.state.optimizer_state import (
    OptimizerPlan,
    declared_settings,
    optimizer_state,
    parameter_names,
    plan_optimizer,
    plan_scheduler,
    scheduler_state,
)

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["DenseState"]

_log = logging.getLogger(__name__)

_FORGOTTEN = (
    "optimizer: it has a scheduler that is not saved with it. Rates continue where they were, but the scheduler counts from its "
    "beginning, unless the script restores it; give it as scheduler= to Trainer or ModelCheckpoints"
)

_FROM_FIRST = (
    "scheduler: with several workers rates are those that the code's schedule has at the global step, as if the run had begun "
    "with it"
)
_SCHEDULED = ("lr", "momentum", "betas")
"""The hyperparameters that schedulers of torch change."""


class DenseState:
    """Knows what the code of a run has declared, so that a checkpoint never overrules it.

    Example:
        >>> from torch import nn
        >>> from monolith.train import Trainer
        >>> model = nn.Linear(1, 1)
        >>> dense = DenseState(Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5)))
        >>> dense.state()["optimizer"]["groups"][0]["declared"]["lr"]
        0.5
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._followed = 0
        self._is_declared = False
        self._take()

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer that the code has made, even if servers run its steps."""
        return self._trainer.optimizer if self.served is None else self.served.local

    @property
    def served(self) -> ServerOptimizer | None:
        """The optimizer, if servers run its steps."""
        optimizer = self._trainer.optimizer
        return optimizer if isinstance(optimizer, ServerOptimizer) else None

    @property
    def declared(self) -> list[dict[str, Any]]:
        """The hyperparameters of each parameter group as the code declares them."""
        return self._declared

    def declare(self) -> None:
        """Record the current hyperparameters as those that the code declares. Only the first call does."""
        if self._is_declared:
            return
        self._is_declared = True
        self._take()
        known = parameter_names(self._trainer.model)
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        missing = sum(id(parameter) not in known for group in groups for parameter in group["params"])
        if missing and self._trainer.config.model_dir is not None:
            _log.warning(
                "optimizer: %d of its parameters are not in the model: their values are not saved, and their optimizer state is "
                "restored by position; make them part of the model",
                missing,
            )

    def _take(self) -> None:
        optimizer, scheduler = self.optimizer, self._trainer.scheduler
        self._declared = [] if optimizer is None else declared_settings(optimizer)
        self._declared_schedule = {} if scheduler is None else deepcopy(scheduler.state_dict())

    def state(self) -> dict[str, Any]:
        """Return the parts of a checkpoint's state: `optimizer` and, if there is one, `scheduler`."""
        optimizer, scheduler = self.optimizer, self._trainer.scheduler
        if optimizer is None:
            return {"optimizer": None}
        saved = optimizer_state(optimizer, parameter_names(self._trainer.model), self._declared)
        # Slots that are on servers are in the parts that the servers save.
        saved["on_servers"] = self.served is not None
        if scheduler is None:
            return {"optimizer": saved}
        schedule = scheduler_state(scheduler, self._declared_schedule)
        return {"optimizer": saved, "scheduler": {**schedule, "step": self._followed}}

    def plan(self, state: Mapping[str, Any], renamed: Mapping[str, str] | None = None) -> OptimizerPlan:
        """Plan how `state` is restored into optimizer and scheduler. Changes nothing.

        Args:
            state: that of a whole trainer.
            renamed: for parameters that have another name now, the saved name by the new one.
        """
        optimizer, scheduler = self.optimizer, self._trainer.scheduler
        saved = state.get("optimizer")
        if optimizer is None or saved is None:
            return OptimizerPlan(changes=_one_sided(optimizer, saved))
        plan = plan_optimizer(optimizer, saved, parameter_names(self._trainer.model), self._declared, renamed=renamed)
        if scheduler is None:
            forgotten = any("initial_lr" in group for group in optimizer.param_groups) and bool(state.get("step"))
            return replace(plan, changes=(*plan.changes, *([_FORGOTTEN] if forgotten else [])))
        schedule = plan_scheduler(scheduler, state.get("scheduler"), self._declared_schedule)

        # Workers without a checkpoint compute their rates from the first step: those of the chief must be the same.
        from_first = self._trainer.num_workers > 1 and bool(schedule.changes)

        def apply() -> None:
            built = [{key: group[key] for key in _SCHEDULED if key in group} for group in optimizer.param_groups]
            plan.apply()
            if from_first:
                for group, settings in zip(optimizer.param_groups, built, strict=True):
                    group.update(settings)
                return
            schedule.apply()
            # Also if the scheduler starts from its beginning: it has not missed the steps until now.
            self._followed = int((state.get("scheduler") or state)["step"])

        return OptimizerPlan(
            notes=(*plan.notes, *schedule.notes),
            changes=(*plan.changes, *schedule.changes, *([_FROM_FIRST] if from_first else [])),
            problems=plan.problems,
            slots=plan.slots,
            apply=apply,
        )

    def install(self, plan: OptimizerPlan, *, only_fresh: bool) -> None:
        """Continue on the servers from the values that the model has and from the slots of `plan`.

        With `only_fresh`, parameters that have been trained on the servers are left as they are.
        """
        if self.served is not None and not (only_fresh and self.served.origin.have_changed()):
            names = parameter_names(self._trainer.model)
            self.served.install({key: plan.slots[own[0]] for key, own in names.items() if own[0] in plan.slots})

    def follow(self, step: int) -> None:
        """Advance the scheduler to the global step `step`, which other workers may have moved too."""
        scheduler = self._trainer.scheduler
        if scheduler is None or step <= self._followed:
            return
        # Where torch looks whether the optimizer comes before its scheduler: the steps may be those of other workers.
        scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
        if isinstance(scheduler, LambdaLR):
            # A function of the step alone: no need to go through those in between.
            scheduler.last_epoch += step - self._followed - 1
            self._followed = step - 1
        while self._followed < step:
            scheduler.step()
            self._followed += 1

    def start_at(self, step: int) -> None:
        """Let the scheduler begin at the global step `step`. With several workers it follows the global step from the first."""
        self._followed = 0 if self._trainer.num_workers > 1 else step


def _one_sided(optimizer: torch.optim.Optimizer | None, saved: object) -> tuple[str, ...]:
    if optimizer is not None:
        return ("optimizer: the checkpoint has none: it starts from nothing",)
    return ("optimizer: the code has none: that of the checkpoint is dropped",) if saved is not None else ()
