"""Adapters: the systems that FreshBench compares. docs/freshbench.md says how to add one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol

import numpy as np

from freshbench.examples import Examples, Schema


class Serving(Protocol):
    """A copy of what a system has learnt, which answers requests."""

    def sync(self) -> None:
        """Take over what has been learnt until now. Called before the first `predict`."""

    def predict(self, examples: Examples) -> np.ndarray:
        """Return a score for each example, float [n]: the higher, the likelier is label 1. They come without labels."""


class System(Protocol):
    """A system that learns from examples in the order of time.

    It may have an attribute `max_syncs`: intervals with more syncs than that are left out. And `copies`: how many serving copies
    one system can have, if that is limited; it is then trained once for each.
    """

    def fit(self, examples: Examples) -> None:
        """Learn from a batch that has happened. What `Serving` answers must not change."""

    def serving(self) -> Serving:
        """Return a new serving copy. Several may exist, with syncs at different times."""

    def close(self) -> None:
        """End processes and threads."""


Factory = Callable[[Schema, int], System]
"""Makes a system for these columns with this seed."""

_PLACES = {
    "monolith": "monolith_system:MonolithSystem",
    "monolith-feed": "monolith_system:FollowedSystem",
    "torch-reload": "torch_system:ReloadedSystem",
    "torch-retrain": "torch_system:RetrainedSystem",
    "vowpal-wabbit": "vowpal_system:VowpalSystem",
    "river": "river_system:RiverSystem",
}
SYSTEMS = tuple(_PLACES)


def factory(name: str) -> Factory:
    """Return the system of this name, or of `module:Class` on the path of Python.

    Raises `ImportError` if what it needs is not installed.
    """
    place = _PLACES.get(name, name)
    module, _, attribute = place.partition(":")
    if not attribute:
        raise ValueError(f"{name}: expected one of {', '.join(SYSTEMS)}, or module:Class of your own")
    found: Factory = getattr(importlib.import_module(f"{__name__}.{module}" if name in _PLACES else module), attribute)
    return found
