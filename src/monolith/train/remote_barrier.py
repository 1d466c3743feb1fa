"""`RemoteBarrier`: hold workers that are other processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from monolith.cluster.coordination import Coordination
from monolith.errors import InvalidArgumentError
from monolith.train.barrier import BarrierAlreadyPlacedError, Callback

__all__ = ["RemoteBarrier"]


class RemoteBarrier:
    """A `WorkerBarrier` between processes. Each has one of its own, over its own `client`.

    Workers that are not heard of any more, have ended or never came are not waited for. The barrier falls when its chief is
    gone, so that no worker is held for ever.

    Example:
        >>> from monolith.ps import ParameterServer
        >>> from monolith.ps.client.coordination_client import CoordinationClient
        >>> with ParameterServer() as server, CoordinationClient([server.address], index=0, epoch=1) as chief:
        ...     barrier = RemoteBarrier(chief, capacity=2)
        ...     barrier.place("Save")
        ...     barrier.is_placed(), barrier.unblocked()
        (True, [])
    """

    poll_seconds = 1.0

    def __init__(
        self,
        client: Coordination,
        *,
        capacity: int,
        callbacks: Sequence[Callback] = (),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`callbacks` are called by `place`, in the chief."""
        self._client, self._capacity, self._sleep = client, capacity, sleep
        self._callbacks = tuple(callbacks)

    @property
    def capacity(self) -> int:
        """Workers, the chief included."""
        return self._capacity

    def place(self, action: str = "") -> None:
        """Hold every worker that comes by, then call the chief's callbacks."""
        placed, barrier = self._client.place_barrier(action)
        if not placed:
            raise BarrierAlreadyPlacedError(f"there is a barrier already, for {barrier.action!r}")
        for callback in self._callbacks:
            callback(action)

    def remove(self) -> None:
        """Let all go."""
        self._client.remove_barrier()

    def is_placed(self) -> bool:
        """Whether workers are being held."""
        return self._client.members().barrier is not None

    def wait(self, index: int, callbacks: Sequence[Callback] = ()) -> bool:
        """Worker `index` comes by; returns when it may go on."""
        if not 0 < index < self._capacity:
            raise InvalidArgumentError(f"index: expected a worker from 1 to {self._capacity - 1}, got {index}")
        barrier = self._client.newest().barrier
        if barrier is None:
            return False
        # Before it counts as held: who waits for all to be held may rely on their callbacks' effects.
        for callback in callbacks:
            callback(barrier.action)
        while self._client.hold(barrier.number):
            self._sleep(self.poll_seconds)
        return True

    def unblocked(self) -> list[int]:
        """Workers that train and have not come by yet, the chief (0) if there is no barrier."""
        found = self._client.members()
        chief = [] if found.barrier is not None else [0]
        return chief + [m.index for m in found.members if m.index and m.alive and m.phase == "running" and not m.held]
