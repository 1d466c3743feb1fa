"""Choosing the fastest parameter servers where more are started than needed.

All workers measure all servers at the same time. The chief chooses by the mean, and every worker takes its choice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pydantic import Field

from monolith.config import Config, Positive
from monolith.errors import DeadlineExceededError, InvalidArgumentError, ServerRestartedError
from monolith.ps.client.server_group import ClientConfig, ServerGroup, link_to
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.messages import Measure, ReadKeys, SetKey
from monolith.transport.link import finish_all

__all__ = [
    "BenchmarkConfig",
    "Measured",
    "ServerKeys",
    "choose_servers",
    "measure_servers",
    "overriding_servers",
    "select_servers",
]

READY_SHARE = 0.9
"""Share of the workers that must be ready before measuring begins. Waiting for the last one may take long."""
WAIT_SECS = 3600.0
"""Seconds to wait for the other workers to be ready, and for the chief's choice."""
DONE_SECS = 10.0
"""Seconds to wait for workers that have not measured yet."""
_POLL_SECS, _SETTLE_SECS = 0.5, 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measured speed of a server."""

    address: str
    """host:port."""
    throughput: float
    """Rounds per second, the mean over all workers that measured it."""


def select_servers(measured: Sequence[Measured], count: int, *, override: str = "") -> list[str]:
    """Return the addresses of the `count` best servers, or the first `count` of `override`, a comma-separated list.

    A server is ranked by its own throughput plus that of all slower servers of its host, so that hosts that run several
    servers well are preferred. Servers of equal rank keep the order given.

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
    rising = sorted(range(len(measured)), key=lambda index: (measured[index].throughput, index))
    of_host: dict[str, float] = {}
    rank: dict[int, float] = {}
    for index in rising:
        host = measured[index].address.rpartition(":")[0]
        of_host[host] = of_host.get(host, 0.0) + measured[index].throughput
        rank[index] = of_host[host]
    best = sorted(range(len(measured)), key=lambda index: (-rank[index], index))
    return [measured[index].address for index in best[:count]]


def overriding_servers(override: str, count: int) -> tuple[str, ...]:
    """Return the first `count` addresses of a comma-separated list, and log which are left out or how many are missing.

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
        _log.info("of the list that replaces the benchmark, %s are not used", ", ".join(listed[count:]))
    return tuple(listed[:count])


def measure_servers(
    addresses: Sequence[str], *, seconds: float = 60.0, config: ClientConfig | None = None
) -> list[Measured]:
    """Let all servers compute at the same time for `seconds`. Returns the speed of each, in the order of `addresses`.

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


MeasureServers = Callable[[Sequence[str], float], list[Measured]]
"""Measures the servers at these addresses for this many seconds."""


class Board(Protocol):
    """Keys and values that all workers share, such as `ServerKeys`."""

    def read_keys(self, prefix: str) -> dict[str, str]:
        """Return the values of all keys that begin with `prefix`."""

    def set_key(self, key: str, value: str) -> str:
        """Set a key unless it has a value. Returns the value that it has then."""


class ServerKeys:
    """Keys of the server at `address`, which keeps them in its folder.

    Example:
        >>> from contextlib import closing
        >>> from monolith.ps import ParameterServer
        >>> with ParameterServer() as server, closing(ServerKeys(server.address, ClientConfig())) as keys:
        ...     keys.set_key("servers/result", "a:1"), keys.set_key("servers/result", "b:1")
        ('a:1', 'a:1')
    """

    def __init__(self, address: str, config: ClientConfig) -> None:
        self._link = link_to(address, config)

    def read_keys(self, prefix: str) -> dict[str, str]:
        """Return the values of all keys that begin with `prefix`."""
        values: dict[str, str] = self._ask(Call.READ_KEYS, ReadKeys(prefix=prefix))["values"]
        return values

    def set_key(self, key: str, value: str) -> str:
        """Set a key unless it has a value. Returns the value that it has then."""
        there: str = self._ask(Call.SET_KEY, SetKey(key=key, value=value))["value"]
        return there

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def _ask(self, call: Call, message: Config) -> dict[str, Any]:
        while True:
            # Any incarnation of the server may answer: it has kept its keys, or they are set again.
            self._link.instance = 0
            try:
                answer: dict[str, Any] = json.loads(self._link.call(call, message.model_dump_json()).text)
                return answer
            except ServerRestartedError:
                continue


