"""Read parameters from a copy that is renewed between steps: a step does not wait for values that come from elsewhere."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["Cached", "FetchCachedVariablesHook"]


class Cached(Protocol):
    """Values read from a copy. `monolith.ps.CachedParameters` has one whose origin is on servers."""

    def fetch(self) -> None:
        """Begin to take the values of the origin."""

    def assign(self) -> None:
        """Read what was fetched last from now on."""


class FetchCachedVariablesHook(Hook):
    """Fetches before every step and assigns after it, so that a step reads what was there before the step before.

    Example:
        >>> from torch import nn
        >>> from monolith.original import CachedVariables
        >>> hook = FetchCachedVariablesHook(CachedVariables(nn.Linear(1, 1)))
    """

    def __init__(self, cached: Cached) -> None:
        self._cached = cached

    def after_start(self, trainer: Trainer) -> None:
        """The first step reads what was restored."""
        self._cached.fetch()
        self._cached.assign()

    def before_step(self, trainer: Trainer) -> None:
        """Fetch for the next step."""
        self._cached.fetch()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Let the next step read what was fetched."""
        self._cached.assign()

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Leave the model as it was trained, and nothing under way: the connections are closed next."""
        if error is None:
            self._cached.fetch()
            self._cached.assign()
            return
        with contextlib.suppress(Exception):
            self._cached.assign()
