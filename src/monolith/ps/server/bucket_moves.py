"""Moving buckets from one running server to another, so that no update is lost or doubled whichever of them dies.

The giver stops to own a piece and makes that durable, then sends its rows until it knows what became of them. The taker
owns the piece from the moment it has the rows, makes that durable, and answers. Then the giver forgets the rows. In between
neither of the two takes changes for the piece. After a crash the giver sends the same transfer again, under the same number:
the taker knows whether it has it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from monolith.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    MonolithError,
    UnavailableError,
)
from monolith.ps.bucket_messages import Buckets, Giving, InstallBuckets, MoveBuckets, Moved
from monolith.ps.ownership import mask_of, ranges_of
from monolith.ps.server.bucket_installs import REFUSALS
from monolith.ps.server.bucket_transfer import drop_rows, packed_transfer, piece_size
from monolith.ps.server.mover_lease import MoverLease
from monolith.ps.server.owned_buckets import OwnedBuckets
from monolith.ps.server.state import ServerState
from monolith.transport.calls import Call
from monolith.transport.link import Link

__all__ = ["BucketMoves"]

PIECE_BYTES = 2**23
"""Rows of one piece: about what is moved in a few hundredths of a second."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two attempts to reach the taker."""
ASK_SECONDS = 2.0
"""How long a taker may take to answer before anything is given to it."""
CLOSE_SECONDS = 2.0
"""How long the end of a server waits for a piece that is being sent."""
REMEMBERED_OUTCOMES = 16
"""Of pieces: whoever waits for one asks for it at once."""

