"""Watch the memory of parameter servers, so that a run whose tables outgrow it ends with a message."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from monolith.errors import MemoryLimitError, MonolithError
from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["NEARLY_FULL", "ServerHealthHook", "log_unhealthy"]

NEARLY_FULL = 0.8
"""Share of its memory limit from which on a server is reported."""
CHECK_SECS = 30.0
"""Seconds between two checks."""

_log = logging.getLogger(__name__)


def log_unhealthy(servers: Mapping[int, str]) -> None:
    """Log what is wrong with servers, by index."""
    for index, reason in servers.items():
        _log.error("parameter server %d is out of memory: %s", index, reason)


class ServerHealthHook(Hook):
    """In the chief: asks every server at intervals how much memory it has left, in a thread.

    A server that has used four fifths of its limit is logged once. If one would refuse another row, `report` is called and the
    run ends before the next step with `MemoryLimitError`, which names it. A run with a model_dir then saves what it has. Servers
    without a limit, and servers that do not answer, are left alone: workers find out about the latter.

    Args:
        health: returns the report of each server, as `ServerStore.health` does.
        report: called with the reasons by index of the server.
        every_secs: seconds between two checks.

    Example:
        >>> hook = ServerHealthHook(lambda: [{"bytes": 10, "memory_limit": 100, "out_of_memory": ""}])
        >>> hook.check()
    """

    def __init__(
        self,
        health: Callable[[], Sequence[Mapping[str, Any]]],
        *,
        report: Callable[[Mapping[int, str]], None] = log_unhealthy,
        every_secs: float = CHECK_SECS,
    ) -> None:
        self._health, self._report, self._every_secs = health, report, every_secs
        self._stopped = threading.Event()
        self._warned: set[int] = set()
        self._full: dict[int, str] = {}

    def after_start(self, trainer: Trainer) -> None:
        """Begin to check."""
        self._stopped.clear()
        threading.Thread(target=self._run, name="monolith-server-health", daemon=True).start()

    def before_step(self, trainer: Trainer) -> None:
        """End the run if a server is out of memory."""
        self._require_memory()

    def while_waiting(self, trainer: Trainer) -> None:
        """End the run if a server is out of memory."""
        self._require_memory()

    def _require_memory(self) -> None:
        if self._full:
            index, reason = next(iter(self._full.items()))
            others = f" (and servers {sorted(set(self._full) - {index})})" if len(self._full) > 1 else ""
            raise MemoryLimitError(f"parameter server {index}{others} is out of memory: {reason}")

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Check no more."""
        self._stopped.set()

    def check(self) -> None:
        """Check all servers once."""
        reports = self._health()
        full = {index: str(one["out_of_memory"]) for index, one in enumerate(reports) if one["out_of_memory"]}
        for index, one in enumerate(reports):
            limit = one["memory_limit"]
            if limit is not None and one["bytes"] > NEARLY_FULL * limit and index not in self._warned:
                self._warned.add(index)
                _log.warning(
                    "parameter server %d holds %d of %d bytes: let rows expire, add servers (monolith rebalance), or raise its "
                    "--memory-limit before it is full",
                    index,
                    one["bytes"],
                    limit,
                )
        if full:
            self._report(full)
            self._full = full

    def _run(self) -> None:
        while not self._stopped.wait(self._every_secs) and not self._full:
            try:
                self.check()
            except MonolithError as error:
                if not self._stopped.is_set():
                    _log.warning("the memory of the parameter servers is not known: %s", error)
