"""Moving buckets from one running server to another, so that no update is lost or doubled whichever of them dies.

The giver stops to own a piece and makes that durable, then sends its rows until it knows what became of them. The taker
owns the piece from the moment it has the rows, makes that durable, and answers. Then the giver forgets the rows. In between
neither of the two takes changes for the piece. After a crash the giver sends the same transfer again, under the same number:
the taker knows whether it has it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from monolith.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidArgumentError,
    MemoryLimitError,
    MonolithError,
    ProtocolError,
    UnavailableError,
)
from monolith.ps.bucket_messages import Buckets, Giving, InstallBuckets, Installed, MoveBuckets, Moved
from monolith.ps.bucket_transfer import drop_rows, packed_transfer, piece_size, put_rows, require_rows
from monolith.ps.link import Link
from monolith.ps.messages import Call
from monolith.ps.owned_buckets import OwnedBuckets
from monolith.ps.ownership import mask_of, ranges_of
from monolith.ps.server_state import ServerState

__all__ = ["BucketMoves"]

PIECE_BYTES = 2**23
"""Rows of one piece: about what is moved in a few hundredths of a second."""
LEASE = 60.0
"""Seconds after which somebody else may move buckets, if whoever did has not been heard of."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two attempts to reach the taker."""
ASK_SECONDS = 2.0
"""How long a taker may take to answer before anything is given to it."""
CLOSE_SECONDS = 2.0
"""How long the end of a server waits for a piece that is being sent."""
REMEMBERED_MOVERS = 64
"""Whoever has done with moving, and is not listened to any more."""
REFUSALS = (ConfigError, InvalidArgumentError, MemoryLimitError, ProtocolError)
"""Errors of a taker that has not installed a transfer and never will."""

_logger = logging.getLogger(__name__)


class _TakerMissing(Exception):  # noqa: N818 - it is told, not raised, to whoever asks
    """The taker cannot be asked. Not an error of ours: whoever asks would think that the giver cannot be reached."""


class BucketMoves:
    """The moves of one server, as giver and as taker.

    Args:
        state: what the server holds.
        owned: which buckets of it.
        commit: makes everything durable, if the server keeps anything.
        connect: a link to another server, by its address.
    """

    def __init__(
        self,
        state: ServerState,
        owned: OwnedBuckets,
        *,
        commit: Callable[[], object],
        connect: Callable[[str], Link],
        piece_bytes: int = PIECE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state, self._owned = state, owned
        self._commit, self._connect = commit, connect
        self._piece_bytes = piece_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._settled = threading.Condition()
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._mover, self._mover_until = 0, 0.0
        self._ended: deque[int] = deque(maxlen=REMEMBERED_MOVERS)

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
                self._end(move.rebalance)
                return Moved()
            self._require_mover(move.rebalance)
            try:
                giving = self._given(move, move.buckets)
            except _TakerMissing as error:
                return Moved(missing=str(error))
        return Moved() if giving is None else self._outcome(giving, move.wait)

    def install(self, install: InstallBuckets, arrays: Sequence[np.ndarray]) -> Installed:
        """Own the buckets of a transfer from now on, unless that has happened before."""
        again = self._install(install, arrays)
        # Also if it had been done before: the answer that got lost may have been that it could not be made durable.
        self._commit()
        return Installed(again=again)

    def _install(self, install: InstallBuckets, arrays: Sequence[np.ndarray]) -> bool:
        with self._state.gate.closed(changes=True):
            try:
                if self._owned.has_installed(install):
                    return True
                if install.rebalance:
                    self._require_mover(install.rebalance)
                require_rows(self._state.tables, install, arrays)
                put_rows(self._state.tables, install, arrays)
            except (*REFUSALS, MemoryError):
                self._owned.refuse(install)
                raise
            self._owned.install(install)
            self._state.initialised = True
            return False

    def _end(self, rebalance: int) -> None:
        self._ended.append(rebalance)
        if rebalance == self._mover:
            self._mover_until = 0.0

    def _require_mover(self, rebalance: int) -> None:
        now = self._clock()
        if rebalance in self._ended:
            # A message that was delayed: what it asks for may have been undone since.
            raise InvalidArgumentError("rebalance: it has ended")
        if rebalance != self._mover and now < self._mover_until:
            raise InvalidArgumentError(
                "rebalance: somebody else is moving buckets of this server; let that end, or wait a minute if it has died"
            )
        self._mover, self._mover_until = rebalance, now + LEASE

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
        self._failure = None
        self._thread = threading.Thread(
            target=self._deliver, args=(giving, rebalance), name=f"monolith-move-{giving.number}", daemon=True
        )
        self._thread.start()

    def _outcome(self, giving: Giving, wait: float) -> Moved:
        with self._settled:
            self._settled.wait_for(lambda: not self._is_under_way(giving) or self._stopping.is_set(), timeout=wait)
            if self._is_under_way(giving):
                return Moved(buckets=giving.buckets, pending=True)
            if self._failure is not None:
                raise self._failure
        return Moved(buckets=giving.buckets)

    def _is_under_way(self, giving: Giving) -> bool:
        now = self._owned.giving
        return now is not None and now.number == giving.number

    def _deliver(self, giving: Giving, rebalance: int) -> None:
        """Send a piece until it is known what became of it."""
        pause = FIRST_PAUSE
        packed: tuple[InstallBuckets, list[np.ndarray]] | None = None
        while not self._stopping.is_set():
            try:
                packed = packed or packed_transfer(
                    self._state.tables, giving, giver=self._owned.server, rebalance=rebalance
                )
                self._send(*packed)
            except REFUSALS as refusal:
                self._settle(keep=True, failure=refusal)
                return
            except Exception as error:
                # Whatever it is: nobody else can find out what became of the piece.
                _logger.warning("buckets %s are on their way and wait for the taker: %s", giving.buckets, error)
                pause = min(2 * pause, LONGEST_PAUSE)
                self._stopping.wait(pause)
            else:
                self._settle(keep=False)
                return

    def _send(self, install: InstallBuckets, arrays: Sequence[np.ndarray]) -> None:
        giving = self._owned.giving
        assert giving is not None
        link = self._connect(giving.taker)
        try:
            # The link now knows which life of the taker it talks to: a frame that is delayed until the next one is refused.
            there = Buckets.from_json(link.call(Call.BUCKETS).text)
            if there.server != install.server and not giving.durable:
                raise InvalidArgumentError(
                    f"taker: the server at {giving.taker} has lost what it held; the buckets stay here"
                )
            link.call(Call.INSTALL_BUCKETS, install.model_dump_json(), arrays)
        finally:
            link.close()

    def _settle(self, *, keep: bool, failure: Exception | None = None) -> None:
        giving = self._owned.giving
        assert giving is not None
        with self._state.gate.closed(changes=True):
            if keep:
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
            self._failure = failure
            self._settled.notify_all()
