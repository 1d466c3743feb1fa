"""Calls that say, and change, which buckets a server owns."""

from __future__ import annotations

from monolith.ps.protocol.bucket_messages import InstallBuckets, MoveBuckets, OwnBuckets, RefuseTransfer, TakeBack
from monolith.ps.protocol.calls import Call
from monolith.ps.rebalance.installs import BucketInstalls
from monolith.ps.rebalance.moves import BucketMoves
from monolith.ps.server.owned_buckets import OwnedBuckets
from monolith.ps.server.state import ServerState
from monolith.transport.calls import Answer, Handlers, message_of
from monolith.transport.frames import Frame

__all__ = ["BucketCalls"]


class BucketCalls:
    """Own, ask, move, install, take back, refuse. `durable`: whether what the server holds survives its process."""

    def __init__(
        self, state: ServerState, owned: OwnedBuckets, moves: BucketMoves, installs: BucketInstalls, *, durable: bool
    ) -> None:
        self._state, self._owned, self._durable = state, owned, durable
        self._moves, self._installs = moves, installs

    def calls(self) -> Handlers:
        """What is called for which number."""
        return {
            Call.OWN_BUCKETS: self._own,
            Call.BUCKETS: self._buckets,
            Call.MOVE_BUCKETS: self._move,
            Call.INSTALL_BUCKETS: self._install,
            Call.TAKE_BACK: self._take_back,
            Call.REFUSE_TRANSFER: self._refuse,
        }

    def _own(self, frame: Frame) -> Answer:
        own = message_of(OwnBuckets, frame)
        with self._state.gate.closed(changes=True):
            self._owned.claim(own.ranges)
            self._owned.forget_dense(own.lost_dense)
        return self._buckets(frame)

    def _buckets(self, frame: Frame) -> Answer:
        told = self._owned.told(durable=self._durable, dense=self._state.dense.sizes())
        return Answer(text=told.model_dump_json())

    def _move(self, frame: Frame) -> Answer:
        return Answer(text=self._moves.move(message_of(MoveBuckets, frame)).model_dump_json())

    def _install(self, frame: Frame) -> Answer:
        installed = self._installs.install(message_of(InstallBuckets, frame), frame.arrays)
        return Answer(text=installed.model_dump_json())

    def _take_back(self, frame: Frame) -> Answer:
        return Answer(text=self._moves.take_back(message_of(TakeBack, frame)).model_dump_json())

    def _refuse(self, frame: Frame) -> Answer:
        return Answer(text=self._installs.refuse(message_of(RefuseTransfer, frame)).model_dump_json())
