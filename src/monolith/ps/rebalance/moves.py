"""The source's side of moving buckets or dense parameters to another server. No update is lost or applied twice.

The source gives up ownership of some buckets and makes that durable. Then it sends their rows until it knows the outcome. The
destination owns the buckets as soon as it has the rows, makes that durable, and answers. Then the source deletes the rows. In
between neither of the two accepts changes for these buckets. After a crash the source sends the same transfer again under the
same number, and the destination knows whether it has it. A transfer whose destination does not answer is taken back when the
destination has refused it, or when an operator declares the destination lost.
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
    InstallBuckets,
    MoveBuckets,
    Moved,
    OutgoingTransfer,
    Refused,
    RefuseTransfer,
    TakeBack,
    TakenBack,
)
from monolith.ps.rebalance.transfer import (
    REFUSALS,
    MoverLease,
    dense_chunk,
    drop_rows,
    packed_dense,
    packed_rows,
    transfer_size,
)
from monolith.ps.server.ledger_state import progress_text, put_progress, read_ledger
from monolith.ps.server.owned_buckets import OwnedBuckets
from monolith.ps.server.state import ServerState
from monolith.table.buckets import mask_of, ranges_of
from monolith.transport.link import Link

__all__ = ["ASK_SECONDS", "BucketMoves", "TransferDelivery", "keep_transfer"]

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two attempts to reach the destination."""
ASK_SECONDS = 2.0
"""How long a destination may take to answer a question that moves nothing."""
CLOSE_SECONDS = 2.0
"""How long the end of a server waits for a transfer that is being sent."""
REMEMBERED_OUTCOMES = 16
"""Outcomes of transfers that are kept. A client that waits for one asks at once."""

_logger = logging.getLogger(__name__)


