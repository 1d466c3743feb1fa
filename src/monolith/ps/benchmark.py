"""Choosing servers by speed: each computes for a while, processes of one host count together, the best are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from monolith.errors import InvalidArgumentError

__all__ = ["Measured", "select_servers", "spin"]

_SIZE = 256


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A server and how fast it was."""

    address: str
    """host:port."""
    throughput: float
    """Rounds per second, the mean over all that measured it."""


def select_servers(measured: Sequence[Measured], count: int, *, override: str = "") -> list[str]:
    """The addresses of the `count` best servers; `override`, a comma-separated list, is taken instead if there is one.

    Of the servers of one host, each is worth its own throughput and that of all slower ones there: a host that runs several
    well is preferred. Servers of equal worth keep the order given, the later first among those of a host.

    Example:
        >>> servers = [Measured(address=a, throughput=t) for a, t in [("a:1", 5.0), ("b:1", 4.0), ("b:2", 3.0)]]
        >>> select_servers(servers, 1)
        ['b:1']
        >>> select_servers(servers, 1, override="c:1,d:1")
        ['c:1', 'd:1']
    """
    if override:
        return override.split(",")
    if not 1 <= count <= len(measured):
        raise InvalidArgumentError(f"count: expected 1..{len(measured)}, the servers measured, got {count}")
    rising = sorted(range(len(measured)), key=lambda place: (measured[place].throughput, place))
    of_host: dict[str, float] = {}
    worth: dict[int, float] = {}
    for place in rising:
        host = measured[place].address.rpartition(":")[0]
        of_host[host] = of_host.get(host, 0.0) + measured[place].throughput
        worth[place] = of_host[host]
    best = sorted(range(len(measured)), key=lambda place: (-worth[place], place))
    return [measured[place].address for place in best[:count]]


def spin(seconds: float, *, clock: Callable[[], float] = time.monotonic) -> float:
    """Rounds of arithmetic on a matrix per second, tried for `seconds`; at least one round."""
    matrix = np.linspace(0.1, 1.0, _SIZE * _SIZE, dtype=np.float32).reshape(_SIZE, _SIZE)
    start, rounds = clock(), 0
    while True:
        matrix = np.sqrt(matrix @ matrix.T / _SIZE + 0.25)
        rounds += 1
        elapsed = clock() - start
        if elapsed >= seconds:
            return rounds / max(elapsed, 1e-9)
