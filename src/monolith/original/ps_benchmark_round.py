"""Choosing servers together: all workers measure at the same time, the chief decides by the mean, all take its choice."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Protocol

from pydantic import Field

from monolith.config import Config, Positive
from monolith.errors import DeadlineExceededError, ServerRestartedError
from monolith.original.ps_benchmark import Measured, overriding_servers, select_servers
from monolith.ps.client.server_group import ClientConfig, link_to
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.messages import ReadKeys, SetKey

__all__ = ["BenchmarkConfig", "ServerKeys", "choose_servers"]

READY_SHARE = 0.9
"""Part of the workers that must be there before measuring begins: waiting for the last one may take long."""
WAIT_SECS = 3600.0
"""Seconds to wait for the others to be ready, and for the chief's choice."""
DONE_SECS = 10.0
"""Seconds to wait for those who have not measured yet."""
_POLL_SECS, _SETTLE_SECS = 0.5, 1.0

_logger = logging.getLogger(__name__)

Measure = Callable[[Sequence[str], float], list[Measured]]
"""How fast the servers at these addresses are, measured for so many seconds."""


class Board(Protocol):
    """Keys that all workers see. `ServerKeys` is one."""

    def read_keys(self, prefix: str) -> dict[str, str]:
        """The values of all keys that begin with `prefix`."""

    def set_key(self, key: str, value: str) -> str:
        """Set a key that has no value yet. Returns the value that it has then."""


class ServerKeys:
    """Keys on the server at `address`, which keeps them in its folder.

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
        """The values of all keys that begin with `prefix`."""
        values: dict[str, str] = self._ask(Call.READ_KEYS, ReadKeys(prefix=prefix))["values"]
        return values

    def set_key(self, key: str, value: str) -> str:
        """Set a key that has no value yet. Returns the value that it has then."""
        there: str = self._ask(Call.SET_KEY, SetKey(key=key, value=value))["value"]
        return there

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def _ask(self, call: Call, message: Config) -> dict[str, Any]:
        while True:
            # Whichever incarnation of the server answers: it has kept its keys, or they are set again.
            self._link.instance = 0
            try:
                answer: dict[str, Any] = json.loads(self._link.call(call, message.model_dump_json()).text)
                return answer
            except ServerRestartedError:
                continue


class BenchmarkConfig(Config):
    """Which servers there are, and how many of them are needed.

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
    """Of this worker; 0 decides."""
    benchmark_secs: Positive = 60.0
    """For how long servers are measured."""
    ps_str_overridden: str = ""
    """Addresses separated by commas. The first `num_ps_required` of them are taken without measuring."""


def choose_servers(
    config: BenchmarkConfig,
    board: Board,
    *,
    measure: Measure,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[str, ...]:
    """The servers to keep, best first; every worker of a run calls this and gets the same.

    A choice that was made for the same servers is kept: a worker that comes late, or again, takes it without measuring.

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
    round_of_all = _Round(config, board, clock, sleep)
    if not round_of_all.is_decided():
        round_of_all.be_ready()
    if not round_of_all.is_decided():
        sleep(_SETTLE_SECS)  # the others have seen it by then too, and all measure at the same time
        round_of_all.tell(measure(config.ps_list, config.benchmark_secs))
        if config.index == 0:
            round_of_all.decide()
    return round_of_all.choice()


class _Round:
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
                f"{needed} of {self._config.num_workers} workers have not come to measure servers within {WAIT_SECS:g} s"
            )

    def tell(self, measured: Sequence[Measured]) -> None:
        speeds = json.dumps([one.throughput for one in measured])
        self._board.set_key(f"{self._prefix}/measured/{self._config.index}", speeds)

    def decide(self) -> None:
        self._wait(lambda: len(self._keys("measured")) >= self._config.num_workers, DONE_SECS)
        told = [json.loads(text) for text in self._keys("measured").values()]
        means = [sum(speeds) / len(speeds) for speeds in zip(*told, strict=True)]
        measured = [
            Measured(address=address, throughput=mean)
            for address, mean in zip(self._config.ps_list, means, strict=True)
        ]
        for one in measured:
            _logger.info("server %s: %.4g rounds per second", one.address, one.throughput)
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
