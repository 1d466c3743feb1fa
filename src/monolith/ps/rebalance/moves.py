"""Moving buckets, or dense parameters, from one running server to another, so that no update is lost or doubled whichever dies.

The giver stops to own a piece and makes that durable, then sends its rows until it knows what became of them. The taker
owns the piece from the moment it has the rows, makes that durable, and answers. Then the giver forgets the rows. In between
neither of the two takes changes for the piece. After a crash the giver sends the same transfer again, under the same number:
the taker knows whether it has it. A piece whose taker does not come back is taken back when the taker has refused it, or when
somebody says that it is lost.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from monolith.errors import DeadlineExceededError, InvalidArgumentError, MonolithError, UnavailableError
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.control_messages import (
    Buckets,
    Giving,
    InstallBuckets,
    MoveBuckets,
    Moved,
    Refused,
    RefuseTransfer,
    TakeBack,
    TakenBack,
)
from monolith.ps.protocol.ownership import mask_of, ranges_of
from monolith.ps.rebalance.transfer import (
    REFUSALS,
    MoverLease,
    dense_piece,
    drop_rows,
    packed_dense,
    packed_rows,
    piece_size,
)
from monolith.ps.server.ledger_state import progress_text, put_progress, read_ledger
from monolith.ps.server.owned_buckets import OwnedBuckets
from monolith.ps.server.state import ServerState
from monolith.transport.link import Link

__all__ = ["ASK_SECONDS", "BucketMoves", "TransferDelivery", "keep_piece"]

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two attempts to reach the taker."""
ASK_SECONDS = 2.0
"""How long a taker may take to answer a question that moves nothing."""
CLOSE_SECONDS = 2.0
"""How long the end of a server waits for a piece that is being sent."""
REMEMBERED_OUTCOMES = 16
"""Of pieces: whoever waits for one asks for it at once."""

_logger = logging.getLogger(__name__)


