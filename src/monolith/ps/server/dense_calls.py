"""Handlers that read and change dense parameters; those that another server has, or will, are refused before anything happens."""

from __future__ import annotations

from monolith.ps.protocol import messages
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.messages import HeldPosition
from monolith.ps.rebalance.dense_transfer import unpacked_dense
from monolith.ps.server.owned_buckets import OwnedBuckets
from monolith.ps.server.pushes import WorkerRecord
from monolith.ps.server.state import ServerState
from monolith.transport.calls import Answer, Handlers, json_answer, message_of
from monolith.transport.frames import Frame

__all__ = ["DenseCalls"]


class DenseCalls:
    """Declare, read, apply, assign, load."""

    def __init__(self, state: ServerState, owned: OwnedBuckets) -> None:
        self._gate, self._dense, self._pushes, self._owned = state.gate, state.dense, state.pushes, owned

    def calls(self) -> Handlers:
        """What is called for which number."""
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
            # Those that were given away while they were read may have been removed.
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
