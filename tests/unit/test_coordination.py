"""Danger: a run that waits for ever for a worker that died, counts a step twice, or lets a replaced process go on."""

from __future__ import annotations

import pytest

from monolith.errors import ConfigError, StalePushError
from monolith.ps.coordination_messages import Greet, Phase, Seen
from monolith.ps.server import coordination
from monolith.ps.server.coordination import Coordination


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def common(clock: Clock) -> Coordination:
    return Coordination(clock=clock)


def who(index: int, *, epoch: int = 1, phase: Phase = "running") -> Greet:
    return Greet(index=index, epoch=epoch, lease=30.0, phase=phase)


def joined(common: Coordination, *indexes: int) -> None:
    for index in indexes:
        common.greet(who(index, phase="joined"))


def alive(common: Coordination) -> list[int]:
    return [member.index for member in common.members().members if member.alive]


def test_a_worker_counts_until_its_lease_is_over(common: Coordination, clock: Clock) -> None:
    joined(common, 0, 1)
    clock.now = 20.0
    common.greet(who(0))
    clock.now = 29.9
    assert alive(common) == [0, 1]
    clock.now = 30.0
    assert alive(common) == [0]
    common.greet(who(1))
    assert alive(common) == [0, 1]


@pytest.mark.parametrize("call", ["greet", "report", "place", "remove", "hold"])
def test_a_replaced_worker_is_refused_whatever_it_asks(common: Coordination, call: str) -> None:
    common.greet(who(1, epoch=2))
    old = who(1, epoch=1)
    asked = {
        "greet": lambda: common.greet(old),
        "report": lambda: common.report(old, made=1, seen=0),
        "place": lambda: common.place(old, "Save"),
        "remove": lambda: common.remove(old),
        "hold": lambda: common.hold(old, 1),
    }
    with pytest.raises(StalePushError, match="epoch: 1 of worker 1 is over, 2 has come"):
        asked[call]()
    common.greet(who(1, epoch=3))


def test_steps_of_all_workers_count_once(common: Coordination) -> None:
    joined(common, 0, 1)
    assert common.report(who(0), made=1, seen=0) == Seen(step=1)
    assert common.report(who(1), made=2, seen=0) == Seen(step=3)
    assert common.report(who(1), made=2, seen=3) == Seen(step=3)  # sent again: the answer was lost
    assert common.report(who(1), made=1, seen=1) == Seen(step=3)  # overtaken by a later one
    assert common.report(who(0), made=2, seen=3) == Seen(step=4)


def test_steps_of_a_successor_count_on(common: Coordination) -> None:
    joined(common, 0)
    common.report(who(0), made=5, seen=0)
    common.greet(who(0, epoch=2, phase="joined"))
    assert common.report(who(0, epoch=2), made=1, seen=0) == Seen(step=6)


def test_a_restored_step_is_a_lower_bound(common: Coordination) -> None:
    joined(common, 0)
    assert common.report(who(0), made=0, seen=100) == Seen(step=100)
    assert common.report(who(0), made=1, seen=100) == Seen(step=101)
    assert common.report(who(0), made=1, seen=50) == Seen(step=101)


def test_a_server_that_was_started_anew_goes_on_with_the_count(common: Coordination) -> None:
    # Both had made steps before; it hears of them for the first time.
    assert common.report(who(0), made=10, seen=25) == Seen(step=25)
    assert common.report(who(1), made=15, seen=26) == Seen(step=26)
    assert common.report(who(1), made=16, seen=26) == Seen(step=27)


def test_one_barrier_at_a_time_and_it_holds_until_removed(common: Coordination) -> None:
    joined(common, 0, 1)
    placed, barrier = common.place(who(0), "Save")
    assert (placed, barrier.action) == (True, "Save")
    assert common.place(who(0), "Stop") == (False, barrier)
    assert common.report(who(1), made=1, seen=0).barrier == barrier
    assert common.hold(who(1), barrier.number)
    assert [member.held for member in common.members().members] == [False, True]
    common.remove(who(0))
    assert not common.hold(who(1), barrier.number)
    assert common.members().barrier is None


def test_a_barrier_that_follows_is_another_one(common: Coordination) -> None:
    joined(common, 0, 1)
    _, first = common.place(who(0), "Save")
    common.hold(who(1), first.number)
    common.remove(who(0))
    _, second = common.place(who(0), "Save")
    assert [member.held for member in common.members().members] == [False, False]
    assert not common.hold(who(1), first.number)
    assert common.hold(who(1), second.number)


def test_a_barrier_falls_with_a_chief_that_is_gone(common: Coordination, clock: Clock) -> None:
    joined(common, 0, 1)
    _, barrier = common.place(who(0), "Save")
    clock.now = 29.0
    assert common.hold(who(1), barrier.number)
    clock.now = 30.0
    assert not common.hold(who(1), barrier.number)


def test_a_barrier_falls_with_a_chief_that_was_replaced(common: Coordination) -> None:
    joined(common, 0, 1)
    _, barrier = common.place(who(0), "Save")
    common.greet(who(0, epoch=2, phase="joined"))
    assert not common.hold(who(1), barrier.number)
    assert common.place(who(0, epoch=2), "Save")[0]


def test_a_new_chief_has_not_restored_yet(common: Coordination) -> None:
    common.greet(who(0))
    common.greet(who(0, epoch=2, phase="joined"))
    assert [(m.epoch, m.phase) for m in common.members().members] == [(2, "joined")]


def test_a_key_is_set_once(common: Coordination) -> None:
    assert common.set_key("servers", "a,b", None) == (True, "a,b")
    assert common.set_key("servers", "a,c", None) == (False, "a,b")
    assert common.set_key("servers", "a,b", None) == (True, "a,b")  # sent again
    assert common.set_key("servers", "a,c", "a,b") == (True, "a,c")
    assert common.set_key("none", "x", "y") == (False, "")
    assert common.read_keys("ser") == {"servers": "a,c"}
    assert common.read_keys("x") == {}


def test_keys_have_an_end(common: Coordination, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "MAX_KEYS", 1)
    common.set_key("a", "1", None)
    common.set_key("a", "2", "1")
    with pytest.raises(ConfigError, match="no room for 'b'"):
        common.set_key("b", "1", None)