class TransferDelivery:
    """The piece that a server is giving away, from the moment it is durable that it does. Arguments as of `BucketMoves`."""

    def __init__(
        self,
        state: ServerState,
        owned: OwnedBuckets,
        *,
        commit: Callable[[], object],
        connect: Callable[[str], Link],
    ) -> None:
        self._state, self._owned = state, owned
        self._commit, self._connect = commit, connect
        # Held while the taker is asked or told something: what the answer means must not change meanwhile.
        self._asking = threading.Lock()
        self._settled = threading.Condition()
        self._outcomes: OrderedDict[int, Exception | None] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def start(self, giving: Giving, *, rebalance: int) -> None:
        """Send the piece from now on; what has become of it is asked for by `outcome`."""
        self._thread = threading.Thread(
            target=self._deliver, args=(giving, rebalance), name=f"monolith-move-{giving.number}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Send nothing any more; what is on its way is asked for again when the server is started again."""
        self._stopping.set()
        with self._settled:
            self._settled.notify_all()

    def close(self) -> None:
        """Wait a moment for what is being sent; after `stop`, before the folder is closed."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def outcome(self, giving: Giving, wait: float) -> Moved:
        """What has become of the piece after at most `wait` seconds; raises if it has stayed here."""
        with self._settled:
            self._settled.wait_for(lambda: giving.number in self._outcomes or self._stopping.is_set(), timeout=wait)
            if giving.number not in self._outcomes:
                return Moved(buckets=giving.buckets, dense=giving.dense, pending=True)
            failure = self._outcomes[giving.number]
        if failure is not None:
            raise failure
        return Moved(buckets=giving.buckets, dense=giving.dense)

    def take_back(self, giving: Giving, *, lost: bool, wait: float) -> TakenBack:
        """Own the piece again if its taker has not got it, and says so, or is `lost` and does not answer."""
        if not self._asking.acquire(timeout=wait):
            return TakenBack(found=True, pending=True)
        link = self._connect(giving.taker)
        try:
            if not self._is_current(giving):
                return TakenBack()
            try:
                has_answered = self._is_taker(link, giving, timeout=ASK_SECONDS)
            except (UnavailableError, DeadlineExceededError) as error:
                if not lost:
                    return TakenBack(found=True, missing=str(error))
                has_answered = False
            arrived = has_answered and self._has_arrived(link, giving)
            self._settle(None if arrived else InvalidArgumentError(f"move: {giving} were taken back"))
            return TakenBack(found=True, arrived=arrived)
        finally:
            link.close()
            self._asking.release()

    def _is_current(self, giving: Giving) -> bool:
        return self._owned.giving is not None and self._owned.giving.number == giving.number

    def _deliver(self, giving: Giving, rebalance: int) -> None:
        pause = FIRST_PAUSE
        packed: tuple[InstallBuckets, list[np.ndarray]] | None = None
        while not self._stopping.is_set():
            with self._asking:
                if not self._is_current(giving):
                    return
                try:
                    packed = packed or self._packed(giving, rebalance)
                    self._settle(self._sent(*packed))
                    return
                except Exception as error:
                    # Whatever it is: nobody else can find out what became of the piece.
                    _logger.warning("%s are on their way and wait for the taker: %s", giving, error)
            pause = min(2 * pause, LONGEST_PAUSE)
            self._stopping.wait(pause)

    def _packed(self, giving: Giving, rebalance: int) -> tuple[InstallBuckets, list[np.ndarray]]:
        if giving.buckets is None:
            return packed_dense(self._state.dense, giving, giver=self._owned.server, rebalance=rebalance)
        install, arrays = packed_rows(self._state.tables, giving, giver=self._owned.server, rebalance=rebalance)
        if giving.buckets[0] == 0:
            common = {"coordination": self._state.coordination.given(), "base_step": self._state.pushes.base_step}
            install = install.model_copy(update=common)
        return install, arrays

    def _forget(self, giving: Giving) -> None:
        if giving.buckets is None:
            self._state.dense.drop(giving.dense)
        else:
            drop_rows(self._state.tables, giving.buckets)

    def _sent(self, install: InstallBuckets, arrays: Sequence[np.ndarray]) -> Exception | None:
        """None: the taker owns the piece; an error: it does not and never will. Raises if that is not known."""
        giving = self._owned.giving
        assert giving is not None
        link = self._connect(giving.taker)
        try:
            if not self._is_taker(link, giving):
                return InvalidArgumentError(f"taker: {giving.taker} has lost what it held; {giving} stay here")
            exchange = link.begin(Call.INSTALL_BUCKETS, install.model_dump_json(), arrays)
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

    def _has_arrived(self, link: Link, giving: Giving) -> bool:
        """Whether the taker has the piece; if not, it never will."""
        refuse = RefuseTransfer(giver=self._owned.server, number=giving.number, server=giving.server)
        return Refused.from_json(link.call(Call.REFUSE_TRANSFER, refuse.model_dump_json()).text).installed

    def _is_taker(self, link: Link, giving: Giving, *, timeout: float | None = None) -> bool:
        """Whether the taker of the piece answers; False: in its place one that has lost all it may have had."""
        # The link then knows which life of the taker it talks to: a frame that is delayed until the next one is refused.
        there = Buckets.from_json(link.call(Call.BUCKETS, timeout=timeout).text)
        if there.server != giving.server and giving.durable:
            raise UnavailableError(f"the server at {giving.taker} is another one")
        return there.server == giving.server

    def _settle(self, failure: Exception | None) -> None:
        giving = self._owned.giving
        assert giving is not None
        with self._state.gate.closed(changes=True):
            if failure is not None:
                keep_piece(self._state, self._owned)
            else:
                self._forget(giving)
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


def keep_piece(state: ServerState, owned: OwnedBuckets) -> None:
    """Own again what was being given away, with the positions that workers had in it then. The gate must be closed."""
    giving = owned.giving
    assert giving is not None
    state.dense.set_declared(giving.dense, declared=True)
    # Pushes that arrived meanwhile were not for these buckets.
    mask = None if giving.buckets is None else mask_of([giving.buckets])
    positions = read_ledger(giving.positions, f"the positions of {giving}")
    put_progress(state.pushes, positions, buckets=mask, names=giving.dense)
    owned.cancel_giving()


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
