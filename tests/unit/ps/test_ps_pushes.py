"""Danger: an update that is applied twice, or one of a process that has been replaced."""

from __future__ import annotations

import threading

import pytest

from monolith.errors import ConfigError, InvalidArgumentError, ProtocolError, StalePushError
from monolith.ps.protocol.messages import Join, Push
from monolith.ps.server.gate import ChangeGate
from monolith.ps.server.pushes import WINDOW, PushLedger


def ledger(epoch: int = 1) -> PushLedger[int]:
    made: PushLedger[int] = PushLedger()
    made.join(Join(worker="w", epoch=epoch, nonce=1))
    return made


def push(sequence: int, epoch: int = 1, worker: str = "w") -> Push:
    return Push(worker=worker, epoch=epoch, sequence=sequence)


def test_a_duplicate_gets_the_first_answer_and_changes_nothing() -> None:
    answers, pushes = iter([10, 20]), ledger()
    assert [pushes.once(push(5), lambda _: next(answers)) for _ in range(3)] == [10, 10, 10]
    assert pushes.once(push(6), lambda _: next(answers)) == 20


def test_numbers_may_come_in_any_order_and_with_gaps() -> None:
    done, pushes = [], ledger()
    for sequence in (7, 3, 9, 3, 8, 7):
        pushes.once(push(sequence), lambda _, s=sequence: done.append(s) or 0)  # type: ignore[misc]
    assert done == [7, 3, 9, 8]


def test_a_number_older_than_the_window_is_refused_whether_it_was_applied_or_not() -> None:
    pushes = ledger()
    pushes.once(push(1), lambda _: 0)
    pushes.once(push(WINDOW + 2), lambda _: 0)
    for sequence in (0, 1, 2):
        with pytest.raises(StalePushError, match="not known any more"):
            pushes.once(push(sequence), lambda _: pytest.fail("applied"))
    assert pushes.once(push(3), lambda _: 33) == 33


def test_a_failure_is_decided_once_too() -> None:
    tries, pushes = [], ledger()

    def fail_first(_: object) -> int:
        tries.append(1)
        if len(tries) == 1:
            raise InvalidArgumentError("ids: wrong")
        return 0

    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="ids: wrong"):
            pushes.once(push(1), fail_first)
    assert len(tries) == 1


def test_a_newer_epoch_fences_the_older_and_counts_from_anew() -> None:
    done, pushes = [], ledger()
    pushes.once(push(4), lambda _: done.append("old") or 0)  # type: ignore[func-returns-value]
    pushes.join(Join(worker="w", epoch=2, nonce=2))
    for sequence in (4, 5):
        with pytest.raises(StalePushError, match="epoch: 1 of worker 'w' is over, 2 has joined"):
            pushes.once(push(sequence), lambda _: pytest.fail("applied"))
    with pytest.raises(StalePushError, match="is over"):
        pushes.join(Join(worker="w", epoch=1, nonce=1))
    pushes.once(push(4, epoch=2), lambda _: done.append("new") or 0)  # type: ignore[func-returns-value]
    assert done == ["old", "new"]


def test_an_epoch_that_another_server_has_met_fences_as_if_it_had_joined_here() -> None:
    done, pushes = [], ledger()
    pushes.once(push(4), lambda _: done.append("old") or 0)  # type: ignore[func-returns-value]
    pushes.meet("w", epoch=2, nonce=2, met=1)
    with pytest.raises(StalePushError, match="is over"):
        pushes.once(push(5), lambda _: pytest.fail("applied"))
    # Its numbers are its own: an answer to the earlier life's would lose an update.
    assert pushes.join(Join(worker="w", epoch=2, nonce=2)).met == 1
    pushes.once(push(4, epoch=2), lambda _: done.append("new") or 0)  # type: ignore[func-returns-value]
    assert done == ["old", "new"]
    pushes.meet("w", epoch=1, nonce=1, met=1)
    pushes.once(push(5, epoch=2), lambda _: 0)


def test_workers_do_not_share_numbers() -> None:
    done, pushes = [], ledger()
    pushes.join(Join(worker="v", epoch=0, nonce=2))
    for worker, epoch in (("w", 1), ("v", 0)):
        pushes.once(push(1, epoch, worker), lambda _, w=worker: done.append(w) or 0)  # type: ignore[misc]
    assert done == ["w", "v"]


def test_two_processes_with_one_name_and_epoch_are_noticed() -> None:
    pushes = ledger()
    pushes.join(Join(worker="w", epoch=1, nonce=1))
    with pytest.raises(ConfigError, match="another process has joined as 'w' in epoch 1"):
        pushes.join(Join(worker="w", epoch=1, nonce=2))


@pytest.mark.parametrize(("worker", "epoch"), [("stranger", 1), ("w", 2)])
def test_a_push_before_joining_is_refused(worker: str, epoch: int) -> None:
    with pytest.raises(ProtocolError, match="has not joined"):
        ledger().once(push(1, epoch, worker), lambda _: pytest.fail("applied"))


def test_names_cannot_fill_the_memory() -> None:
    pushes: PushLedger[int] = PushLedger(max_workers=2)
    for name in ("a", "b", "a"):
        pushes.join(Join(worker=name, epoch=1, nonce=1))
    with pytest.raises(ConfigError, match="knows 2 workers already"):
        pushes.join(Join(worker="c", epoch=1, nonce=1))


def test_a_duplicate_and_a_successor_wait_for_the_push_that_is_under_way() -> None:
    pushes, inside, go_on, events = ledger(), threading.Event(), threading.Event(), []

    def slow(_: object) -> int:
        inside.set()
        assert go_on.wait(10)
        events.append("applied")
        return 1

    def successor() -> None:
        pushes.join(Join(worker="w", epoch=2, nonce=2))
        events.append("joined")

    first = threading.Thread(target=pushes.once, args=(push(1), slow))
    first.start()
    assert inside.wait(10)
    second = threading.Thread(target=successor)
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert events == ["applied", "joined"]


def test_a_closed_gate_waits_for_pushes_and_lets_none_begin() -> None:
    gate = ChangeGate()
    pushes: PushLedger[int] = PushLedger(gate=gate)
    pushes.join(Join(worker="w", epoch=1, nonce=1))
    inside, go_on, events = threading.Event(), threading.Event(), []

    def slow(_: object) -> int:
        inside.set()
        assert go_on.wait(10)
        events.append("first")
        return 0

    def cut() -> None:
        with gate.closed():
            events.append("cut")
            second.start()
            # A second push, from another thread, cannot have ended while this block runs.
            assert not done.wait(0.05)

    def late() -> None:
        pushes.once(push(2), lambda _: events.append("second") or 0)  # type: ignore[func-returns-value]
        done.set()

    done = threading.Event()
    first, closer, second = (threading.Thread(target=run) for run in (lambda: pushes.once(push(1), slow), cut, late))
    first.start()
    assert inside.wait(10)
    closer.start()
    go_on.set()
    for thread in (first, closer):
        thread.join(10)
    assert done.wait(10)
    assert events == ["first", "cut", "second"]
