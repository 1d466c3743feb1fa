"""Pauses between two attempts."""

from __future__ import annotations

import random

__all__ = ["spread"]

# Not the generator of the process: a pause in some thread would change what a seeded program draws.
_chance = random.SystemRandom()


def spread(seconds: float) -> float:
    """Between half of `seconds` and all of it, so that the workers of a cluster do not all come back at the same moment."""
    return seconds * _chance.uniform(0.5, 1.0)
