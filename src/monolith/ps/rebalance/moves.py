"""Moving buckets, or dense parameters, from one running server to another, so that no update is lost or doubled whichever dies.

The giver stops to own a piece and makes that durable, then sends its rows until it knows what became of them. The taker
owns the piece from the moment it has the rows, makes that durable, and answers. Then the giver forgets the rows. In between
neither of the two takes changes for the piece. After a crash the giver sends the same transfer again, under the same number:
the taker knows whether it has it. A piece whose taker does not come back is taken back when the taker has refused it, or when
somebody says that it is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from monolith.errors import DeadlineExceededError, InvalidArgumentError, MonolithError, UnavailableError
from monolith.ps.protocol.bucket_messages import Buckets, Giving, MoveBuckets, Moved, TakeBack, TakenBack
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.ownership import mask_of, ranges_of
from monolith.ps.rebalance.bucket_transfer import piece_size
from monolith.ps.rebalance.delivery import ASK_SECONDS, TransferDelivery, keep_piece
from monolith.ps.rebalance.dense_transfer import dense_piece
from monolith.ps.rebalance.lease import MoverLease
from monolith.ps.server.ledger_state import progress_text
from monolith.ps.server.owned_buckets import OwnedBuckets
from monolith.ps.server.state import ServerState
from monolith.transport.link import Link

__all__ = ["BucketMoves"]

PIECE_BYTES = 2**23
"""Rows of one piece: about what is moved in a few hundredths of a second."""


class _TakerMissing(Exception):  # noqa: N818 - it is told, not raised, to whoever asks
    """The taker cannot be asked. Not an error of ours: whoever asks would think that the giver cannot be reached."""


class BucketMoves:
    """What a server does as a giver.

    Args:
        state: what the server holds.
        owned: which buckets of it.
        lease: who may move them.
        commit: makes everything durable, if the server keeps anything.
        connect: a link to another server, by its address.
    """

    def __init__(
        self,
        state: ServerState,
        owned: OwnedBuckets,
        lease: MoverLease,
        *,
        commit: Callable[[], object],
        connect: Callable[[str], Link],
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._state, self._owned, self._lease = state, owned, lease
        self._commit, self._connect = commit, connect
        self._delivery = TransferDelivery(state, owned, commit=commit, connect=connect)
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()

    def resume(self) -> None:
        """Go on with a piece that was on its way when the server died; after it has restored itself."""
        if self._owned.giving is not None:
            self._delivery.start(self._owned.giving, rebalance=0)

    def stop(self) -> None:
        """Send nothing any more; what is on its way is asked for again when the server is started again."""
        self._delivery.stop()

    def close(self) -> None:
        """Wait a moment for what is being sent; after `stop`, before the folder is closed."""
        self._delivery.close()

    def move(self, move: MoveBuckets) -> Moved:
        """Give away the first piece of what `move` names that is owned here."""
        with self._lock:
            if move.buckets is None and not move.dense:
                self._lease.end(move.rebalance)
                return Moved()
            self._lease.require(move.rebalance)
            try:
                giving = self._given(move)
            except _TakerMissing as error:
                return Moved(missing=str(error))
        return Moved() if giving is None else self._delivery.outcome(giving, move.wait)

    def take_back(self, back: TakeBack) -> TakenBack:
        """Own the piece again that is on its way, unless its taker has it, or may have it and is not said to be lost."""
        with self._lock:
            self._lease.require(back.rebalance)
            giving = self._owned.giving
            if giving is None:
                return TakenBack()
            if back.lost not in (None, giving.taker):
                raise InvalidArgumentError(
                    f"lost: {giving} are on their way to {giving.taker}, not to {back.lost}; say whether that is lost"
                )
            return self._delivery.take_back(giving, lost=back.lost is not None, wait=back.wait)

    def _given(self, move: MoveBuckets) -> Giving | None:
        """The piece that is on its way, or the next one; None: there is none."""
        if self._owned.giving is None:
            return self._begin(move)
        self._require_same(self._owned.giving, move)
        return self._owned.giving

    def _require_same(self, giving: Giving, move: MoveBuckets) -> None:
        if giving.taker != move.taker:
            if self._asked(move.taker).server != giving.server:
                raise InvalidArgumentError(
                    f"move: {giving} are on their way to {giving.taker}, and stay so until it answers; start it again"
                )
            with self._state.gate.closed(changes=True):
                self._owned.redirect(move.taker)

    def _begin(self, move: MoveBuckets) -> Giving | None:
        buckets = None if move.buckets is None else self._next_buckets(move.buckets)
        dense = () if buckets else dense_piece(self._state.dense.sizes(), move.dense, self._piece_bytes)
        if buckets is None and not dense:
            return None
        # Asked before anything changes: a taker that is not there costs nothing.
        taker = self._asked(move.taker)
        if taker.server == self._owned.server:
            raise InvalidArgumentError(f"taker: {move.taker} is the giver itself")
        with self._state.gate.closed(changes=True):
            mask = None if buckets is None else mask_of([buckets])
            giving = self._owned.begin_giving(
                taker=move.taker,
                server=taker.server,
                durable=taker.durable,
                buckets=buckets,
                dense=dense,
                positions=progress_text(self._state.pushes, buckets=mask, names=dense),
            )
            self._state.dense.set_declared(dense, declared=False)
        try:
            self._commit()
        except MonolithError:
            with self._state.gate.closed(changes=True):
                keep_piece(self._state, self._owned)
            raise
        self._delivery.start(giving, rebalance=move.rebalance)
        return giving

    def _next_buckets(self, buckets: tuple[int, int]) -> tuple[int, int] | None:
        owned = mask_of(self._owned.ranges)
        wanted = ranges_of(owned & mask_of([buckets]))
        if not wanted:
            return None
        first, end = wanted[0]
        return first, min(end, first + piece_size(self._state.tables, int(owned.sum()), self._piece_bytes))

    def _asked(self, address: str) -> Buckets:
        link = self._connect(address)
        try:
            return Buckets.from_json(link.call(Call.BUCKETS, timeout=ASK_SECONDS).text)
        except (UnavailableError, DeadlineExceededError) as error:
            raise _TakerMissing(str(error)) from None
        finally:
            link.close()
