"""Handlers that read and change tables."""

from __future__ import annotations

from dataclasses import asdict

from monolith.ps.protocol import messages
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.messages import HeldPosition
from monolith.ps.server.owned_buckets import OwnedBuckets
from monolith.ps.server.pushes import WorkerRecord
from monolith.ps.server.served_tables import require_count
from monolith.ps.server.state import ServerState
from monolith.transport.calls import Answer, Handlers, json_answer, message_of
from monolith.transport.frames import Frame

__all__ = ["TableCalls"]


class TableCalls:
    """All but the lookup, whose answer the dispatcher lets the tables write in place."""

    def __init__(self, state: ServerState, owned: OwnedBuckets) -> None:
        self._state, self._tables, self._pushes, self._owned = state, state.tables, state.pushes, owned

    def calls(self) -> Handlers:
        """What is called for which number."""
        return {
            Call.DECLARE_TABLES: self._declare_tables,
            Call.CONFIGS: self._configs,
            Call.APPLY_GRADIENTS: self._apply_gradients,
            Call.ASSIGN: self._assign,
            Call.ASSIGN_ADD: self._assign_add,
            Call.REINITIALIZE: self._reinitialize,
            Call.EVICT: self._evict,
            Call.STATS: self._stats,
        }

    def _declare_tables(self, frame: Frame) -> Answer:
        declare = message_of(messages.DeclareTables, frame)
        changes: list[str] = []
        with self._state.gate.changing():
            self._tables.declare(declare.tables, run=declare.run)
        # Only now: another worker may have made them meanwhile.
        if self._tables.differ(declare.tables):
            with self._state.gate.closed(changes=True):
                changes = self._tables.reconfigure(declare.tables, run=declare.run)
        return json_answer(changes=changes)

    def _configs(self, frame: Frame) -> Answer:
        return Answer(text=messages.DeclareTables(tables=tuple(self._tables.declared())).model_dump_json())

    def _apply_gradients(self, frame: Frame) -> Answer:
        apply = message_of(messages.Apply, frame)

        def action(worker: WorkerRecord[Answer]) -> Answer:
            self._owned.require(apply.map)
            position, epoch = apply.position, apply.push.epoch
            had = None if position is None else worker.buckets.had(position, epoch)
            self._tables.apply(apply, frame.arrays, leave_out=had)
            if position is not None:
                known = self._owned.known_at(apply.map)
                changed = known if had is None else ~had if known is None else known & ~had
                worker.buckets.advance(HeldPosition.of(position, epoch), changed)
            self._state.step, self._state.checkpoint = max(self._state.step, apply.step), None
            return Answer()

        return self._pushes.once(apply.push, action)

    def _assign(self, frame: Frame) -> Answer:
        return self._write(frame, add=False)

    def _assign_add(self, frame: Frame) -> Answer:
        return self._write(frame, add=True)

    def _write(self, frame: Frame, *, add: bool) -> Answer:
        write = message_of(messages.TableWrite, frame)

        def action(_: WorkerRecord[Answer]) -> Answer:
            self._owned.require(write.map)
            require_count(frame.arrays, 2)
            ids, values = frame.arrays
            table = self._tables.writable(write.table, ids)
            (table.assign_add if add else table.assign)(ids, values, event_time=write.event_time)
            return Answer()

        return self._pushes.once(write.push, action)

    def _reinitialize(self, frame: Frame) -> Answer:
        write = message_of(messages.TableWrite, frame)

        def action(_: WorkerRecord[Answer]) -> Answer:
            self._owned.require(write.map)
            require_count(frame.arrays, 1)
            (ids,) = frame.arrays
            existed = self._tables.writable(write.table, ids).reinitialize(ids, event_time=write.event_time)
            return Answer(arrays=(existed.numpy(),))

        return self._pushes.once(write.push, action)

    def _evict(self, frame: Frame) -> Answer:
        evict = message_of(messages.Evict, frame)
        return self._pushes.once(evict.push, lambda _: json_answer(evicted=self._tables.evict(evict.now)))

    def _stats(self, frame: Frame) -> Answer:
        return json_answer(tables={name: asdict(stats) for name, stats in self._tables.stats().items()})
