"""The ledger of pushes as text, for the log and checkpoints of a server, and back."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import numpy as np
from pydantic import Field

from monolith import errors
from monolith.config import Config
from monolith.errors import ConfigError, CorruptFileError
from monolith.ps.messages import HeldPosition
from monolith.ps.server.pushes import PushLedger, WorkerRecord
from monolith.transport.answers import Answer
from monolith.transport.remote_errors import RemoteError, described

__all__ = [
    "KnownWorker",
    "dense_positions_text",
    "ledger_text",
    "load_ledger",
    "read_ledger",
    "restore_positions",
    "take_dense_positions",
]

_DONE = Answer()


class _Outcome(Config):
    """What a push led to, if it was not simply done."""

    text: str = "{}"
    arrays: tuple[tuple[int, ...], ...] = ()
    """int32, as `reinitialize` answers; no other call that changes something answers arrays."""
    failure: RemoteError | None = None


class KnownWorker(Config):
    """What a ledger knows of one worker."""

    epoch: int
    nonce: int
    highest: int
    numbers: tuple[int, ...]
    outcomes: dict[int, _Outcome] = Field(default_factory=dict)
    positions: dict[str, HeldPosition] = Field(default_factory=dict)


class _Ledger(Config):
    workers: dict[str, KnownWorker]


def ledger_text(ledger: PushLedger[Answer]) -> str:
    """Everything `ledger` knows, as JSON; while the gate is closed.

    Example:
        >>> from monolith.ps.messages import Join
        >>> ledger = PushLedger(skipped=Answer())
        >>> _ = ledger.join(Join(worker="w0", epoch=3, nonce=1))
        >>> copy = PushLedger(skipped=Answer())
        >>> load_ledger(copy, ledger_text(ledger))
        >>> copy.records()["w0"].epoch
        3
    """
    return json.dumps({"workers": {name: _described(record) for name, record in list(ledger.records().items())}})


def load_ledger(ledger: PushLedger[Answer], text: str, where: str = "ledger") -> None:
    """Let `ledger` know what `ledger_text` wrote, and nothing else."""
    ledger.replace({name: _record(worker) for name, worker in read_ledger(text, where).items()})


def restore_positions(
    ledger: PushLedger[Answer], texts: Iterable[str], others: Iterable[str] = (), where: str = "ledger"
) -> None:
    """Give the workers the positions of a checkpoint, of several servers those furthest behind; while the gate is closed.

    Epochs and numbers stay: workers that have joined go on pushing, and those that were replaced stay out. `others` are ledgers
    of servers that only dense parameters came from.
    """
    found: dict[str, KnownWorker] = {}
    for text in texts:
        for name, worker in read_ledger(text, where).items():
            found[name] = _behind(found[name], worker) if name in found else worker
    for text in others:
        for name, worker in read_ledger(text, where).items():
            found[name] = _with_dense(found.get(name, _without_positions(worker)), worker)
    for name, worker in found.items():
        ledger.meet(name, epoch=worker.epoch, nonce=worker.nonce)
    for name, record in ledger.records().items():
        record.positions = dict(found[name].positions) if name in found else {}


def dense_positions_text(ledger: PushLedger[Answer]) -> str:
    """How far each worker is with the dense parameters, as JSON; while the gate is closed."""
    workers = {
        name: KnownWorker(
            epoch=record.epoch,
            nonce=record.nonce,
            highest=-1,
            numbers=(),
            positions={channel: at for channel, at in record.positions.items() if channel == "dense"},
        )
        for name, record in ledger.records().items()
    }
    return _Ledger(workers=workers).model_dump_json()


def take_dense_positions(ledger: PushLedger[Answer], workers: Mapping[str, KnownWorker], *, replace: bool) -> None:
    """Know how far `workers` are with dense parameters that come from another server; while the gate is closed.

    Of a worker that is known here too the position furthest behind counts; `replace`: only that of the other server, since
    there were no dense parameters here.
    """
    for name, worker in workers.items():
        known = ledger.meet(name, epoch=worker.epoch, nonce=worker.nonce)
        both = [worker.positions["dense"]] if "dense" in worker.positions else []
        if "dense" in known.positions and not replace:
            both.append(known.positions["dense"])
        if both:
            known.positions["dense"] = min(both, key=lambda position: position.batches)


def _without_positions(worker: KnownWorker) -> KnownWorker:
    return worker.model_copy(update={"positions": {}})


def _with_dense(one: KnownWorker, other: KnownWorker) -> KnownWorker:
    both = [worker.positions["dense"] for worker in (one, other) if "dense" in worker.positions]
    behind = {"dense": min(both, key=lambda position: position.batches)} if both else {}
    return one.model_copy(update={"positions": one.positions | behind})


def _behind(one: KnownWorker, other: KnownWorker) -> KnownWorker:
    newest, positions = max(one, other, key=lambda worker: worker.epoch), {}
    # Tables are on every server: one that has no position has had no batch. Dense parameters are on some.
    if "tables" in one.positions and "tables" in other.positions:
        both = (one.positions["tables"], other.positions["tables"])
        positions["tables"] = min(both, key=lambda position: position.batches)
    return _with_dense(newest.model_copy(update={"positions": positions | _dense(one)}), other)


def _dense(worker: KnownWorker) -> dict[str, HeldPosition]:
    return {channel: position for channel, position in worker.positions.items() if channel == "dense"}


def _described(record: WorkerRecord[Answer]) -> dict[str, object]:
    outcomes = {number: found for number, outcome in record.outcomes.items() if (found := _outcome(outcome))}
    return {
        "epoch": record.epoch,
        "nonce": record.nonce,
        "highest": record.highest,
        "numbers": list(record.outcomes),
        "outcomes": outcomes,
        "positions": {channel: position.model_dump() for channel, position in record.positions.items()},
    }


def _outcome(outcome: Answer | Exception) -> dict[str, object]:
    if isinstance(outcome, Exception):
        return {"failure": described(outcome).model_dump()}
    if not outcome.arrays and outcome.text == _DONE.text:
        return {}
    return {"text": outcome.text, "arrays": [array.tolist() for array in outcome.arrays]}


def _record(worker: KnownWorker) -> WorkerRecord[Answer]:
    outcomes = OrderedDict((number, _answer(worker.outcomes.get(number))) for number in worker.numbers)
    return WorkerRecord(
        epoch=worker.epoch,
        nonce=worker.nonce,
        highest=worker.highest,
        outcomes=outcomes,
        positions=dict(worker.positions),
    )


def _answer(outcome: _Outcome | None) -> Answer | Exception:
    if outcome is None:
        return _DONE
    if outcome.failure is not None:
        kind = getattr(errors, outcome.failure.error, errors.ServerError)
        return kind(outcome.failure.message)
    return Answer(text=outcome.text, arrays=tuple(np.array(array, dtype=np.int32) for array in outcome.arrays))


def read_ledger(text: str, where: str) -> Mapping[str, KnownWorker]:
    """The workers that a text of a ledger knows; `CorruptFileError`, beginning with `where`, if it is none."""
    try:
        return _Ledger.from_json(text).workers
    except ConfigError as error:
        raise CorruptFileError(f"{where}: its ledger of pushes cannot be read: {error}") from None
