"""What a server knows about its buckets: those it owns, the piece it is giving away, what it was given.

Of dense parameters, which are trained where they were declared, only those that it has given away.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping

import numpy as np

from monolith.config import Config
from monolith.errors import (
    ConfigError,
    CorruptFileError,
    InvalidArgumentError,
    OwnershipChangedError,
    UnavailableError,
)
from monolith.ps.protocol.control_messages import Buckets, Giving, InstallBuckets, RefuseTransfer
from monolith.ps.protocol.ownership import BucketRange, BucketRanges, mask_of, ranges_of
from monolith.transport.calls import Whole

__all__ = ["OwnedBuckets"]

REMEMBERED_TAKERS = 256
"""Where buckets went, the newest last: enough for whoever has an old list of servers."""
REMEMBERED_GAINS = 64
"""Gains after which a client that knows of none of them must ask again who owns what."""


class _Known(Config):
    server: Whole
    version: Whole = 0
    oldest: Whole = 0
    """The oldest version that a request may name: nothing was given away since."""
    gains: tuple[tuple[Whole, BucketRange], ...] = ()
    """The buckets that were gained after `oldest`, each with the first version that has them."""
    ranges: BucketRanges = ()
    giving: Giving | None = None
    transfers: Whole = 0
    gave: tuple[str, ...] = ()
    installed: dict[str, Whole] = {}
    """The number of the last transfer from each giver."""
    gave_dense: tuple[str, ...] = ()


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
        """Grows when buckets are given away or gained. 0 until it has owned any."""
        return self._known.version

    @property
    def ranges(self) -> BucketRanges:
        """What it owns."""
        return self._known.ranges

    @property
    def owns_first(self) -> bool:
        """Whether it owns the first bucket, and so answers for what workers know in common."""
        return bool(self._known.ranges) and self._known.ranges[0][0] == 0

    @property
    def giving(self) -> Giving | None:
        """The piece that is on its way to another server."""
        return self._known.giving

    @property
    def gave_dense(self) -> tuple[str, ...]:
        """Dense parameters that others hold now."""
        return self._known.gave_dense

    def told(self, *, durable: bool, dense: Mapping[str, int]) -> Buckets:
        """What the server says about itself; `dense`: the parameters it holds, and their sizes."""
        known = self._known
        giving = None if known.giving is None else known.giving.model_copy(update={"positions": ""})
        return Buckets(
            server=known.server,
            version=known.version,
            ranges=known.ranges,
            giving=giving,
            gave=known.gave,
            durable=durable,
            dense=tuple(dense),
            dense_bytes=tuple(dense.values()),
            gave_dense=known.gave_dense,
        )

    def require(self, version: int) -> None:
        """Raise `OwnershipChangedError` if buckets were given away since `version`, by which a change was split."""
        if not self._known.oldest <= version <= self._known.version:
            raise _changed(self._known.version, version)

    def require_read(self, version: int) -> None:
        """As `require`, but whoever only reads may do so without knowing a version."""
        if version:
            self.require(version)

    def known_at(self, version: int) -> np.ndarray | None:
        """bool [NUM_BUCKETS]: the buckets owned that a client of `version` knows of. None: all of them.

        A change that was split by `version` is for these buckets and no others.
        """
        later = [buckets for gained, buckets in self._known.gains if gained > version]
        return mask_of(self._known.ranges) & ~mask_of(later) if later else None

    def require_dense(self, names: Collection[str]) -> None:
        """Raise `OwnershipChangedError` if others hold some of these dense parameters, or will."""
        away = {*self._known.gave_dense, *(self._known.giving.dense if self._known.giving is not None else ())}
        for name in names:
            if name in away:
                raise OwnershipChangedError(
                    f"dense parameter {name!r}: another server has it, or will; ask again who does"
                )

    def forget_dense(self, names: Collection[str]) -> None:
        """Forget that `names` were given away: they are here again, or whoever had them is lost."""
        self._set(gave_dense=tuple(name for name in self._known.gave_dense if name not in names))

    def claim(self, ranges: BucketRanges) -> None:
        """Own `ranges` from the start."""
        if self._known.version == 0:
            self._set(version=1, oldest=1, ranges=ranges)
        elif ranges != self._known.ranges:
            raise OwnershipChangedError(
                f"ranges: the server owns {list(self._known.ranges)} already, not {list(ranges)}; ask it what it owns"
            )

    def begin_giving(
        self,
        *,
        taker: str,
        server: int,
        durable: bool,
        buckets: tuple[int, int] | None = None,
        dense: tuple[str, ...] = (),
        positions: str = "",
    ) -> Giving:
        """Stop to own `buckets`, all of which must be owned, or `dense`; they are on their way from now on."""
        if self._known.giving is not None:
            raise InvalidArgumentError(f"move: {self._known.giving!r} is still under way")
        number = self._known.transfers + 1
        giving = Giving(
            number=number,
            taker=taker,
            server=server,
            durable=durable,
            buckets=buckets,
            dense=dense,
            positions=positions,
        )
        mask, piece = mask_of(self._known.ranges), _mask(giving)
        if (piece & ~mask).any():
            raise InvalidArgumentError(f"buckets: the server owns {list(self._known.ranges)}, not all of {buckets}")
        # Dense parameters are known by their names: a map of buckets stays what it was.
        version = self._known.version + 1
        changed = {} if buckets is None else {"version": version, "oldest": version, "gains": ()}
        self._set(ranges=ranges_of(mask & ~piece), giving=giving, transfers=number, **changed)
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
        gave_dense = tuple(dict.fromkeys((*self._known.gave_dense, *giving.dense)))
        self._set(giving=None, gave=(*others, giving.taker)[-REMEMBERED_TAKERS:], gave_dense=gave_dense)

    def cancel_giving(self) -> None:
        """The taker does not own the piece and never will: it stays here."""
        giving = self._known.giving
        assert giving is not None
        self._set(giving=None, **self._gained(giving.buckets))

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
        piece = _mask(install)
        if known.giving is not None and _overlap(install, known.giving):
            raise UnavailableError(f"{known.giving} are still on their way from here; ask again")
        if (piece & mask_of(known.ranges)).any():
            raise InvalidArgumentError(f"buckets: some of {install.buckets} are owned here: {list(known.ranges)}")
        return False

    def install(self, install: InstallBuckets) -> None:
        """Own the buckets of a transfer."""
        installed = {**self._known.installed, str(install.giver): install.number}
        self._set(installed=installed, **self._gained(install.buckets))
        self.forget_dense(install.dense)

    def refuse(self, transfer: InstallBuckets | RefuseTransfer) -> bool:
        """Never install this transfer, unless that has happened, which is returned: its sender then keeps the buckets."""
        self._require_meant(transfer)
        if transfer.number <= self._known.installed.get(str(transfer.giver), 0):
            return True
        self._refused[transfer.giver] = max(transfer.number, self._refused.get(transfer.giver, 0))
        return False

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

    def _gained(self, buckets: tuple[int, int] | None) -> dict[str, object]:
        """What changes when `buckets` are gained."""
        if buckets is None:
            return {}
        # Requests of earlier versions are still valid: a client that does not know of a gain asks for none of these buckets here.
        version, gains = self._known.version + 1, self._known.gains
        forgotten = gains[: max(0, len(gains) + 1 - REMEMBERED_GAINS)]
        return {
            "version": version,
            "oldest": max([1, self._known.oldest, *(gained for gained, _ in forgotten)]),
            "gains": (*gains[len(forgotten) :], (version, buckets)),
            "ranges": ranges_of(mask_of([*self._known.ranges, buckets])),
        }

    def _require_meant(self, transfer: InstallBuckets | RefuseTransfer) -> None:
        if transfer.server != self.server:
            raise UnavailableError(f"server: this is {self.server}, the transfer is meant for {transfer.server}")

    def _set(self, **changes: object) -> None:
        self._known = self._known.model_copy(update=changes)


def _mask(piece: Giving | InstallBuckets) -> np.ndarray:
    return mask_of([] if piece.buckets is None else [piece.buckets])


def _overlap(install: InstallBuckets, giving: Giving) -> bool:
    return bool((_mask(install) & _mask(giving)).any()) or not set(install.dense).isdisjoint(giving.dense)


def _changed(known: int, asked: int) -> OwnershipChangedError:
    return OwnershipChangedError(
        f"map: the server's buckets are of version {known}, the request was made for {asked}; ask again who owns what"
    )
