"""`RemoteStates`: how far the workers of a run are, when they are processes."""

from __future__ import annotations

from collections.abc import Callable

from monolith.cluster.coordination import Coordination

__all__ = ["RemoteStates"]


class RemoteStates:
    """The `WorkerStates` of processes, each of which reports its own state. Workers whose lease is over are not alive.

    Args:
        client: this worker's view of the run.
        num_workers: how many workers the run has, the chief included.
        restored: called in the chief when it has restored and before the other workers begin.

    Example:
        >>> from monolith.ps import ParameterServer
        >>> from monolith.ps.client.coordination_client import CoordinationClient
        >>> with ParameterServer() as server, CoordinationClient([server.address], index=0, epoch=1) as client:
        ...     states = RemoteStates(client, num_workers=2)
        ...     states.mark_restore_done()
        ...     states.is_restore_done(), states.get_unfinished_workers()  # worker 1 has not come yet
        (True, {1: False})
    """

    def __init__(self, client: Coordination, *, num_workers: int, restored: Callable[[], None] = lambda: None) -> None:
        self._client, self._num_workers, self._restored = client, num_workers, restored

    def mark_restore_done(self) -> None:
        """In the chief: let the workers begin."""
        self._restored()
        self._client.enter("running")

    def is_restore_done(self) -> bool:
        """Whether there is a chief, alive, that has restored."""
        return any(m.index == 0 and m.alive and m.phase != "joined" for m in self._client.members().members)

    def start_worker(self, index: int) -> None:
        """Count as a worker that trains."""
        self._client.enter("running")

    def finish_worker(self, index: int) -> None:
        """Report that the worker's data is trained. A `ServerError` means that the chief still waits for it: report again."""
        self._client.enter("finished")

    def get_unfinished_workers(self) -> dict[int, bool]:
        """The workers that have not finished: whether each is alive. One that never came is not."""
        members = {member.index: member for member in self._client.members().members}
        finished = {index for index, member in members.items() if member.phase == "finished"}
        waited_for = [index for index in range(1, self._num_workers) if index not in finished]
        return {index: index in members and members[index].alive for index in waited_for}

    def get_progress(self) -> int:
        """The global step."""
        return self._client.members().step
