"""Danger: trainers that are sent to a dead data worker, or all to the same one."""

from __future__ import annotations

from monolith.dataservice.dispatcher import WorkerPool


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_data_worker_is_alive_for_its_lease_after_every_heartbeat() -> None:
    clock = Clock()
    pool = WorkerPool(lease_secs=5, clock=clock)
    assert pool.choose() is None
    pool.heartbeat("a:1", streams=0)
    clock.now += 3
    pool.heartbeat("b:1", streams=0)
    clock.now += 2
    assert pool.alive() == ["a:1", "b:1"]
    clock.now += 0.01
    assert pool.alive() == ["b:1"]
    pool.heartbeat("a:1", streams=0)
    clock.now += 4.99
    assert pool.alive() == ["a:1"]
    clock.now += 1
    assert (pool.alive(), pool.choose()) == ([], None)


def test_the_least_busy_is_chosen_and_those_to_avoid_only_if_there_is_no_other() -> None:
    pool = WorkerPool(lease_secs=5, clock=Clock())
    for address, streams in (("a:1", 2), ("b:1", 0), ("c:1", 1)):
        pool.heartbeat(address, streams=streams)
    assert [pool.choose() for _ in range(6)] == ["b:1", "b:1", "c:1", "a:1", "b:1", "c:1"]
    assert [pool.choose(["a:1", "b:1"]) for _ in range(3)] == ["c:1"] * 3
    assert pool.choose(["a:1", "b:1", "c:1"]) == "a:1"
    pool.heartbeat("c:1", streams=0)
    assert pool.choose() == "c:1"
