"""Handlers by which workers find out about each other, and how far they all are."""

from __future__ import annotations

from collections.abc import Callable

from monolith.errors import OwnershipChangedError
from monolith.ps.protocol import coordination_messages as messages
from monolith.ps.protocol.calls import Call
from monolith.ps.server.owned_buckets import OwnedBuckets
from monolith.ps.server.state import ServerState
from monolith.transport.calls import Answer, Handlers, json_answer, message_of
from monolith.transport.frames import Frame

__all__ = ["CoordinationCalls"]


class CoordinationCalls:
    """Greet, hold, share keys, count steps. None of them waits.

    Only the server that owns the first bucket answers for the members of a run; one that has never owned any bucket does so
    too, since workers meet before they have said who owns what. Keys belong to the server that they were set on.

    Args:
        state: has what is kept of the members, and the positions that the global step is derived from.
        owned: says whether this server owns the first bucket.
    """

    def __init__(self, state: ServerState, owned: OwnedBuckets) -> None:
        self._state, self._owned = state, owned
        self._common = state.coordination

    def calls(self) -> Handlers:
        """What is called for which number."""
        members: Handlers = {
            Call.GREET: self._greet,
            Call.MEMBERS: self._members,
            Call.PLACE_BARRIER: self._place,
            Call.REMOVE_BARRIER: self._remove,
            Call.HOLD: self._hold,
            Call.END_RUN: self._end_run,
            Call.GLOBAL_STEP: self._global_step,
        }
        others: Handlers = {
            Call.READ_KEYS: self._read_keys,
            Call.SET_KEY: self._set_key,
            Call.COUNT_FROM: self._count_from,
        }
        return {**{call: self._as_host(answer) for call, answer in members.items()}, **others}

    def _as_host(self, answer: Callable[[Frame], Answer]) -> Callable[[Frame], Answer]:
        def answered(frame: Frame) -> Answer:
            self._require_host()
            found = answer(frame)
            # Once more: if the bucket has moved meanwhile, its new owner may not have heard of this.
            self._require_host()
            return found

        return answered

    def _require_host(self) -> None:
        if self._owned.version and not self._owned.owns_first:
            raise OwnershipChangedError("coordination: another server owns the first bucket now; ask that one")

    def _greet(self, frame: Frame) -> Answer:
        return Answer(text=self._common.greet(message_of(messages.Greet, frame)).model_dump_json())

    def _members(self, frame: Frame) -> Answer:
        return Answer(text=self._common.members().model_dump_json())

    def _place(self, frame: Frame) -> Answer:
        place = message_of(messages.PlaceBarrier, frame)
        placed, barrier = self._common.place(place.who, place.action, place.token)
        return json_answer(placed=placed, barrier=barrier.model_dump())

    def _remove(self, frame: Frame) -> Answer:
        self._common.remove(message_of(messages.Greet, frame))
        return Answer()

    def _end_run(self, frame: Frame) -> Answer:
        self._common.end_run(message_of(messages.Greet, frame))
        return Answer()

    def _hold(self, frame: Frame) -> Answer:
        hold = message_of(messages.Hold, frame)
        return json_answer(held=self._common.hold(hold.who, hold.number))

    def _read_keys(self, frame: Frame) -> Answer:
        return json_answer(values=self._common.read_keys(message_of(messages.ReadKeys, frame).prefix))

    def _set_key(self, frame: Frame) -> Answer:
        wanted = message_of(messages.SetKey, frame)
        return json_answer(value=self._common.set_key(wanted.key, wanted.value))

    def _count_from(self, frame: Frame) -> Answer:
        step = message_of(messages.CountFrom, frame).step
        with self._state.gate.changing():
            if self._state.pushes.base_step is None:
                self._state.pushes.count_from(step)
        return Answer()

    def _global_step(self, frame: Frame) -> Answer:
        return json_answer(step=self._state.pushes.step())
