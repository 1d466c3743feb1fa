"""The calls of a parameter server: tables, dense parameters, buckets and coordination."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

import torch

from monolith.errors import OwnershipChangedError
from monolith.ps.protocol import messages
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.control_messages import InstallBuckets, MoveBuckets, OwnBuckets, RefuseTransfer, TakeBack
from monolith.ps.protocol.messages import HeldPosition
from monolith.ps.rebalance.moves import BucketMoves
from monolith.ps.rebalance.transfer import BucketInstalls, unpacked_dense
from monolith.ps.server.owned_buckets import OwnedBuckets
from monolith.ps.server.pushes import WorkerRecord
from monolith.ps.server.served_tables import require_count
from monolith.ps.server.state import ServerState
from monolith.transport.calls import Answer, Handlers, json_answer, message_of
from monolith.transport.frames import Frame

__all__ = ["BucketCalls", "CoordinationCalls", "DenseCalls", "TableCalls"]


class TableCalls:
    """The calls on tables, except the lookup, which writes its answer in place."""

    def __init__(self, state: ServerState, owned: OwnedBuckets) -> None:
        self._state, self._tables, self._pushes, self._owned = state, state.tables, state.pushes, owned

    def calls(self) -> Handlers:
        """Return the handler of each call."""
        return {
            Call.DECLARE_TABLES: self._declare_tables,
            Call.CONFIGS: self._configs,
            Call.APPLY_GRADIENTS: self._apply_gradients,
            Call.ASSIGN: self._assign,
            Call.ASSIGN_ADD: self._assign_add,
            Call.REINITIALIZE: self._reinitialize,
            Call.EVICT: self._evict,
            Call.ERASE: self._erase,
            Call.STATS: self._stats,
            Call.READ_ROWS: self._read_rows,
            Call.READ_ENTRIES: self._read_entries,
            Call.COUNT_SLOTS: self._count_slots,
        }

    def _declare_tables(self, frame: Frame) -> Answer:
        declare = message_of(messages.DeclareTables, frame)
        changes: list[str] = []
        with self._state.gate.changing():
            self._tables.declare(declare.tables, run=declare.run)
        # Checked after that: another worker may have created them meanwhile.
        if self._tables.differ(declare.tables):
            with self._state.gate.closed(changes=True):
                changes = self._tables.reconfigure(declare.tables, run=declare.run)
        return json_answer(changes=changes)

    def _read_rows(self, frame: Frame) -> Answer:
        read = message_of(messages.ReadRows, frame)
        self._owned.require_read(read.map)
        arrays = self._tables.rows(read.table, read.ranges)
        # Rows that were given away while they were read may have been removed.
        self._owned.require_read(read.map)
        return Answer(arrays=arrays)

    def _read_entries(self, frame: Frame) -> Answer:
        read = message_of(messages.ReadEntries, frame)
        self._owned.require_read(read.map)
        require_count(frame.arrays, 1)
        entries = self._tables.entries(read.table, frame.arrays[0])
        self._owned.require_read(read.map)
        arrays = (entries.found.to(torch.uint8), entries.values, entries.times, *entries.slots.values())
        return Answer(text=json.dumps({"slots": list(entries.slots)}), arrays=tuple(array.numpy() for array in arrays))

    def _count_slots(self, frame: Frame) -> Answer:
        return json_answer(slots=self._tables.slot_counts(message_of(messages.CountSlots, frame).table))

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

    def _erase(self, frame: Frame) -> Answer:
        write = message_of(messages.TableWrite, frame)

        def action(_: WorkerRecord[Answer]) -> Answer:
            self._owned.require(write.map)
            require_count(frame.arrays, 1)
            erased = self._tables.erase(write.table, frame.arrays[0])
            self._state.checkpoint = None
            return json_answer(erased=erased)

        return self._pushes.once(write.push, action)

    def _stats(self, frame: Frame) -> Answer:
        return json_answer(tables={name: asdict(stats) for name, stats in self._tables.stats().items()})


class DenseCalls:
    """The calls on dense parameters. Those that were moved away are refused before anything happens."""

    def __init__(self, state: ServerState, owned: OwnedBuckets) -> None:
        self._gate, self._dense, self._pushes, self._owned = state.gate, state.dense, state.pushes, owned

    def calls(self) -> Handlers:
        """Return the handler of each call."""
        return {
            Call.DECLARE_DENSE: self._declare_dense,
            Call.READ_DENSE: self._read_dense,
            Call.APPLY_DENSE: self._apply_dense,
            Call.ASSIGN_DENSE: self._assign_dense,
            Call.READ_DENSE_SETTINGS: self._read_dense_settings,
            Call.LOAD_DENSE: self._load_dense,
        }

    def _declare_dense(self, frame: Frame) -> Answer:
        declare = message_of(messages.DeclareDense, frame)
        with self._gate.changing():
            self._owned.require_dense(declare.names)
            settings = [declare.groups[number] for number in declare.group_of]
            created = self._dense.declare(
                declare.names, frame.arrays, settings, replace_other=declare.replace_other, run=declare.run
            )
            return json_answer(created=created)

    def _read_dense(self, frame: Frame) -> Answer:
        names = message_of(messages.ReadDense, frame).names
        self._owned.require_dense(names)
        try:
            return Answer(arrays=tuple(self._dense.read(names)))
        finally:
            # They may have been removed because they were moved away meanwhile.
            self._owned.require_dense(names)

    def _read_dense_settings(self, frame: Frame) -> Answer:
        names = message_of(messages.ReadDenseSettings, frame).names
        self._owned.require_dense(names)
        return Answer(text=self._dense.settings(names).model_dump_json())

    def _load_dense(self, frame: Frame) -> Answer:
        load = message_of(messages.LoadDense, frame)
        state = unpacked_dense(load.names, frame.arrays)

        def action(_: WorkerRecord[Answer]) -> Answer:
            self._owned.require_dense(load.names)
            self._dense.replace(state)
            return Answer()

        return self._pushes.once(load.push, action)

    def _apply_dense(self, frame: Frame) -> Answer:
        apply = message_of(messages.ApplyDense, frame)

        def action(worker: WorkerRecord[Answer]) -> Answer:
            names, position, epoch = (*apply.names, *apply.unchanged), apply.position, apply.push.epoch
            self._owned.require_dense(names)
            missing = names if position is None else worker.parameters.missing(position, epoch, names)
            optimizers = [apply.groups[number] for number in apply.group_of] or None
            self._dense.apply(apply.names, frame.arrays, optimizers, only=missing)
            if position is not None:
                worker.parameters.advance(HeldPosition.of(position, epoch), missing)
            return Answer()

        return self._pushes.once(apply.push, action)

    def _assign_dense(self, frame: Frame) -> Answer:
        assign = message_of(messages.AssignDense, frame)

        def action(_: WorkerRecord[Answer]) -> Answer:
            self._owned.require_dense(assign.names)
            self._dense.assign(assign.names, frame.arrays, add=assign.add)
            return Answer()

        return self._pushes.once(assign.push, action)


class BucketCalls:
    """The calls on buckets. `durable`: whether the server has a folder."""

    def __init__(
        self, state: ServerState, owned: OwnedBuckets, moves: BucketMoves, installs: BucketInstalls, *, durable: bool
    ) -> None:
        self._state, self._owned, self._durable = state, owned, durable
        self._moves, self._installs = moves, installs

    def calls(self) -> Handlers:
        """Return the handler of each call."""
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
        answer = self._owned.answer(durable=self._durable, dense=self._state.dense.sizes)
        return Answer(text=answer.model_dump_json())

    def _move(self, frame: Frame) -> Answer:
        return Answer(text=self._moves.move(message_of(MoveBuckets, frame)).model_dump_json())

    def _install(self, frame: Frame) -> Answer:
        installed = self._installs.install(message_of(InstallBuckets, frame), frame.arrays)
        return Answer(text=installed.model_dump_json())

    def _take_back(self, frame: Frame) -> Answer:
        return Answer(text=self._moves.take_back(message_of(TakeBack, frame)).model_dump_json())

    def _refuse(self, frame: Frame) -> Answer:
        return Answer(text=self._installs.refuse(message_of(RefuseTransfer, frame)).model_dump_json())


class CoordinationCalls:
    """The calls by which workers coordinate a run: members, barriers, keys, steps. None of them waits.

    Only the server that owns the first bucket answers for the members of a run. A server that has never owned a bucket also does,
    since workers meet before buckets are assigned. Keys belong to the server on which they were set.

    Args:
        state: has the members, and the positions from which the global step is derived.
        owned: whether this server owns the first bucket.
    """

    def __init__(self, state: ServerState, owned: OwnedBuckets) -> None:
        self._state, self._owned = state, owned
        self._common = state.coordination

    def calls(self) -> Handlers:
        """Return the handler of each call."""
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
            # Check again: if the bucket was moved meanwhile, its new owner may not know of this change.
            self._require_host()
            return found

        return answered

    def _require_host(self) -> None:
        if self._owned.version and not self._owned.owns_first:
            raise OwnershipChangedError("coordination: another server owns the first bucket now; call that one")

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
