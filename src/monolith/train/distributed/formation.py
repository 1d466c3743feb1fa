"""The parameter servers that a run uses: waiting for them to start, and retrying while one is replaced."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar

from monolith.cluster.discovery.service_discovery import ServiceDiscovery
from monolith.cluster.net import NodeAliveChecker, split_address
from monolith.console import Reminder
from monolith.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ServerRestartedError,
    ServerRestoredError,
    UnavailableError,
)

__all__ = ["AddressList", "Formation", "TEMPORARY", "run_with_retries", "wait_for_servers"]

QUERY_SECS = 5.0
"""Seconds between two queries of the discovery, and between two reads of the list of servers."""
LIST_SECS = 1800.0
"""Seconds that a worker waits for the chief to write the list of servers."""

_logger = logging.getLogger(__name__)

Alive = Callable[[Sequence[str]], list[str]]
"""Returns those of the addresses that answer."""


def _that_answer(addresses: Sequence[str]) -> list[str]:
    possible = [address for address in addresses if _is_address(address)]
    return NodeAliveChecker(possible, timeout=5.0).get_alive_nodes() if possible else []


def _is_address(address: str) -> bool:
    """Tell whether `address` is valid: one invalid announcement must not keep the others from being found."""
    try:
        split_address(address)
    except InvalidArgumentError as error:
        _logger.warning("a server has announced an invalid address and is ignored: %s", error)
        return False
    return True


class AddressList(Protocol):
    """A list of addresses that the processes of a run share."""

    def read(self) -> tuple[str, ...]:
        """Return the addresses. Empty if the list was not written yet."""

    def write(self, addresses: Sequence[str]) -> None:
        """Replace the list atomically."""


def wait_for_servers(
    discovery: ServiceDiscovery,
    count: int,
    *,
    alive: Alive = _that_answer,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[str, ...]:
    """Wait until `count` parameter servers answer. Returns their addresses in the order of their indexes.

    A server counts when it is announced and answers, so announcements left by processes that died do no harm. Of more than
    `count` servers, those with the lowest indexes are taken.

    Example:
        >>> import tempfile
        >>> from monolith.cluster import HostServiceDiscovery
        >>> with tempfile.TemporaryDirectory() as folder, HostServiceDiscovery(folder) as discovery:
        ...     for index in range(3):
        ...         discovery.register("ps", index, f"10.0.0.{index}:2222")
        ...     wait_for_servers(discovery, 2, alive=list)
        ('10.0.0.0:2222', '10.0.0.1:2222')
    """
    reminder = Reminder(_logger, clock=clock)
    while True:
        announced = discovery.query_now("ps")
        answering = set(alive(list(announced.values())))
        found = [address for _, address in sorted(announced.items()) if address in answering]
        if len(found) >= count:
            return tuple(found[:count])
        reminder.waiting(_missing_servers(announced, answering, count))
        sleep(QUERY_SECS)


def _missing_servers(announced: Mapping[int, str], answering: Collection[str], count: int) -> str:
    """Describe the servers that are missing."""
    silent = [f"ps {index} at {address}" for index, address in sorted(announced.items()) if address not in answering]
    parts = [f"{', '.join(silent)} to answer"] if silent else []
    if (unknown := count - len(announced)) > 0:
        parts.append(f"{unknown} of {count} parameter servers to be announced")
    return " and ".join(parts)


class Formation:
    """The servers that a run uses, the same for all of its workers.

    Without `shared`, every worker uses the `count` servers with the lowest indexes. Where more are started than needed, the
    chief uses those that answer first and writes them into `shared`, which the other workers read. A restarted chief keeps the
    list as long as all servers in it are announced.

    Example:
        >>> import tempfile
        >>> from monolith.cluster import HostServiceDiscovery
        >>> with tempfile.TemporaryDirectory() as folder, HostServiceDiscovery(folder) as discovery:
        ...     discovery.register("ps", 0, "10.0.0.7:2222")
        ...     Formation(discovery, 1, is_chief=True, alive=list).servers()
        ('10.0.0.7:2222',)
    """

    def __init__(
        self,
        discovery: ServiceDiscovery,
        count: int,
        *,
        is_chief: bool,
        shared: AddressList | None = None,
        alive: Alive = _that_answer,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._discovery, self._count, self._is_chief = discovery, count, is_chief
        self._shared, self._alive, self._clock, self._sleep = shared, alive, clock, sleep

    def servers(self) -> tuple[str, ...]:
        """Return the addresses to use now. They may differ when called again after a failure."""
        if self._shared is None:
            return self._wait()
        return self._written(self._shared) if self._is_chief else self._read(self._shared)

    def announced(self) -> tuple[str, ...]:
        """Return all announced servers, including those in reserve, without waiting."""
        return tuple(address for _, address in sorted(self._discovery.query_now("ps").items()))

    def _wait(self) -> tuple[str, ...]:
        return wait_for_servers(self._discovery, self._count, alive=self._alive, clock=self._clock, sleep=self._sleep)

    def _written(self, shared: AddressList) -> tuple[str, ...]:
        known = shared.read()
        if len(known) == self._count and set(known) <= set(self._alive(self.announced())):
            _logger.info("using the servers of the previous run: %s", ", ".join(known))
            return known
        found = self._wait()
        shared.write(found)
        return found

    def _read(self, shared: AddressList) -> tuple[str, ...]:
        deadline = self._clock() + LIST_SECS
        reminder = Reminder(_logger, clock=self._clock)
        while len(known := shared.read()) != self._count:
            if self._clock() >= deadline:
                raise DeadlineExceededError(
                    f"the chief has not written a list of {self._count} servers within {LIST_SECS:g} s; is it running?"
                )
            left = deadline - self._clock()
            reminder.waiting("the chief to write the list of %d servers", self._count, left_secs=left)
            self._sleep(QUERY_SECS)
        return known


TEMPORARY = (DeadlineExceededError, UnavailableError, ServerRestartedError)
"""What may be over when it is tried again: a server was slow, away, or was started again. All else is raised at once."""

_log = logging.getLogger(__name__)

Cluster = TypeVar("Cluster")
Result = TypeVar("Result")


def run_with_retries(
    run: Callable[[Cluster], Result],
    form: Callable[[], Cluster],
    *,
    max_losses: int,
    wait_secs: float,
    on_failover: Callable[[int], None] = lambda count: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Result:
    """Call `run` with the cluster that `form` finds, and return what it returns.

    After a temporary failure both are called again, `wait_secs` later. That is done without a limit while nothing is lost: the
    network was bad, or a server is being restarted, here or elsewhere. A server that has lost what it held is accepted
    `max_losses` times. Then the failure is raised. `on_failover` is called with the number of failures so far.

    Example:
        >>> clusters, calls = iter([("a:1",), ("a:1",)]), []
        >>> def run(cluster):
        ...     calls.append(cluster)
        ...     if len(calls) == 1:
        ...         raise UnavailableError("no answer")
        ...     return "done"
        >>> run_with_retries(run, lambda: next(clusters), max_losses=0, wait_secs=30, sleep=lambda seconds: None)
        'done'
    """
    cluster = form()
    losses = failovers = 0
    while True:
        try:
            return run(cluster)
        except TEMPORARY as error:
            failovers += 1
            if _is_loss(error):
                losses += 1
                if losses > max_losses:
                    raise
            _log.warning("attempt %d failed, trying again in %g s: %s", failovers, wait_secs, error)
            on_failover(failovers)
            sleep(wait_secs)
            formed = form()
            if formed != cluster:
                _log.info("the servers are now at %s, before they were at %s", formed, cluster)
                cluster = formed


def _is_loss(error: Exception) -> bool:
    return isinstance(error, ServerRestartedError) and not isinstance(error, ServerRestoredError)
