"""The ledger of pushes as text, for the log and checkpoints of a server, and back."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Literal

import numpy as np
from pydantic import Field

from monolith import errors
from monolith.config import Config
from monolith.errors import ConfigError, CorruptFileError
from monolith.ps.protocol.messages import BucketsAt, ParametersAt
from monolith.ps.server.pushes import BucketProgress, ParameterProgress, PushLedger, WorkerRecord
from monolith.transport.calls import Answer, WireInt
from monolith.transport.errors import RemoteError, encode_error

__all__ = [
    "KnownWorker",
    "forget_progress",
    "ledger_text",
    "load_ledger",
    "progress_text",
    "put_progress",
    "read_base_step",
    "read_ledger",
]

_DONE = Answer()


class _Outcome(Config):
    """The outcome of a push, unless it is an empty answer."""

    text: str = "{}"
    arrays: tuple[tuple[int, ...], ...] = ()
    """int32, the answer of `reinitialize`. No other change answers arrays."""
    failure: RemoteError | None = None


class KnownWorker(Config):
    """The record of one worker in a ledger."""

    epoch: WireInt
    nonce: WireInt
    met: WireInt
    highest: int = -1
    numbers: tuple[int, ...] = ()
    outcomes: dict[int, _Outcome] = Field(default_factory=dict)
    tables: tuple[BucketsAt, ...] = ()
    dense: tuple[ParametersAt, ...] = ()


class _Ledger(Config):
    version: Literal[2] = 2
    """Version 1 had one position for all buckets of a server."""
    workers: dict[str, KnownWorker]
    base_step: int | None = None


def ledger_text(ledger: PushLedger[Answer]) -> str:
    """Return the contents of `ledger` as JSON. Called while the gate is closed.

    Example:
        >>> from monolith.ps.protocol.messages import Join
        >>> ledger = PushLedger()
        >>> _ = ledger.join(Join(worker="w0", epoch=3, nonce=1))
        >>> copy = PushLedger()
        >>> load_ledger(copy, ledger_text(ledger))
        >>> copy.records()["w0"].epoch
        3
    """
    workers = {name: _described(record) for name, record in ledger.records().items()}
    return json.dumps({"version": 2, "workers": workers, "base_step": ledger.base_step})


def load_ledger(ledger: PushLedger[Answer], text: str, where: str = "ledger") -> None:
    """Replace the contents of `ledger` by what `ledger_text` wrote."""
    read = _read(text, where)
    ledger.replace({name: _record(worker) for name, worker in read.workers.items()})
    ledger.base_step = read.base_step


def progress_text(ledger: PushLedger[Answer], *, buckets: np.ndarray | None = None, names: Collection[str] = ()) -> str:
    """Return the progress of each worker in `buckets`, a mask, and in the dense parameters `names`, as JSON. The gate must be
    closed."""
    workers = {
        name: KnownWorker(
            epoch=record.epoch,
            nonce=record.nonce,
            met=record.met,
            tables=() if buckets is None else tuple(record.buckets.at(buckets)),
            dense=tuple(record.parameters.at(names)),
        )
        for name, record in ledger.records().items()
    }
    return _Ledger(workers=workers).model_dump_json()


def put_progress(
    ledger: PushLedger[Answer],
    workers: Mapping[str, KnownWorker],
    *,
    buckets: np.ndarray | None = None,
    names: Collection[str] = (),
) -> None:
    """Record that every worker is as far in `buckets` and `names` as `workers` says. The gate must be closed.

    Workers that are not in `workers` have had no batch there. Epochs and sequence numbers stay: workers that have joined
    continue to push, and those that were replaced are still refused.
    """
    for name, worker in workers.items():
        ledger.meet(name, epoch=worker.epoch, nonce=worker.nonce, met=worker.met)
    for name, record in ledger.records().items():
        known = workers.get(name)
        if buckets is not None:
            record.buckets.put(known.tables if known is not None else (), buckets)
        record.parameters.put(known.dense if known is not None else (), names)


def forget_progress(ledger: PushLedger[Answer]) -> None:
    """Record that no worker has pushed a batch. The gate must be closed."""
    for record in ledger.records().values():
        record.buckets, record.parameters = BucketProgress(), ParameterProgress()


def _described(record: WorkerRecord[Answer]) -> dict[str, object]:
    outcomes = {number: found for number, outcome in record.outcomes.items() if (found := _outcome(outcome))}
    return {
        "epoch": record.epoch,
        "nonce": record.nonce,
        "met": record.met,
        "highest": record.highest,
        "numbers": list(record.outcomes),
        "outcomes": outcomes,
        "tables": [at.model_dump() for at in record.buckets.at()],
        "dense": [at.model_dump() for at in record.parameters.at()],
    }


def _outcome(outcome: Answer | Exception) -> dict[str, object]:
    if isinstance(outcome, Exception):
        return {"failure": encode_error(outcome).model_dump()}
    if not outcome.arrays and outcome.text == _DONE.text:
        return {}
    return {"text": outcome.text, "arrays": [array.tolist() for array in outcome.arrays]}


def _record(worker: KnownWorker) -> WorkerRecord[Answer]:
    outcomes = OrderedDict((number, _answer(worker.outcomes.get(number))) for number in worker.numbers)
    record = WorkerRecord(
        epoch=worker.epoch, nonce=worker.nonce, met=worker.met, highest=worker.highest, outcomes=outcomes
    )
    record.buckets.put(worker.tables)
    record.parameters.put(worker.dense, [name for at in worker.dense for name in at.names])
    return record


def _answer(outcome: _Outcome | None) -> Answer | Exception:
    if outcome is None:
        return _DONE
    if outcome.failure is not None:
        kind = getattr(errors, outcome.failure.error, errors.ServerError)
        return kind(outcome.failure.message)
    return Answer(text=outcome.text, arrays=tuple(np.array(array, dtype=np.int32) for array in outcome.arrays))


def read_ledger(text: str, where: str) -> Mapping[str, KnownWorker]:
    """Return the workers in the text of a ledger. Raises `CorruptFileError`, beginning with `where`."""
    return _read(text, where).workers


def read_base_step(text: str, where: str) -> int | None:
    """Return what the text of a ledger adds to the batches of all workers to get the global step, if it has that."""
    return _read(text, where).base_step


def _read(text: str, where: str) -> _Ledger:
    try:
        return _Ledger.from_json(text)
    except ConfigError as error:
        raise CorruptFileError(f"{where}: its ledger of pushes cannot be read: {error}") from None