_logger = logging.getLogger(__name__)


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
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()
        self._settled = threading.Condition()
        self._outcomes: OrderedDict[int, Exception | None] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def resume(self) -> None:
        """Go on with a piece that was on its way when the server died; after it has restored itself."""
        if self._owned.giving is not None:
            self._start(self._owned.giving, rebalance=0)

    def stop(self) -> None:
        """Send nothing any more; what is on its way is asked for again when the server is started again."""
        self._stopping.set()
        with self._settled:
            self._settled.notify_all()

    def close(self) -> None:
        """Wait a moment for what is being sent; after `stop`, before the folder is closed."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def move(self, move: MoveBuckets) -> Moved:
        """Give away the first piece of `move.buckets` that is owned here."""
        with self._lock:
            if move.buckets is None:
                self._lease.end(move.rebalance)
                return Moved()
            self._lease.require(move.rebalance)
            try:
                giving = self._given(move, move.buckets)
            except _TakerMissing as error:
                return Moved(missing=str(error))
        return Moved() if giving is None else self._outcome(giving, move.wait)

    def _given(self, move: MoveBuckets, buckets: tuple[int, int]) -> Giving | None:
        """The piece that is on its way, or the next one; None: there is none."""
        if self._owned.giving is None:
            return self._begin(move, buckets)
        self._require_same(self._owned.giving, move)
        return self._owned.giving

    def _require_same(self, giving: Giving, move: MoveBuckets) -> None:
        if giving.taker != move.taker:
            if self._asked(move.taker).server != giving.server:
                raise InvalidArgumentError(
                    f"buckets: {giving.buckets} are on their way to {giving.taker}, and stay so until it answers; start it again"
                )
            with self._state.gate.closed(changes=True):
                self._owned.redirect(move.taker)

    def _begin(self, move: MoveBuckets, buckets: tuple[int, int]) -> Giving | None:
        owned = mask_of(self._owned.ranges)
        wanted = ranges_of(owned & mask_of([buckets]))
        if not wanted:
            return None
        # Asked before anything changes: a taker that is not there costs nothing.
        taker = self._asked(move.taker)
        if taker.server == self._owned.server:
            raise InvalidArgumentError(f"taker: {move.taker} is the giver itself")
        first, end = wanted[0]
        end = min(end, first + piece_size(self._state.tables, int(owned.sum()), self._piece_bytes))
        with self._state.gate.closed(changes=True):
            giving = self._owned.begin_giving(
                taker=move.taker, server=taker.server, durable=taker.durable, buckets=(first, end)
            )
        try:
            self._commit()
        except MonolithError:
            with self._state.gate.closed(changes=True):
                self._owned.cancel_giving()
            raise
        self._start(giving, rebalance=move.rebalance)
        return giving

    def _asked(self, address: str) -> Buckets:
        link = self._connect(address)
        try:
            return Buckets.from_json(link.call(Call.BUCKETS, timeout=ASK_SECONDS).text)
        except (UnavailableError, DeadlineExceededError) as error:
            raise _TakerMissing(str(error)) from None
        finally:
            link.close()

    def _start(self, giving: Giving, *, rebalance: int) -> None:
        self._thread = threading.Thread(
            target=self._deliver, args=(giving, rebalance), name=f"monolith-move-{giving.number}", daemon=True
        )
        self._thread.start()

    def _outcome(self, giving: Giving, wait: float) -> Moved:
        with self._settled:
            self._settled.wait_for(lambda: giving.number in self._outcomes or self._stopping.is_set(), timeout=wait)
            if giving.number not in self._outcomes:
                return Moved(buckets=giving.buckets, pending=True)
            failure = self._outcomes[giving.number]
        if failure is not None:
            raise failure
        return Moved(buckets=giving.buckets)

    def _deliver(self, giving: Giving, rebalance: int) -> None:
        """Send a piece until it is known what became of it."""
        pause = FIRST_PAUSE
        packed: tuple[InstallBuckets, list[np.ndarray]] | None = None
        while not self._stopping.is_set():
            try:
                packed = packed or packed_transfer(
                    self._state.tables, giving, giver=self._owned.server, rebalance=rebalance
                )
                refusal = self._sent(*packed)
            except Exception as error:
                # Whatever it is: nobody else can find out what became of the piece.
                _logger.warning("buckets %s are on their way and wait for the taker: %s", giving.buckets, error)
                pause = min(2 * pause, LONGEST_PAUSE)
                self._stopping.wait(pause)
            else:
                self._settle(refusal)
                return

    def _sent(self, install: InstallBuckets, arrays: Sequence[np.ndarray]) -> Exception | None:
        """None: the taker owns the piece; an error: it does not and never will. Raises if that is not known."""
        giving = self._owned.giving
        assert giving is not None
        link = self._connect(giving.taker)
        try:
            # The link now knows which life of the taker it talks to: a frame that is delayed until the next one is refused.
            there = Buckets.from_json(link.call(Call.BUCKETS).text)
            if there.server != install.server and giving.durable:
                raise UnavailableError(f"the server at {giving.taker} is another one")
            if there.server != install.server:
                return InvalidArgumentError(f"taker: {giving.taker} has lost what it held; the buckets stay here")
            exchange = link.prepared(Call.INSTALL_BUCKETS, install.model_dump_json(), arrays)
            try:
                exchange.finish()
            except REFUSALS as error:
                # Only from the taker itself: what cannot be read of its answer may have been that it has the piece.
                if exchange.was_refused:
                    return error
                raise
            return None
        finally:
            link.close()

    def _settle(self, failure: Exception | None) -> None:
        giving = self._owned.giving
        assert giving is not None
        with self._state.gate.closed(changes=True):
            if failure is not None:
                self._owned.cancel_giving()
            else:
                drop_rows(self._state.tables, giving.buckets)
                self._owned.finish_giving()
        try:
            self._commit()
        except MonolithError as error:
            # The log still says that the piece is on its way: after a crash the taker is asked again, and answers the same.
            failure = failure or error
        with self._settled:
            self._outcomes[giving.number] = failure
            if len(self._outcomes) > REMEMBERED_OUTCOMES:
                self._outcomes.popitem(last=False)
            self._settled.notify_all()