class BenchmarkConfig(Config):
    """The servers to choose from, and how many of them are needed.

    Example:
        >>> BenchmarkConfig(ps_list=("a:1", "b:1"), num_ps_required=1, num_workers=1, index=0).benchmark_secs
        60.0
    """

    ps_list: Annotated[tuple[str, ...], Field(min_length=1)]
    """Addresses of all servers."""
    num_ps_required: Annotated[int, Field(ge=1)]
    """How many are kept."""
    num_workers: Annotated[int, Field(ge=1)]
    index: Annotated[int, Field(ge=0)]
    """Index of this worker. Worker 0 makes the choice."""
    benchmark_secs: Positive = 60.0
    """Seconds for which servers are measured."""
    ps_str_overridden: str = ""
    """Addresses separated by commas. The first `num_ps_required` of them are taken without measuring."""


def choose_servers(
    config: BenchmarkConfig,
    board: Board,
    *,
    measure: MeasureServers,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[str, ...]:
    """Return the servers to keep, best first. Every worker of a run calls this and gets the same answer.

    A choice that was made among the same servers is kept, so a worker that starts late or again takes it without measuring.

    Example:
        >>> class Alone(dict):
        ...     def read_keys(self, prefix): return {key: self[key] for key in self if key.startswith(prefix)}
        ...     def set_key(self, key, value): return self.setdefault(key, value)
        >>> config = BenchmarkConfig(ps_list=("a:1", "b:1"), num_ps_required=1, num_workers=1, index=0)
        >>> speeds = {"a:1": 3.0, "b:1": 5.0}
        >>> def measure(addresses, seconds): return [Measured(address=a, throughput=speeds[a]) for a in addresses]
        >>> choose_servers(config, Alone(), measure=measure, sleep=lambda seconds: None)
        ('b:1',)
    """
    if config.ps_str_overridden:
        return overriding_servers(config.ps_str_overridden, config.num_ps_required)
    vote = _Vote(config, board, clock, sleep)
    if not vote.is_decided():
        vote.be_ready()
    if not vote.is_decided():
        sleep(_SETTLE_SECS)  # until then the others have seen it too, and all measure at the same time
        vote.publish(measure(config.ps_list, config.benchmark_secs))
        if config.index == 0:
            vote.decide()
    return vote.choice()


class _Vote:
    def __init__(
        self, config: BenchmarkConfig, board: Board, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._config, self._board, self._clock, self._sleep = config, board, clock, sleep
        digest = hashlib.sha256(",".join(config.ps_list).encode()).hexdigest()[:16]
        self._prefix = f"benchmark/{digest}"

    def is_decided(self) -> bool:
        return bool(self._keys("result"))

    def be_ready(self) -> None:
        self._board.set_key(f"{self._prefix}/ready/{self._config.index}", "ready")
        needed = int(READY_SHARE * self._config.num_workers)
        if not self._wait(lambda: len(self._keys("ready")) >= needed or self.is_decided(), WAIT_SECS):
            raise DeadlineExceededError(
                f"expected {needed} of {self._config.num_workers} workers to be ready to measure servers within {WAIT_SECS:g} s"
            )

    def publish(self, measured: Sequence[Measured]) -> None:
        speeds = json.dumps([one.throughput for one in measured])
        self._board.set_key(f"{self._prefix}/measured/{self._config.index}", speeds)

    def decide(self) -> None:
        self._wait(lambda: len(self._keys("measured")) >= self._config.num_workers, DONE_SECS)
        published = [json.loads(text) for text in self._keys("measured").values()]
        means = [sum(speeds) / len(speeds) for speeds in zip(*published, strict=True)]
        measured = [
            Measured(address=address, throughput=mean)
            for address, mean in zip(self._config.ps_list, means, strict=True)
        ]
        for one in measured:
            _log.info("server %s: %.4g rounds per second", one.address, one.throughput)
        best = select_servers(measured, self._config.num_ps_required)
        self._board.set_key(f"{self._prefix}/result", ",".join(best))

    def choice(self) -> tuple[str, ...]:
        if not self._wait(self.is_decided, WAIT_SECS):
            raise DeadlineExceededError(f"the chief has not chosen servers within {WAIT_SECS:g} s; is it running?")
        return tuple(self._keys("result")[f"{self._prefix}/result"].split(","))

    def _keys(self, kind: str) -> dict[str, str]:
        return self._board.read_keys(f"{self._prefix}/{kind}")

    def _wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        deadline = self._clock() + timeout
        while not condition():
            if self._clock() >= deadline:
                return False
            self._sleep(_POLL_SECS)
        return True
