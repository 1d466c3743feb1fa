"""Read parameters from a copy that is renewed between steps: a step does not wait for values that come from elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["Cached", "FetchCachedVariablesHook"]

WAITING_SECS = 1.0
"""Seconds between two fetches while no step is made."""


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

    def __init__(self, cached: Cached, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._cached, self._clock = cached, clock
        self._next = 0.0

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

    def while_waiting(self, trainer: Trainer) -> None:
        """Follow what other workers train, so that the first step after a pause does not read what was there before it."""
        if self._clock() >= self._next:
            self._next = self._clock() + WAITING_SECS
            self._cached.assign()
            self._cached.fetch()

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Leave the model as it was trained, and nothing under way: the connections are closed next."""
        if error is None:
            self._cached.fetch()
            self._cached.assign()
            return
        with contextlib.suppress(Exception):
            self._cached.assign()
