"""`Liveness`: every time limit by which the processes of a job notice, fence and replace one that is dead or hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from monolith.config import Config, Fraction, NonNegative, Positive

__all__ = ["BEATS_PER_LEASE", "Liveness"]

BEATS_PER_LEASE = 3
"""Least number of heartbeats in a lease: two may be lost before a process counts as dead."""


class Liveness(Config):
    """How soon a process counts as dead, when it is replaced, and how long the others wait for its successor.

    All processes of a job use one such object, so the limits fit together:

        heartbeat  x3 <=  lease  <=  hang  <  replacement = hang + longest backoff + start-up  <  orphan
                          lease  <   grace = lease + time to save

    Raises:
        ConfigError: two limits contradict each other. The message names both.

    Example:
        >>> liveness = Liveness(restarts=5)
        >>> liveness.backoff(0), liveness.backoff(2), liveness.backoff(99)
        (1.0, 4.0, 30.0)
        >>> liveness.replacement_secs
        218.0
        >>> Liveness(lease_secs=30.0, grace_secs=30.0)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        monolith.errors.ConfigError: Liveness: grace_secs must be greater than lease_secs, 30 > 30: ...
    """

    config_group: ClassVar[str] = "run"

    heartbeat_secs: Positive = 5.0
    """Interval at which every process shows that it is alive: roles to their launcher, workers to the coordinator."""
    lease_secs: Positive = 30.0
    """A worker that the coordinator has not heard from for this long counts as dead: no barrier waits for it."""
    hang_secs: Positive = 60.0
    """A role that was stopped, or that its launcher has not heard from, for this long is killed and replaced."""
    startup_secs: Positive = 120.0
    """Time from the start of a process until it has joined the job."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Restarts of each role within `restart_window_secs`. One more failure ends the job."""
    restart_window_secs: Positive = 3600.0
    """Restarts longer ago than this are not counted any more, so a long job is not ended by rare failures."""
    backoff_secs: NonNegative = 1.0
    """Pause before the first restart within the window. Each further pause is twice as long."""
    max_backoff_secs: NonNegative = 30.0
    """No pause is longer, apart from the jitter."""
    jitter: Fraction = 0.1
    """Each pause is extended by a random part of it, up to this fraction, so that roles do not restart in step."""
    grace_secs: Positive = 120.0
    """Time between asking a role to end and killing it. What is left of it after one lease is the time to save."""
    orphan_secs: Positive = 21600.0
    """A server of a run without a launcher that no worker has called for this long ends with an error."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        longer = [
            (
                "lease_secs",
                f"{BEATS_PER_LEASE} * heartbeat_secs",
                BEATS_PER_LEASE * self.heartbeat_secs,
                "lost heartbeats",
            ),
            ("hang_secs", "lease_secs", self.lease_secs, "a role that others still count on must not be killed"),
            ("max_backoff_secs", "backoff_secs", self.backoff_secs, "the first pause would be longer than the longest"),
        ]
        for name, than, least, why in longer:
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {than}, {getattr(self, name):g} >= {least:g}: {why}")
        greater = [
            ("grace_secs", "lease_secs", self.lease_secs, "the chief would be killed before it has saved"),
            ("orphan_secs", "replacement_secs", self.replacement_secs, "a server would end before its worker is back"),
        ]
        for name, than, least, why in greater:
            if getattr(self, name) <= least:
                raise ValueError(f"{name} must be greater than {than}, {getattr(self, name):g} > {least:g}: {why}")
        return self

    @property
    def replacement_secs(self) -> float:
        """The longest time from the last heartbeat of a role until its successor has joined the job."""
        return self.hang_secs + self.max_backoff_secs * (1 + self.jitter) + self.startup_secs + self.heartbeat_secs

    def backoff(self, restarts: int, chance: Callable[[], float] = lambda: 0.0) -> float:
        """Return the pause before a restart that follows `restarts` others. `chance` draws the jitter from [0, 1)."""
        # Beyond 2**60 a float still counts seconds, and the power does not overflow.
        pause = min(self.max_backoff_secs, self.backoff_secs * 2.0 ** min(restarts, 60))
        return pause * (1 + self.jitter * chance())
