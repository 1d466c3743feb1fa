"""Going on after a server did not answer: which failures are temporary, and how often servers may change."""

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
    max_retries: int,
    wait_secs: float,
    on_failover: Callable[[int], None] = lambda count: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Result:
    """What `run` returns with the cluster that `form` finds.

    After a temporary failure it is tried again, `wait_secs` later, with the cluster as it is then. As long as the cluster is the
    same, that is done without an end: nothing is lost, the way to it was bad. One that has changed, or of which a server has
    lost what it held, is accepted `max_retries` times; then the failure is raised. `on_failover` is told how many failures there
    were so far.

    Example:
        >>> clusters, calls = iter([("a:1",), ("a:1",)]), []
        >>> def run(cluster):
        ...     calls.append(cluster)
        ...     if len(calls) == 1:
        ...         raise UnavailableError("no answer")
        ...     return "done"
        >>> run_with_retries(run, lambda: next(clusters), max_retries=0, wait_secs=30, sleep=lambda seconds: None)
        'done'
    """
    cluster = form()
    changes = failovers = 0
    while True:
        try:
            return run(cluster)
        except TEMPORARY as error:
            failovers += 1
            _log.warning("attempt %d failed, trying again in %g s: %s", failovers, wait_secs, error)
            on_failover(failovers)
            sleep(wait_secs)
            formed = form()
            if formed != cluster or _is_loss(error):
                changes += 1
                if changes > max_retries:
                    raise
                _log.warning("servers have changed %d of %d times: %s, now %s", changes, max_retries, cluster, formed)
                cluster = formed


def _is_loss(error: Exception) -> bool:
    return isinstance(error, ServerRestartedError) and not isinstance(error, ServerRestoredError)
