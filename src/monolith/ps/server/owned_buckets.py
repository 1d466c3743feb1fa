"""`OwnedBuckets`: the buckets that a server owns, its outgoing transfer, and the transfers it has installed.

Dense parameters are trained where they were declared. Of those it knows only which were moved to other servers.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping

import numpy as np

from monolith.config import Config
from monolith.errors import (
    ConfigError,
    CorruptFileError,
    InvalidArgumentError,
    OwnershipChangedError,
    UnavailableError,
)
from monolith.ps.protocol.control_messages import Buckets, InstallBuckets, OutgoingTransfer, RefuseTransfer
from monolith.ps.protocol.ownership import BucketRange, BucketRanges
from monolith.table.buckets import mask_of, ranges_of
from monolith.transport.calls import WireInt

__all__ = ["OwnedBuckets"]

REMEMBERED_DESTINATIONS = 256
"""Addresses that buckets were moved to, newest last: enough for clients with an old list of servers."""
REMEMBERED_GAINS = 64
"""Gains after which a client that knows of none of them must refresh its map."""


class _Known(Config):
    server: WireInt
    version: WireInt = 0
    oldest: WireInt = 0
    """The oldest version that a request may name: no buckets were lost since."""
    gains: tuple[tuple[WireInt, BucketRange], ...] = ()
    """Buckets gained after `oldest`, each with the first version that has them."""
    ranges: BucketRanges = ()
    giving: OutgoingTransfer | None = None
    transfers: WireInt = 0
    gave: tuple[str, ...] = ()
    installed: dict[str, WireInt] = {}
    """The number of the last transfer from each source."""
    gave_dense: tuple[str, ...] = ()


class OwnedBuckets:
    """Which buckets a server owns.

    It is changed while the gate is closed. Reading needs no lock, since the state is replaced as a whole.

    Example:
        >>> owned = OwnedBuckets()
        >>> owned.claim(((0, 2048),))
        >>> owned.require(1)  # a request of this version is accepted
        >>> _ = owned.begin_giving(destination="10.0.0.2:7100", server=5, durable=False, buckets=(0, 10))
        >>> owned.version, owned.ranges
        (2, ((10, 2048),))
    """

    def __init__(self) -> None:
        self._known = _Known(server=secrets.randbits(62) | 1)
        # Refusals of this process: a delayed frame must not install what its source has taken back.
        self._refused: dict[int, int] = {}

    @property
    def server(self) -> int:
        """The identity of the server, kept with its state and unique."""
        return self._known.server

    @property
    def version(self) -> int:
        """Grows when buckets are lost or gained. 0 until it has owned any."""
        return self._known.version

    @property
    def ranges(self) -> BucketRanges:
        """The owned buckets."""
        return self._known.ranges

    @property
    def owns_first(self) -> bool:
        """Whether it owns the first bucket, and so answers for the coordination of the run."""
        return bool(self._known.ranges) and self._known.ranges[0][0] == 0

    @property
    def giving(self) -> OutgoingTransfer | None:
        """The transfer that is in transit to another server."""
        return self._known.giving

    @property
    def gave(self) -> tuple[str, ...]:
        """Addresses that buckets were moved to, newest last."""
        return self._known.gave

    @property
    def gave_dense(self) -> tuple[str, ...]:
        """Dense parameters that were moved to other servers."""
        return self._known.gave_dense

    def answer(self, *, durable: bool, dense: Callable[[], Mapping[str, int]]) -> Buckets:
        """Return the server's answer to `Call.BUCKETS`. `dense` returns the parameters that it holds, with their bytes."""
        while True:
            known, held = self._known, dense()
            # A parameter that arrived in between would be neither held nor moved away, and a worker would declare it again.
            if self._known is known:
                break
        giving = None if known.giving is None else known.giving.model_copy(update={"positions": ""})
        return Buckets(
            server=known.server,
            version=known.version,
            ranges=known.ranges,
            giving=giving,
            gave=known.gave,
            durable=durable,
            dense=tuple(held),
            dense_bytes=tuple(held.values()),
            gave_dense=known.gave_dense,
        )

    def require(self, version: int) -> None:
        """Raise `OwnershipChangedError` if buckets were lost since `version`, by which a change was split."""
        if not self._known.oldest <= version <= self._known.version:
            raise _changed(self._known.version, version)

    def require_read(self, version: int) -> None:
        """As `require`, but a read need not name a version."""
        if version:
            self.require(version)

    def known_at(self, version: int) -> np.ndarray | None:
        """Return bool [NUM_BUCKETS]: the buckets owned that a client of `version` knows of. None: all of them.

        A change that was split by `version` is for these buckets and no others.
        """
        later = [buckets for gained, buckets in self._known.gains if gained > version]
        return mask_of(self._known.ranges) & ~mask_of(later) if later else None

    def require_dense(self, names: Collection[str]) -> None:
        """Raise `OwnershipChangedError` if some of these dense parameters were moved away or are in transit."""
        away = {*self._known.gave_dense, *(self._known.giving.dense if self._known.giving is not None else ())}
        for name in names:
            if name in away:
                raise OwnershipChangedError(
                    f"dense parameter {name!r}: it was moved to another server; ask again which one"
                )

    def forget_dense(self, names: Collection[str]) -> None:
        """Forget that `names` were moved away: they are here again, or their server is lost."""
        self._set(gave_dense=tuple(name for name in self._known.gave_dense if name not in names))

    def claim(self, ranges: BucketRanges) -> None:
        """Own `ranges` from the start. Idempotent."""
        if self._known.version == 0:
            self._set(version=1, oldest=1, ranges=ranges)
        elif ranges != self._known.ranges:
            raise OwnershipChangedError(
                f"ranges: the server owns {list(self._known.ranges)} already, not {list(ranges)}; refresh the map"
            )

    def begin_giving(
        self,
        *,
        destination: str,
        server: int,
        durable: bool,
        buckets: tuple[int, int] | None = None,
        dense: tuple[str, ...] = (),
        positions: str = "",
    ) -> OutgoingTransfer:
        """Give up `buckets`, all of which must be owned, or `dense`. They are in transit from now on."""
        if self._known.giving is not None:
            raise InvalidArgumentError(f"move: {self._known.giving!r} is still in transit")
        number = self._known.transfers + 1
        giving = OutgoingTransfer(
            number=number,
            taker=destination,
            server=server,
            durable=durable,
            buckets=buckets,
            dense=dense,
            positions=positions,
        )
        mask, moved = mask_of(self._known.ranges), _mask(giving)
        if (moved & ~mask).any():
            raise InvalidArgumentError(f"buckets: the server owns {list(self._known.ranges)}, not all of {buckets}")
        # Dense parameters are addressed by name: the map of buckets does not change.
        version = self._known.version + 1
        changed = {} if buckets is None else {"version": version, "oldest": version, "gains": ()}
        self._set(ranges=ranges_of(mask & ~moved), giving=giving, transfers=number, **changed)
        return giving

    def redirect(self, destination: str) -> None:
        """Record a new address of the destination of the outgoing transfer."""
        giving = self._known.giving
        assert giving is not None
        self._set(giving=giving.model_copy(update={"taker": destination}))

    def finish_giving(self) -> None:
        """Record that the destination owns the transfer."""
        giving = self._known.giving
        assert giving is not None
        others = [address for address in self._known.gave if address != giving.taker]
        gave_dense = tuple(dict.fromkeys((*self._known.gave_dense, *giving.dense)))
        self._set(giving=None, gave=(*others, giving.taker)[-REMEMBERED_DESTINATIONS:], gave_dense=gave_dense)

    def cancel_giving(self) -> None:
        """Own the transfer again: the destination does not have it and never will."""
        giving = self._known.giving
        assert giving is not None
        self._set(giving=None, **self._gained(giving.buckets))

    def has_installed(self, install: InstallBuckets) -> bool:
        """Whether this transfer was installed before. Raises if it was refused before, or cannot be installed."""
        known = self._known
        self._require_for_here(install)
        if install.number <= self._refused.get(install.giver, 0):
            raise InvalidArgumentError(f"transfer {install.number} was refused before")
        if install.number <= known.installed.get(str(install.giver), 0):
            return True
        if install.giver == known.server:
            raise InvalidArgumentError("destination: a server cannot give buckets to itself")
        if known.giving is not None and _overlap(install, known.giving):
            raise UnavailableError(f"{known.giving} are still in transit from here; ask again")
        if (_mask(install) & mask_of(known.ranges)).any():
            raise InvalidArgumentError(f"buckets: some of {install.buckets} are owned here: {list(known.ranges)}")
        return False

    def install(self, install: InstallBuckets) -> None:
        """Own the buckets of a transfer."""
        installed = {**self._known.installed, str(install.giver): install.number}
        self._set(installed=installed, **self._gained(install.buckets))
        self.forget_dense(install.dense)

    def refuse(self, transfer: InstallBuckets | RefuseTransfer) -> bool:
        """Never install this transfer from now on. Returns whether it is installed already, so that this server keeps it."""
        self._require_for_here(transfer)
        if transfer.number <= self._known.installed.get(str(transfer.giver), 0):
            return True
        self._refused[transfer.giver] = max(transfer.number, self._refused.get(transfer.giver, 0))
        return False

    def identify(self, server: int) -> None:
        """Take over the identity that is kept in the folder."""
        self._set(server=server)

    def state(self) -> str:
        """Return the state as JSON, for the log and for checkpoints."""
        return self._known.model_dump_json()

    def load_state(self, state: object) -> None:
        """Restore what `state` returned."""
        try:
            self._known = _Known.from_json(str(state))
        except ConfigError as error:
            raise CorruptFileError(f"the ownership of the server cannot be read: {error}") from None

    def _gained(self, buckets: tuple[int, int] | None) -> dict[str, object]:
        """Return the fields that change when `buckets` are gained."""
        if buckets is None:
            return {}
        # Requests of earlier versions stay valid: a client that does not know of a gain sends no ids of these buckets here.
        version, gains = self._known.version + 1, self._known.gains
        forgotten = gains[: max(0, len(gains) + 1 - REMEMBERED_GAINS)]
        return {
            "version": version,
            "oldest": max([1, self._known.oldest, *(gained for gained, _ in forgotten)]),
            "gains": (*gains[len(forgotten) :], (version, buckets)),
            "ranges": ranges_of(mask_of([*self._known.ranges, buckets])),
        }

    def _require_for_here(self, transfer: InstallBuckets | RefuseTransfer) -> None:
        if transfer.server != self.server:
            raise UnavailableError(f"server: this is {self.server}, the transfer is for {transfer.server}")

    def _set(self, **changes: object) -> None:
        self._known = self._known.model_copy(update=changes)


def _mask(transfer: OutgoingTransfer | InstallBuckets) -> np.ndarray:
    return mask_of([] if transfer.buckets is None else [transfer.buckets])


def _overlap(install: InstallBuckets, giving: OutgoingTransfer) -> bool:
    return bool((_mask(install) & _mask(giving)).any()) or not set(install.dense).isdisjoint(giving.dense)


def _changed(known: int, asked: int) -> OwnershipChangedError:
    return OwnershipChangedError(
        f"map: the server's buckets have version {known}, the request has {asked}; refresh the map"
    )
