"""Calls by which workers find out about each other."""

from __future__ import annotations

from monolith.ps import coordination_messages as messages
from monolith.ps.server.coordination import Coordination
from monolith.transport.answers import Answer, Calls, json_answer, message_of
from monolith.transport.calls import Call
from monolith.transport.frames import Frame

__all__ = ["CoordinationCalls"]


class CoordinationCalls:
    """Greet, report, hold, share keys. None of them waits."""

    def __init__(self, coordination: Coordination) -> None:
        self._common = coordination

    def calls(self) -> Calls:
        """What is called for which number."""
        return {
            Call.GREET: self._greet,
            Call.MEMBERS: self._members,
            Call.REPORT: self._report,
            Call.PLACE_BARRIER: self._place,
            Call.REMOVE_BARRIER: self._remove,
            Call.HOLD: self._hold,
            Call.READ_KEYS: self._read_keys,
            Call.SET_KEY: self._set_key,
        }

    def _greet(self, frame: Frame) -> Answer:
        self._common.greet(message_of(messages.Greet, frame))
        return Answer()

    def _members(self, frame: Frame) -> Answer:
        return Answer(text=self._common.members().model_dump_json())

    def _report(self, frame: Frame) -> Answer:
        report = message_of(messages.Report, frame)
        return Answer(text=self._common.report(report.who, made=report.made, seen=report.seen).model_dump_json())

    def _place(self, frame: Frame) -> Answer:
        place = message_of(messages.PlaceBarrier, frame)
        placed, barrier = self._common.place(place.who, place.action)
        return json_answer(placed=placed, barrier=barrier.model_dump())

    def _remove(self, frame: Frame) -> Answer:
        self._common.remove(message_of(messages.Greet, frame))
        return Answer()

    def _hold(self, frame: Frame) -> Answer:
        hold = message_of(messages.Hold, frame)
        return json_answer(held=self._common.hold(hold.who, hold.number))

    def _read_keys(self, frame: Frame) -> Answer:
        return json_answer(values=self._common.read_keys(message_of(messages.ReadKeys, frame).prefix))

    def _set_key(self, frame: Frame) -> Answer:
        wanted = message_of(messages.SetKey, frame)
        done, value = self._common.set_key(wanted.key, wanted.value, wanted.expected)
        return json_answer(set=done, value=value)
