"""Danger: a run that waits forever for a worker that died or has finished, or lets a replaced process continue."""

from __future__ import annotations

import pytest

from monolith.cluster.coordination import Phase, Seen
from monolith.errors import ConfigError, CorruptFileError, StalePushError
from monolith.ps.protocol.messages import Greet
from monolith.ps.server import coordination
from monolith.ps.server.coordination import ServerCoordination


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def common(clock: Clock) -> ServerCoordination:
    return ServerCoordination(clock=clock)


def who(index: int, *, epoch: int = 1, phase: Phase = "running") -> Greet:
    return Greet(index=index, epoch=epoch, lease=30.0, phase=phase)


def joined(common: ServerCoordination, *indexes: int) -> None:
    for index in indexes:
        common.greet(who(index, phase="joined"))


def alive(common: ServerCoordination) -> list[int]:
    return [member.index for member in common.members().members if member.alive]


def test_a_worker_counts_until_its_lease_is_over(common: ServerCoordination, clock: Clock) -> None:
    joined(common, 0, 1)
    clock.now = 20.0
    common.greet(who(0))
    clock.now = 29.9
    assert alive(common) == [0, 1]
    clock.now = 30.0
    assert alive(common) == [0]
    common.greet(who(1))
    assert alive(common) == [0, 1]


def test_who_finished_an_earlier_launch_has_not_finished_this_one(common: ServerCoordination) -> None:
    """The servers of a job that is launched again restore who has finished: its chief would end without its workers."""
    for index in (0, 1):
        common.greet(who(index, phase="finished").model_copy(update={"run": "monday"}))
    again = ServerCoordination(clock=lambda: 0.0)
    kept: list[str] = []
    common.keep = kept.append
    common.place(who(0).model_copy(update={"run": "monday"}), "Save", 50)
    again.load(kept[-1])
    again.greet(who(0, epoch=2, phase="joined").model_copy(update={"run": "tuesday"}))
    assert [(one.index, one.phase) for one in again.members().members] == [(0, "joined")]
    assert again.members().barrier is None
    with pytest.raises(StalePushError, match="run: 'monday' is over, 'tuesday' has begun since"):
        again.greet(who(1).model_copy(update={"run": "monday"}))
    again.greet(who(1, epoch=3, phase="finished").model_copy(update={"run": "tuesday"}))
    again.greet(who(0, epoch=4, phase="joined").model_copy(update={"run": "tuesday"}))
    assert [(one.index, one.phase) for one in again.members().members] == [(0, "joined"), (1, "finished")]


@pytest.mark.parametrize("call", ["greet", "place", "remove", "hold"])
def test_a_replaced_worker_is_refused_whatever_it_asks(common: ServerCoordination, call: str) -> None:
    common.greet(who(1, epoch=2))
    old = who(1, epoch=1)
    asked = {
        "greet": lambda: common.greet(old),
        "place": lambda: common.place(old, "Save", 1),
        "remove": lambda: common.remove(old),
        "hold": lambda: common.hold(old, 1),
    }
    with pytest.raises(StalePushError, match="epoch: 1 of worker 1 is over, 2 has joined"):
        asked[call]()
    common.greet(who(1, epoch=3))


def test_the_global_step_is_what_the_server_derives(clock: Clock) -> None:
    steps = iter([7, 9])
    common = ServerCoordination(step=lambda: next(steps), clock=clock)
    assert common.greet(who(1)) == Seen(step=7)
    assert common.members().step == 9


def test_one_barrier_at_a_time_and_it_holds_until_removed(common: ServerCoordination) -> None:
    joined(common, 0, 1)
    placed, barrier = common.place(who(0), "Save", 2)
    assert (placed, barrier.action) == (True, "Save")
    assert common.place(who(0), "Stop", 3) == (False, barrier)
    assert common.greet(who(1)).barrier == barrier
    assert common.hold(who(1), barrier.number)
    assert [member.held for member in common.members().members] == [False, True]
    common.remove(who(0))
    assert not common.hold(who(1), barrier.number)
    assert common.members().barrier is None


def test_a_barrier_that_follows_is_another_one(common: ServerCoordination) -> None:
    joined(common, 0, 1)
    _, first = common.place(who(0), "Save", 4)
    common.hold(who(1), first.number)
    common.remove(who(0))
    _, second = common.place(who(0), "Save", 5)
    assert [member.held for member in common.members().members] == [False, False]
    assert not common.hold(who(1), first.number)
    assert common.hold(who(1), second.number)


def test_a_barrier_falls_with_a_chief_that_is_gone(common: ServerCoordination, clock: Clock) -> None:
    joined(common, 0, 1)
    _, barrier = common.place(who(0), "Save", 6)
    clock.now = 29.0
    assert common.hold(who(1), barrier.number)
    clock.now = 30.0
    assert not common.hold(who(1), barrier.number)