class TransferDelivery:
    """Delivers the transfer that this server has durably given up. The arguments are those of `BucketMoves`."""

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
        # Held while the destination is called, so that ownership does not change before its answer is handled.
        self._asking = threading.Lock()
        self._settled = threading.Condition()
        self._outcomes: OrderedDict[int, Exception | None] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def start(self, giving: OutgoingTransfer, *, rebalance: int) -> None:
        """Send the transfer in a thread. `outcome` returns the result."""
        self._thread = threading.Thread(
            target=self._deliver, args=(giving, rebalance), name=f"monolith-move-{giving.number}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop sending. A transfer in transit is resumed when the server is started again."""
        self._stopping.set()
        with self._settled:
            self._settled.notify_all()

    def close(self) -> None:
        """Wait shortly for the transfer that is being sent. Called after `stop`, before the folder is closed."""
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def outcome(self, giving: OutgoingTransfer, wait: float) -> Moved:
        """Return the state of the transfer after at most `wait` seconds. Raises if it has stayed here."""
        with self._settled:
            self._settled.wait_for(lambda: giving.number in self._outcomes or self._stopping.is_set(), timeout=wait)
            if giving.number not in self._outcomes:
                return Moved(buckets=giving.buckets, dense=giving.dense, pending=True)
            failure = self._outcomes[giving.number]
        if failure is not None:
            raise failure
        return Moved(buckets=giving.buckets, dense=giving.dense)

    def take_back(self, giving: OutgoingTransfer, *, lost: bool, wait: float) -> TakenBack:
        """Own the transfer again if its destination says that it does not have it, or is `lost` and does not answer."""
        if not self._asking.acquire(timeout=wait):
            return TakenBack(found=True, pending=True)
        link = self._connect(giving.taker)
        try:
            if not self._is_current(giving):
                return TakenBack()
            try:
                has_answered = self._is_destination(link, giving, timeout=ASK_SECONDS)
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

    def _is_current(self, giving: OutgoingTransfer) -> bool:
        return self._owned.giving is not None and self._owned.giving.number == giving.number

    def _deliver(self, giving: OutgoingTransfer, rebalance: int) -> None:
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
                    # Retry after any error: only this thread can find out what became of the transfer.
                    _logger.warning("%s are in transit and wait for the destination: %s", giving, error)
            pause = min(2 * pause, LONGEST_PAUSE)
            self._stopping.wait(pause)

    def _packed(self, giving: OutgoingTransfer, rebalance: int) -> tuple[InstallBuckets, list[np.ndarray]]:
        if giving.buckets is None:
            return packed_dense(self._state.dense, giving, giver=self._owned.server, rebalance=rebalance)
        install, arrays = packed_rows(self._state.tables, giving, giver=self._owned.server, rebalance=rebalance)
        if giving.buckets[0] == 0:
            common = {"coordination": self._state.coordination.given(), "base_step": self._state.pushes.base_step}
            install = install.model_copy(update=common)
        return install, arrays

    def _forget(self, giving: OutgoingTransfer) -> None:
        if giving.buckets is None:
            self._state.dense.drop(giving.dense)
        else:
            drop_rows(self._state.tables, giving.buckets)

    def _sent(self, install: InstallBuckets, arrays: Sequence[np.ndarray]) -> Exception | None:
        """Send the transfer. Returns None if the destination owns it, an error if it never will. Raises if that is unknown."""
        giving = self._owned.giving
        assert giving is not None
        link = self._connect(giving.taker)
        try:
            if not self._is_destination(link, giving):
                return InvalidArgumentError(f"destination: {giving.taker} has lost its state; {giving} stay here")
            exchange = link.begin(Call.INSTALL_BUCKETS, install.model_dump_json(), arrays)
            try:
                exchange.finish()
            except REFUSALS as error:
                # Only if the destination itself refused: an answer that cannot be read may have been a success.
                if exchange.was_refused:
                    return error
                raise
            return None
        finally:
            link.close()

    def _has_arrived(self, link: Link, giving: OutgoingTransfer) -> bool:
        """Whether the destination has the transfer. If not, it will never accept it."""
        refuse = RefuseTransfer(giver=self._owned.server, number=giving.number, server=giving.server)
        return Refused.from_json(link.call(Call.REFUSE_TRANSFER, refuse.model_dump_json()).text).installed

    def _is_destination(self, link: Link, giving: OutgoingTransfer, *, timeout: float | None = None) -> bool:
        """Whether the destination answers. False: it answers, but has lost all it may have had."""
        # The link learns the incarnation of the destination, so that a frame that is delayed until the next one is refused.
        there = Buckets.from_json(link.call(Call.BUCKETS, timeout=timeout).text)
        if there.server != giving.server and giving.durable:
            raise UnavailableError(f"the server at {giving.taker} is another one")
        return there.server == giving.server

    def _settle(self, failure: Exception | None) -> None:
        giving = self._owned.giving
        assert giving is not None
        with self._state.gate.closed(changes=True):
            if failure is not None:
                keep_transfer(self._state, self._owned)
            else:
                self._forget(giving)
                self._owned.finish_giving()
        try:
            self._commit()
        except MonolithError as error:
            # The log still has the transfer in transit: after a crash the destination is asked again, with the same result.
            failure = failure or error
        with self._settled:
            self._outcomes[giving.number] = failure
            if len(self._outcomes) > REMEMBERED_OUTCOMES:
                self._outcomes.popitem(last=False)
            self._settled.notify_all()


def keep_transfer(state: ServerState, owned: OwnedBuckets) -> None:
    """Own the outgoing transfer again, with the positions that workers had in it. The gate must be closed."""
    giving = owned.giving
    assert giving is not None
    state.dense.set_declared(giving.dense, declared=True)
    # Pushes that arrived meanwhile were not for these buckets.
    mask = None if giving.buckets is None else mask_of([giving.buckets])
    positions = read_ledger(giving.positions, f"the positions of {giving}")
    put_progress(state.pushes, positions, buckets=mask, names=giving.dense)
    owned.cancel_giving()


TRANSFER_BYTES = 2**23
"""Rows of one transfer, which takes a few hundredths of a second."""


class _DestinationMissing(Exception):  # noqa: N818 - becomes a field of the answer
    """The destination does not answer. Not an error of ours: the client would think that the source does not answer."""


class BucketMoves:
    """The calls of a server as the source of transfers.

    Args:
        state: what the server holds.
        owned: the buckets that it owns.
        lease: which client may move buckets.
        commit: makes everything durable, if the server has a folder.
        connect: returns a link to another server, given its address.
    """

    def __init__(
        self,
        state: ServerState,
        owned: OwnedBuckets,
        lease: MoverLease,
        *,
        commit: Callable[[], object],
        connect: Callable[[str], Link],
        transfer_bytes: int = TRANSFER_BYTES,
    ) -> None:
        self._state, self._owned, self._lease = state, owned, lease
        self._commit, self._connect = commit, connect
        self._delivery = TransferDelivery(state, owned, commit=commit, connect=connect)
        self._transfer_bytes = transfer_bytes
        self._lock = threading.Lock()

    def resume(self) -> None:
        """Resume a transfer that was in transit when the server died. Called after the server has restored itself."""
        if self._owned.giving is not None:
            self._delivery.start(self._owned.giving, rebalance=0)

    def stop(self) -> None:
        """Stop sending. A transfer in transit is resumed when the server is started again."""
        self._delivery.stop()

    def close(self) -> None:
        """Wait shortly for the transfer that is being sent. Called after `stop`, before the folder is closed."""
        self._delivery.close()

    def move(self, move: MoveBuckets) -> Moved:
        """Move a first part of what `move` names, as far as it is owned here."""
        with self._lock:
            if move.buckets is None and not move.dense:
                self._lease.end(move.rebalance)
                return Moved()
            self._lease.require(move.rebalance)
            try:
                giving = self._given(move)
            except _DestinationMissing as error:
                return Moved(missing=str(error))
        return Moved() if giving is None else self._delivery.outcome(giving, move.wait)

    def take_back(self, back: TakeBack) -> TakenBack:
        """Own the transfer again that is in transit, unless its destination has it, or may have it and is not said to be lost."""
        with self._lock:
            self._lease.require(back.rebalance)
            giving = self._owned.giving
            if giving is None:
                return TakenBack()
            if back.lost not in (None, giving.taker):
                raise InvalidArgumentError(
                    f"lost: {giving} are in transit to {giving.taker}, not to {back.lost}; declare that one lost instead"
                )
            return self._delivery.take_back(giving, lost=back.lost is not None, wait=back.wait)

    def _given(self, move: MoveBuckets) -> OutgoingTransfer | None:
        """Return the transfer in transit, or the next one. None if there is none."""
        if self._owned.giving is None:
            return self._begin(move)
        self._require_same(self._owned.giving, move)
        return self._owned.giving

    def _require_same(self, giving: OutgoingTransfer, move: MoveBuckets) -> None:
        if giving.taker != move.taker:
            if self._asked(move.taker).server != giving.server:
                raise InvalidArgumentError(
                    f"move: {giving} are in transit to {giving.taker}, and stay so until it answers; start it again"
                )
            with self._state.gate.closed(changes=True):
                self._owned.redirect(move.taker)

    def _begin(self, move: MoveBuckets) -> OutgoingTransfer | None:
        buckets = None if move.buckets is None else self._next_buckets(move.buckets)
        dense = () if buckets else dense_chunk(self._state.dense.sizes(), move.dense, self._transfer_bytes)
        if buckets is None and not dense:
            return None
        # Asked before anything changes: a destination that is not there costs nothing.
        destination = self._asked(move.taker)
        if destination.server == self._owned.server:
            raise InvalidArgumentError(f"destination: {move.taker} is the source itself")
        with self._state.gate.closed(changes=True):
            mask = None if buckets is None else mask_of([buckets])
            giving = self._owned.begin_giving(
                destination=move.taker,
                server=destination.server,
                durable=destination.durable,
                buckets=buckets,
                dense=dense,
                positions=progress_text(self._state.pushes, buckets=mask, names=dense),
            )
            self._state.dense.set_declared(dense, declared=False)
        try:
            self._commit()
        except MonolithError:
            with self._state.gate.closed(changes=True):
                keep_transfer(self._state, self._owned)
            raise
        self._delivery.start(giving, rebalance=move.rebalance)
        return giving

    def _next_buckets(self, buckets: tuple[int, int]) -> tuple[int, int] | None:
        owned = mask_of(self._owned.ranges)
        wanted = ranges_of(owned & mask_of([buckets]))
        if not wanted:
            return None
        first, end = wanted[0]
        return first, min(end, first + transfer_size(self._state.tables, int(owned.sum()), self._transfer_bytes))

    def _asked(self, address: str) -> Buckets:
        link = self._connect(address)
        try:
            return Buckets.from_json(link.call(Call.BUCKETS, timeout=ASK_SECONDS).text)
        except (UnavailableError, DeadlineExceededError) as error:
            raise _DestinationMissing(str(error)) from None
        finally:
            link.close()
