"""`RemoteStates`: how far the workers of a run are, through a server they share."""

from __future__ import annotations

import logging
from collections.abc import Callable

from monolith.errors import ServerError
from monolith.ps.client.coordination_client import CoordinationClient

__all__ = ["RemoteStates"]

_log = logging.getLogger(__name__)


class RemoteStates:
    """The `WorkerStates` of processes: each tells its own over its `client`. Those not heard of any more are not alive.

    `restored_step` is asked in the chief for the global step it has restored: the others are told before they begin.

    Example:
        >>> from monolith.ps import ParameterServer
        >>> with ParameterServer() as server, CoordinationClient(server.address, index=0, epoch=1) as client:
        ...     states = RemoteStates(client)
        ...     states.mark_restore_done()
        ...     states.is_restore_done(), states.get_alive_workers()
        (True, [])
    """

    def __init__(self, client: CoordinationClient, *, restored_step: Callable[[], int] = lambda: 0) -> None:
        self._client, self._restored_step = client, restored_step

    def mark_restore_done(self) -> None:
        """The chief: workers may begin."""
        self._client.report(0, at_least=self._restored_step())
        self._client.enter("running")

    def is_restore_done(self) -> bool:
        """Whether there is a chief that has restored."""
        return any(m.index == 0 and m.phase != "joined" for m in self._client.members().members)

    def start_worker(self, index: int) -> None:
        """Count as a worker that trains."""
        self._client.enter("running")

    def finish_worker(self, index: int) -> None:
        """Count no more; a server that is not there any more waits for nobody."""
        try:
            self._client.enter("finished")
        except ServerError as error:
            _log.warning("worker %d ends without having told: %s", index, error)

    def get_alive_workers(self) -> list[int]:
        """Workers that have come and not finished, apart from the chief; one that has only joined is about to train."""
        return [m.index for m in self._client.members().members if m.index and m.alive and m.phase != "finished"]
