"""What a server knows about its buckets: those it owns, the piece it is giving away, what it was given."""

from __future__ import annotations

import secrets

import numpy as np

from monolith.config import Config
from monolith.errors import (
    ConfigError,
    CorruptFileError,
    InvalidArgumentError,
    OwnershipChangedError,
    UnavailableError,
)
from monolith.ps.bucket_messages import Buckets, Giving, InstallBuckets, RefuseTransfer
from monolith.ps.messages import Whole
from monolith.ps.ownership import BucketRanges, mask_of, ranges_of

__all__ = ["OwnedBuckets"]

REMEMBERED_TAKERS = 256
"""Where buckets went, the newest last: enough for whoever has an old list of servers."""


class _Known(Config):
    server: Whole
    version: Whole = 0
    ranges: BucketRanges = ()
    giving: Giving | None = None
    transfers: Whole = 0
    gave: tuple[str, ...] = ()
    installed: dict[str, Whole] = {}
    """The number of the last transfer from each giver."""


class OwnedBuckets:
    """Which buckets a server answers for.

    Whoever changes it has closed the gate of changes; reading needs nothing, since what is known is replaced as a whole.

    Example:
        >>> owned = OwnedBuckets()
        >>> owned.claim(((0, 2048),))
        >>> owned.require(1)  # a request of this version may go on
        >>> _ = owned.begin_giving(taker="10.0.0.2:7100", server=5, durable=False, buckets=(0, 10))
        >>> owned.version, owned.ranges
        (2, ((10, 2048),))
    """

    def __init__(self) -> None:
        self._known = _Known(server=secrets.randbits(62) | 1)
        # Refusals of this process: a frame that was delayed must not install what its sender has taken back.
        self._refused: dict[int, int] = {}

    @property
    def server(self) -> int:
        """The identity of the server: kept with its state, and by no other server."""
        return self._known.server

    @property
    def version(self) -> int:
        """Grows when buckets are given away; 0 until it has owned any."""
        return self._known.version

    @property
    def ranges(self) -> BucketRanges:
        """What it owns."""
        return self._known.ranges

    @property
    def giving(self) -> Giving | None:
        """The piece that is on its way to another server."""
        return self._known.giving

    def told(self, *, durable: bool, dense: tuple[str, ...]) -> Buckets:
        """What the server says about itself."""
        known = self._known
        return Buckets(
            server=known.server,
            version=known.version,
            ranges=known.ranges,
            giving=known.giving,
            gave=known.gave,
            durable=durable,
            dense=dense,
        )

    def require(self, version: int) -> None:
        """Raise `OwnershipChangedError` unless a change that was split by `version` is for buckets owned now."""
        if version != self._known.version:
            raise _changed(self._known.version, version)

    def require_read(self, version: int) -> None:
        """As `require`, but whoever only reads may do so without knowing a version."""
        if version not in (0, self._known.version):
            raise _changed(self._known.version, version)

    def claim(self, ranges: BucketRanges) -> None:
        """Own `ranges` from the start."""
        if self._known.version == 0:
            self._set(version=1, ranges=ranges)
        elif ranges != self._known.ranges:
            raise OwnershipChangedError(
                f"ranges: the server owns {list(self._known.ranges)} already, not {list(ranges)}; ask it what it owns"
            )

    def begin_giving(self, *, taker: str, server: int, durable: bool, buckets: tuple[int, int]) -> Giving:
        """Stop to own `buckets`, all of which must be owned; they are on their way from now on."""
        if self._known.giving is not None:
            raise InvalidArgumentError(f"move: {self._known.giving!r} is still under way")
        mask, piece = mask_of(self._known.ranges), mask_of([buckets])
        if (piece & ~mask).any():
            raise InvalidArgumentError(f"buckets: the server owns {list(self._known.ranges)}, not all of {buckets}")
        number = self._known.transfers + 1
        giving = Giving(number=number, taker=taker, server=server, durable=durable, buckets=buckets)
        self._set(version=self._known.version + 1, ranges=ranges_of(mask & ~piece), giving=giving, transfers=number)
        return giving

    def redirect(self, taker: str) -> None:
        """The taker of the piece on its way is at another address now."""
        giving = self._known.giving
        assert giving is not None
        self._set(giving=giving.model_copy(update={"taker": taker}))

    def finish_giving(self) -> None:
        """The taker owns the piece."""
        giving = self._known.giving
        assert giving is not None
        others = [address for address in self._known.gave if address != giving.taker]
        self._set(giving=None, gave=(*others, giving.taker)[-REMEMBERED_TAKERS:])

    def cancel_giving(self) -> None:
        """The taker does not own the piece and never will: it stays here."""
        giving = self._known.giving
        assert giving is not None
        self._set(giving=None, ranges=ranges_of(mask_of(self._known.ranges) | mask_of([giving.buckets])))

    def has_installed(self, install: InstallBuckets) -> bool:
        """Whether this transfer was installed before; raises if it was refused before, or cannot be installed."""
        known = self._known
        self._require_meant(install)
        if install.number <= self._refused.get(install.giver, 0):
            raise InvalidArgumentError(f"transfer {install.number} was refused before")
        if install.number <= known.installed.get(str(install.giver), 0):
            return True
        if install.giver == known.server:
            raise InvalidArgumentError("taker: a server cannot give buckets to itself")
        piece = mask_of([install.buckets])
        if known.giving is not None and (piece & mask_of([known.giving.buckets])).any():
            raise UnavailableError(f"buckets: some of {install.buckets} are still on their way from here; ask again")
        if (piece & mask_of(known.ranges)).any():
            raise InvalidArgumentError(f"buckets: some of {install.buckets} are owned here: {list(known.ranges)}")
        return False

    def install(self, install: InstallBuckets) -> None:
        """Own the buckets of a transfer."""
        mask: np.ndarray = mask_of(self._known.ranges) | mask_of([install.buckets])
        installed = {**self._known.installed, str(install.giver): install.number}
        # A gain needs no new version: whoever does not know of it asks for none of these buckets here.
        self._set(version=max(1, self._known.version), ranges=ranges_of(mask), installed=installed)

    def refuse(self, transfer: InstallBuckets | RefuseTransfer) -> bool:
        """Never install this transfer, unless that has happened, which is returned: its sender then keeps the buckets."""
        self._require_meant(transfer)
        if transfer.number <= self._known.installed.get(str(transfer.giver), 0):
            return True
        self._refused[transfer.giver] = max(transfer.number, self._refused.get(transfer.giver, 0))
        return False

    def has(self, giving: Giving) -> bool:
        """Whether the buckets of a piece are owned here."""
        return not (mask_of([giving.buckets]) & ~mask_of(self._known.ranges)).any()

    def identify(self, server: int) -> None:
        """Be this server: the one whose folder it has."""
        self._set(server=server)

    def state(self) -> str:
        """All of it as text, for the log and for checkpoints."""
        return self._known.model_dump_json()

    def load_state(self, state: object) -> None:
        """Go on from what `state` told."""
        try:
            self._known = _Known.from_json(str(state))
        except ConfigError as error:
            raise CorruptFileError(f"what the server owned cannot be read: {error}") from None

    def _require_meant(self, transfer: InstallBuckets | RefuseTransfer) -> None:
        if transfer.server != self.server:
            raise UnavailableError(f"server: this is {self.server}, the transfer is meant for {transfer.server}")

    def _set(self, **changes: object) -> None:
        self._known = self._known.model_copy(update=changes)


def _changed(known: int, asked: int) -> OwnershipChangedError:
    return OwnershipChangedError(
        f"map: the server's buckets are of version {known}, the request was made for {asked}; ask again who owns what"
    )
