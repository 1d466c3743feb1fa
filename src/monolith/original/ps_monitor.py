"""Which shards of a model have lost their state, and so must be restored while the others keep theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

__all__ = ["PsMonitor", "Restartable"]


@runtime_checkable
class Restartable(Protocol):
    """A shard, that is a store or a server, that knows whether it has been given its state since it started."""

    def is_initialised(self) -> bool:
        """False in one that has just started."""

    def mark_initialised(self) -> None:
        """From now on, until it is started anew, it has state that is worth keeping."""


class PsMonitor:
    """Asks the shards. The mark lies in the shard itself, so that it is lost exactly when the shard's state is.

    Example:
        >>> from monolith.table import LocalStore
        >>> shards = [LocalStore([]), LocalStore([])]
        >>> monitor = PsMonitor(shards)
        >>> monitor.setup_ps_initialized_state()
        >>> shards[1] = LocalStore([])                                              # the second is started anew
        >>> monitor = PsMonitor(shards)
        >>> monitor.is_ps_uninitialized(0), monitor.is_ps_uninitialized(1)
        (False, True)
    """

    def __init__(self, shards: Sequence[Restartable]) -> None:
        self.shards = tuple(shards)

    def is_ps_uninitialized(self, shard: int | None) -> bool:
        """Whether shard number `shard` must be restored. None, or a number there is not, counts as fresh."""
        if shard is None or not 0 <= shard < len(self.shards):
            return True
        return not self.shards[shard].is_initialised()

    def setup_ps_initialized_state(self) -> None:
        """Mark all shards: they have been initialised or restored."""
        for shard in self.shards:
            shard.mark_initialised()
