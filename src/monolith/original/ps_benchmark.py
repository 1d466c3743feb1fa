"""Choosing servers by speed: each computes for a while, processes of one host count together, the best are kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from monolith.errors import InvalidArgumentError
from monolith.ps.client.server_group import ClientConfig, ServerGroup
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.messages import Measure
from monolith.transport.link import finish_all

__all__ = ["Measured", "measure_servers", "overriding_servers", "select_servers"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A server and how fast it was."""

    address: str
    """host:port."""
    throughput: float
    """Rounds per second, the mean over all that measured it."""


def select_servers(measured: Sequence[Measured], count: int, *, override: str = "") -> list[str]:
    """Return the addresses of the `count` best servers, or the first `count` of `override`, a comma-separated list.

    A server is worth its own throughput and that of all slower ones of its host: a host that runs several well is
    preferred. Servers of equal worth keep the order given.

    Example:
        >>> servers = [Measured(address=a, throughput=t) for a, t in [("a:1", 5.0), ("b:1", 4.0), ("b:2", 3.0)]]
        >>> select_servers(servers, 1)
        ['b:1']
        >>> select_servers(servers, 1, override="c:1,d:1")
        ['c:1']
    """
    if override:
        return list(overriding_servers(override, count))
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


def overriding_servers(override: str, count: int) -> tuple[str, ...]:
    """The first `count` addresses of a comma-separated list. What is left out, or missing, is logged.

    Example:
        >>> overriding_servers("c:1, d:1", 1)
        ('c:1',)
    """
    listed = [address.strip() for address in override.split(",") if address.strip()]
    if not listed:
        raise InvalidArgumentError(f"override: expected addresses separated by commas, got {override!r}")
    if len(listed) < count:
        _log.warning("%d servers are required, and the list that replaces the benchmark has %d", count, len(listed))
    elif len(listed) > count:
        _log.info("of the list that replaces the benchmark %s are not used", ", ".join(listed[count:]))
    return tuple(listed[:count])


def measure_servers(
    addresses: Sequence[str], *, seconds: float = 60.0, config: ClientConfig | None = None
) -> list[Measured]:
    """Let all servers compute at the same time for `seconds`, and see how far each gets.

    Example:
        >>> from monolith.ps import ParameterServer
        >>> with ParameterServer() as server:
        ...     (measured,) = measure_servers([server.address], seconds=0.01)
        >>> measured.throughput > 0
        True
    """
    text = Measure(seconds=seconds).model_dump_json()
    with ServerGroup(addresses, config=config) as group:
        timeout = seconds + group.config.timeout
        answers = finish_all([link.begin(Call.MEASURE, text, timeout=timeout) for link in group.links])
    speeds = [float(json.loads(answer.text)["throughput"]) for answer in answers]
    return [Measured(address=a, throughput=speed) for a, speed in zip(group.addresses, speeds, strict=True)]
