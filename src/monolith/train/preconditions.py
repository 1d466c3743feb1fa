"""What must hold before a run starts, said while it can still be put right."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from monolith.errors import InvalidArgumentError
from monolith.features.batch import Batch

__all__ = ["is_resumable", "require_limits", "require_optimizer", "require_scheduler"]


def is_resumable(source: Iterable[Batch]) -> bool:
    """Return whether a source has a position that it can return to. Raises if it is no source at all."""
    if not isinstance(source, Iterable):
        raise InvalidArgumentError(f"source: expected an iterable of batches, got {type(source).__name__}")
    stateful = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
    return stateful and getattr(source, "resumable", True)


def require_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise if there are dense parameters that nothing would train."""
    if optimizer is None and any(parameter.requires_grad for parameter in model.parameters()):
        name = next(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        raise InvalidArgumentError(
            f"optimizer: the model has dense parameters, {name!r} for one; give a torch optimizer over model.parameters()"
        )


def require_scheduler(scheduler: LRScheduler | None) -> None:
    """Raise for a scheduler that a trainer cannot call after every step."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise InvalidArgumentError(
            "scheduler: ReduceLROnPlateau needs a metric, which a trainer does not have at every step; call its step(metric) in "
            "a hook"
        )


def require_limits(steps: int | None, max_steps: int | None) -> None:
    """Raise unless at most one limit is given, and it is no negative number."""
    if steps is not None and max_steps is not None:
        raise InvalidArgumentError(f"expected steps or max_steps, got both: {steps} and {max_steps}")
    for name, value in (("steps", steps), ("max_steps", max_steps)):
        if value is not None and value < 0:
            raise InvalidArgumentError(f"{name}: expected at least 0, got {value}")