def test_a_barrier_falls_with_a_chief_that_was_replaced(common: ServerCoordination) -> None:
    joined(common, 0, 1)
    _, barrier = common.place(who(0), "Save", 7)
    common.greet(who(0, epoch=2, phase="joined"))
    assert not common.hold(who(1), barrier.number)
    assert common.place(who(0, epoch=2), "Save", 8)[0]


def test_a_new_chief_has_not_restored_yet(common: ServerCoordination) -> None:
    common.greet(who(0))
    common.greet(who(0, epoch=2, phase="joined"))
    assert [(m.epoch, m.phase) for m in common.members().members] == [(2, "joined")]


def test_a_key_is_set_once(common: ServerCoordination) -> None:
    assert common.set_key("servers", "a,b") == "a,b"
    assert common.set_key("servers", "a,c") == "a,b"
    assert common.read_keys("ser") == {"servers": "a,b"}
    assert common.read_keys("x") == {}


def test_keys_have_an_end(common: ServerCoordination, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "MAX_KEYS", 1)
    common.set_key("a", "1")
    assert common.set_key("a", "2") == "1"
    with pytest.raises(ConfigError, match="no more fit; cannot set 'b'"):
        common.set_key("b", "1")


@pytest.fixture
def kept(common: ServerCoordination) -> list[str]:
    """What a server has written of `common`."""
    kept: list[str] = []
    common.keep = kept.append
    return kept


def after_restart(kept: list[str], clock: Clock) -> ServerCoordination:
    common = ServerCoordination(clock=clock)
    common.load(kept[-1])
    return common


def test_a_restarted_server_knows_who_has_finished_and_who_was_replaced(
    common: ServerCoordination, kept: list[str], clock: Clock
) -> None:
    joined(common, 1, 2)
    common.greet(who(1, phase="finished"))
    common.greet(who(2, epoch=5))
    again = after_restart(kept, clock)
    clock.now = 30.0
    assert [(m.index, m.phase, m.alive) for m in again.members().members] == [
        (1, "finished", False),
        (2, "running", False),
    ]
    with pytest.raises(StalePushError):
        again.greet(who(2, epoch=1))


def test_after_a_restart_every_worker_has_a_lease_to_call(
    common: ServerCoordination, kept: list[str], clock: Clock
) -> None:
    joined(common, 1)
    clock.now = 1000.0
    again = after_restart(kept, clock)
    assert alive(again) == [1]
    clock.now = 1030.0
    assert alive(again) == []


def test_after_a_restart_workers_are_still_held(common: ServerCoordination, kept: list[str], clock: Clock) -> None:
    joined(common, 0, 1)
    _, barrier = common.place(who(0), "Save", 9)
    again = after_restart(kept, clock)
    assert again.hold(who(1), barrier.number)
    again.remove(who(0))
    assert not again.hold(who(1), barrier.number)
    assert again.place(who(0), "Save", 10)[1].number > barrier.number


def test_a_chief_of_an_earlier_job_has_restored_nothing_in_this_one(
    common: ServerCoordination, kept: list[str], clock: Clock
) -> None:
    common.greet(who(0))
    again = after_restart(kept, clock)
    assert [m.phase for m in again.members().members] == ["joined"]
    again.greet(who(0))  # it runs, and only the server was started again
    assert [m.phase for m in again.members().members] == ["running"]


def test_a_renewed_lease_writes_nothing(common: ServerCoordination, kept: list[str]) -> None:
    joined(common, 1)
    common.greet(who(1))
    written = len(kept)
    common.greet(who(1))
    common.hold(who(1), 1)
    common.remove(who(1))
    assert len(kept) == written


def test_members_move_and_keys_stay(common: ServerCoordination, clock: Clock) -> None:
    joined(common, 0, 1)
    common.greet(who(1, phase="finished"))
    _, barrier = common.place(who(0), "Save", 11)
    common.set_key("servers", "a")
    other = ServerCoordination(clock=clock)
    other.set_key("servers", "b")
    other.take(common.given())
    assert [(m.index, m.phase) for m in other.members().members] == [(0, "running"), (1, "finished")]
    assert other.members().barrier == barrier
    assert other.read_keys("") == {"servers": "b"}


def test_a_run_that_has_ended_leaves_nobody_who_counts_as_finished(
    common: ServerCoordination, kept: list[str], clock: Clock
) -> None:
    common.greet(who(1, phase="finished"))
    common.end_run(who(0))
    assert common.members().members == ()
    assert after_restart(kept, clock).members().members == ()


def test_what_was_kept_and_cannot_be_read_is_refused(common: ServerCoordination) -> None:
    with pytest.raises(CorruptFileError, match="coordination"):
        common.load("{")


def test_a_barrier_whose_answer_was_lost_is_placed_by_who_asks_again(common: ServerCoordination) -> None:
    joined(common, 0)
    assert common.place(who(0), "Save", 100) == common.place(who(0), "Save", 100)
    assert common.place(who(0), "Save", 101)[0] is False
