"""`RemoteStates`: how far the workers of a run are, when they are processes."""

from __future__ import annotations

import logging
from collections.abc import Callable

from monolith.cluster.coordination import Coordination
from monolith.errors import ServerError

__all__ = ["RemoteStates"]

_log = logging.getLogger(__name__)


class RemoteStates:
    """The `WorkerStates` of processes, each of which reports its own state. Workers whose lease is over are not alive.

    Args:
        client: this worker's view of the run.
        restored: called in the chief when it has restored and before the other workers begin.

    Example:
        >>> from monolith.ps import ParameterServer
        >>> from monolith.ps.client.coordination_client import CoordinationClient
        >>> with ParameterServer() as server, CoordinationClient([server.address], index=0, epoch=1) as client:
        ...     states = RemoteStates(client)
        ...     states.mark_restore_done()
        ...     states.is_restore_done(), states.get_alive_workers()
        (True, [])
    """

    def __init__(self, client: Coordination, *, restored: Callable[[], None] = lambda: None) -> None:
        self._client, self._restored = client, restored

    def mark_restore_done(self) -> None:
        """In the chief: let the workers begin."""
        self._restored()
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
