"""Danger: the update of a step is lost, made twice, or made in another order because it was put off."""

from __future__ import annotations

import threading

import pytest

from monolith.train.pipeline import AsyncFunctionManager


class Counter:
    def __init__(self) -> None:
        self.value = 0.0
        self.log: list[object] = []

    def add(self, amount: float = 1.0, *, times: int = 1) -> None:
        self.value += amount * times
        self.log.append(amount)


def test_after_two_steps_one_update_has_been_made() -> None:
    x, pipeline = Counter(), AsyncFunctionManager()
    pipeline.add_async_function(x.add, (1.0,))
    assert x.value == 0.0
    pipeline.add_async_function(x.add, (1.0,))
    assert x.value == 1.0


def test_synchronous_is_at_once() -> None:
    x = Counter()
    AsyncFunctionManager(is_async=False).add_async_function(x.add, (1.0,))
    assert x.value == 1.0
    AsyncFunctionManager().add_async_function(x.add, is_async=False)
    assert x.value == 2.0


def test_a_function_without_arguments_works() -> None:
    x, pipeline = Counter(), AsyncFunctionManager()
    for _ in range(2):
        pipeline.add_async_function(x.add)
    assert x.value == 1.0


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_n_calls_make_n_updates_after_the_drain_in_order(threaded: bool, n: int) -> None:
    x, pipeline = Counter(), AsyncFunctionManager(threaded=threaded)
    for step in range(n):
        pipeline.add_async_function(x.add, (step,), {"times": 2})
        if not threaded:
            assert x.log == list(range(step))
    pipeline.drain()
    assert x.log == list(range(n))
    assert x.value == 2 * sum(range(n))
    pipeline.drain()
    assert x.log == list(range(n))


def test_queues_are_late_each_by_itself() -> None:
    x, pipeline = Counter(), AsyncFunctionManager()
    for step in range(2):
        pipeline.add_async_function(x.add, (step,), queue_name="sparse")
        pipeline.add_async_function(x.add, (10 + step,), queue_name="dense")
    assert x.log == [0, 10]
    pipeline.drain()
    assert x.log == [0, 10, 1, 11]


def test_a_synchronous_call_comes_after_what_its_queue_has_waiting() -> None:
    x = Counter()
    with AsyncFunctionManager(threaded=True) as pipeline:
        pipeline.add_async_function(x.add, (1,))
        pipeline.add_async_function(x.add, (2,))
        pipeline.add_async_function(x.add, (3,), is_async=False)
        assert x.log == [1, 2, 3]


def test_threaded_work_runs_beside_the_caller_and_is_awaited_by_the_next_call() -> None:
    started, go_on, log = threading.Event(), threading.Event(), []

    def update(step: int) -> None:
        started.set()
        assert go_on.wait(60)
        log.append((step, threading.current_thread() is threading.main_thread()))

    with AsyncFunctionManager(threaded=True) as pipeline:
        pipeline.add_async_function(update, (0,))
        pipeline.add_async_function(update, (1,))
        assert started.wait(60)
        assert log == []
        go_on.set()
        pipeline.add_async_function(update, (2,))
        assert (0, False) in log
    assert log == [(0, False), (1, False), (2, False)]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("monolith-late")]


@pytest.mark.parametrize("threaded", [False, True])
def test_an_error_of_a_late_call_is_raised(threaded: bool) -> None:
    def fail() -> None:
        raise RuntimeError("no such table")

    pipeline = AsyncFunctionManager(threaded=threaded)
    pipeline.add_async_function(fail)
    with pytest.raises(RuntimeError, match="no such table"):
        pipeline.drain()


def test_after_an_error_in_the_step_its_update_is_dropped() -> None:
    x = Counter()

    def step_fails() -> None:
        with AsyncFunctionManager() as pipeline:
            pipeline.add_async_function(x.add)
            raise KeyError

    with pytest.raises(KeyError):
        step_fails()
    assert x.value == 0.0
