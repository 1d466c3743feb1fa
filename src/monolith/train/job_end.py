"""The end of a run over processes, which the chief sees to: servers stop, and the scheduler hears how it went."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from monolith.errors import MonolithError
from monolith.original.yarn import maybe_finish_application, maybe_kill_application
from monolith.ps.client.server_group import ClientConfig, link_to
from monolith.train.hooks.checkpoint import Metric
from monolith.transport.calls import BasicCall

__all__ = ["HeartBeat", "shut_down", "tell_scheduler"]

SHUTDOWN_SECS = 10.0
"""Seconds that a server has to say that it will stop; then the run ends without it."""
BEAT_SECS = 30.0
"""Seconds between two heartbeats of the chief."""

_log = logging.getLogger(__name__)


def shut_down(addresses: Sequence[str], config: ClientConfig, *, timeout: float = SHUTDOWN_SECS) -> list[str]:
    """Ask all servers to stop, each at once and once; those that did not answer, which are not waited for.

    Example:
        >>> from monolith.ps import ParameterServer
        >>> with ParameterServer() as server:
        ...     shut_down([server.address], ClientConfig()), server.wait(timeout=10)
        ([], True)
    """
    patient = config.model_copy(update={"timeout": timeout})

    def hears(address: str) -> bool:
        link = link_to(address, patient)
        try:
            link.call(BasicCall.SHUTDOWN)
        except MonolithError as error:
            _log.warning("server %s was not told to stop: %s", address, error)
            return False
        finally:
            link.close()
        return True

    # A thread for each: one that accepts a connection and says nothing more must not take the time of the others.
    with ThreadPoolExecutor(max(1, len(addresses)), thread_name_prefix="monolith-shut-down") as threads:
        heard = list(threads.map(hears, addresses))
    return [address for address, told in zip(addresses, heard, strict=True) if not told]


def tell_scheduler(
    error: BaseException | None,
    *,
    succeed: Callable[[], bool] = maybe_finish_application,
    kill: Callable[[str], bool] = maybe_kill_application,
) -> None:
    """Tell the application master, if there is one, that the run has succeeded, or what broke it."""
    if error is None:
        succeed()
    else:
        kill(f"{type(error).__name__}: {error}")


class HeartBeat:
    """Tells `metric` now and then that the run goes on, and at last that it does not.

    Example:
        >>> with HeartBeat(lambda name, value, tags: print(name, dict(tags))):
        ...     pass
        training_heart_beat {'type': 'running'}
        training_heart_beat {'type': 'stopped'}
    """

    def __init__(self, metric: Metric, *, every_secs: float = BEAT_SECS) -> None:
        self._metric, self._every_secs = metric, every_secs
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monolith-training-heart-beat", daemon=True)

    def __enter__(self) -> Self:
        self._tell("running")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join()
        self._tell("stopped")

    def _run(self) -> None:
        while not self._stopped.wait(self._every_secs):
            self._tell("running")

    def _tell(self, state: str) -> None:
        self._metric("training_heart_beat", 1, {"type": state})
