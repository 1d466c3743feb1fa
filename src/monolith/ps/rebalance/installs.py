"""Buckets and dense parameters that another server gives to this one. See `monolith.ps.rebalance.moves`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError, MemoryLimitError, ProtocolError
from monolith.ps.protocol.control_messages import InstallBuckets, Installed, Refused, RefuseTransfer
from monolith.ps.protocol.ownership import mask_of
from monolith.ps.rebalance.transfer import put_dense, put_rows
from monolith.ps.server.ledger_state import put_progress, read_ledger
from monolith.ps.server.owned_buckets import OwnedBuckets
from monolith.ps.server.state import ServerState

__all__ = ["BucketInstalls", "MoverLease", "REFUSALS"]

SECONDS = 60.0
"""After which somebody else may move buckets, if whoever did has not been heard of."""
REMEMBERED = 64
"""Those who have done with moving, and are not listened to any more."""


class MoverLease:
    """Refuses whoever moves beside another, and messages of those who have done.

    Example:
        >>> lease = MoverLease()
        >>> lease.require(5)
        >>> lease.end(5)
        >>> lease.require(6)
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mover, self._until = 0, 0.0
        self._ended: deque[int] = deque(maxlen=REMEMBERED)

    def require(self, rebalance: int) -> None:
        """Let `rebalance` move something now, and nobody else for a while."""
        if rebalance in self._ended:
            # A message that was delayed: what it asks for may have been undone since.
            raise InvalidArgumentError("rebalance: it has ended")
        now = self._clock()
        if rebalance != self._mover and now < self._until:
            raise InvalidArgumentError(
                "rebalance: somebody else is moving buckets of this server; let that end, or wait a minute if it has died"
            )
        self._mover, self._until = rebalance, now + SECONDS

    def end(self, rebalance: int) -> None:
        """`rebalance` has done."""
        self._ended.append(rebalance)
        if rebalance == self._mover:
            self._until = 0.0


REFUSALS = (ConfigError, InvalidArgumentError, MemoryLimitError, ProtocolError)
"""Errors of a taker that has not installed a transfer and never will."""


class BucketInstalls:
    """What a server does as a taker; `commit` makes everything durable, if the server keeps anything."""

    def __init__(
        self, state: ServerState, owned: OwnedBuckets, lease: MoverLease, *, commit: Callable[[], object]
    ) -> None:
        self._state, self._owned, self._lease, self._commit = state, owned, lease, commit

    def install(self, install: InstallBuckets, arrays: Sequence[np.ndarray]) -> Installed:
        """Own what is in a transfer from now on, unless that has happened before."""
        again = self._install(install, arrays)
        # Also if it had been done before: the answer that got lost may have been that it could not be made durable.
        self._commit()
        return Installed(again=again)

    def refuse(self, transfer: RefuseTransfer) -> Refused:
        """Never own the buckets of a transfer, unless they are owned already."""
        with self._state.gate.closed(changes=True):
            installed = self._owned.refuse(transfer)
        if installed:
            # Its giver forgets the rows when it hears that.
            self._commit()
        return Refused(installed=installed)

    def _install(self, install: InstallBuckets, arrays: Sequence[np.ndarray]) -> bool:
        with self._state.gate.closed(changes=True):
            try:
                if self._owned.has_installed(install):
                    return True
                if install.rebalance:
                    self._lease.require(install.rebalance)
                self._put(install, arrays)
            except (*REFUSALS, MemoryError):
                self._owned.refuse(install)
                raise
            if install.coordination:
                # The global step is that of the first bucket.
                self._state.pushes.base_step = install.base_step
            self._owned.install(install)
            self._state.initialised = True
            return False

    def _put(self, install: InstallBuckets, arrays: Sequence[np.ndarray]) -> None:
        """Hold what is in a transfer, and know how far each worker is in it. On an error nothing has changed."""
        try:
            positions = read_ledger(install.positions, "install_buckets")
            if install.coordination:
                # Before the rows: should those be refused, nobody asks this server for it.
                self._state.coordination.take(install.coordination)
        except CorruptFileError as error:
            raise InvalidArgumentError(str(error)) from None
        if install.buckets is None:
            put_dense(self._state.dense, install, arrays)
            put_progress(self._state.pushes, positions, names=install.dense)
        else:
            put_rows(self._state.tables, install, arrays)
            put_progress(self._state.pushes, positions, buckets=mask_of([install.buckets]))
