"""Danger: a server misreads which pushes and batches are in its folder.

This text may change only together with its version.
"""

from __future__ import annotations

import json

import pytest

from monolith.errors import CorruptFileError
from monolith.ps.protocol.messages import BucketsAt, HeldPosition, Join, Push
from monolith.ps.server.ledger_state import ledger_text, load_ledger, read_ledger
from monolith.ps.server.pushes import PushLedger
from monolith.transport.calls import Answer

LEDGER = (
    '{"version": 2, "workers": {"w0": {"epoch": 3, "nonce": 5, "met": 3, "highest": 4, "numbers": [4], "outcomes": {}, '
    '"tables": [{"position": {"batches": 7, "state": "{}", "ended": false, "epochs": 0, "epoch": 3}, "ranges": [[10, 4096]]}, '
    '{"position": {"batches": 6, "state": null, "ended": false, "epochs": 0, "epoch": 2}, "ranges": [[0, 10]]}], '
    '"dense": [{"position": {"batches": 7, "state": "{}", "ended": false, "epochs": 0, "epoch": 3}, "names": ["w"]}]}}, '
    '"base_step": 90}'
)


def ledger() -> PushLedger[Answer]:
    made: PushLedger[Answer] = PushLedger()
    made.base_step = 90
    worker, at = made.join(Join(worker="w0", epoch=3, nonce=5)), HeldPosition(batches=7, state="{}", epoch=3)
    made.once(Push(worker="w0", epoch=3, sequence=4), lambda _: Answer())
    worker.buckets.advance(at, None)
    worker.buckets.put([BucketsAt(position=HeldPosition(batches=6, epoch=2), ranges=((0, 10),))])
    worker.parameters.advance(at, ["w"])
    return made


def test_the_text_of_a_ledger_is_this_json() -> None:
    assert json.loads(ledger_text(ledger())) == json.loads(LEDGER)


def test_a_ledger_is_read_as_it_was_written() -> None:
    read: PushLedger[Answer] = PushLedger()
    load_ledger(read, LEDGER)
    assert json.loads(ledger_text(read)) == json.loads(LEDGER)


@pytest.mark.parametrize("text", [LEDGER.replace('"version": 2', '"version": 3'), '{"workers": {}, "more": 1}', ""])
def test_a_ledger_of_another_version_is_refused(text: str) -> None:
    with pytest.raises(CorruptFileError, match="here: its ledger of pushes cannot be read"):
        read_ledger(text, "here")
