"""Retries after a server did not answer: which failures are temporary, and how often a server may lose what it held."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from monolith.errors import DeadlineExceededError, ServerRestartedError, ServerRestoredError, UnavailableError

__all__ = ["TEMPORARY", "run_with_retries"]

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
