"""Danger: reading ahead reorders, loses or repeats batches, hides an error, or never ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from monolith.data.prefetch import Prefetch, PrefetchQueue, enqueue_dicts_with_queue_return
from monolith.data.synthetic import CriteoLike, CriteoLikeConfig
from monolith.errors import InvalidArgumentError
from monolith.features import Ragged

LONG = 60.0
"""Seconds after which a thread that should have ended counts as hung; never waited for when all is well."""


def numbers(batches: object) -> list[int]:
    return [int(batch["x"]) for batch in batches]  # type: ignore[attr-defined]


def count_to(n: int) -> Iterator[dict[str, torch.Tensor]]:
    for i in range(n):
        yield {"x": torch.tensor(i)}


class WaitSeen(threading.Condition):
    """A condition that says when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waiting.set()
        return super().wait(timeout)


def blocked(call: Callable[[PrefetchQueue], object], queue: PrefetchQueue) -> tuple[threading.Thread, list[object]]:
    """A thread that is inside `call(queue)`, waiting."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(call(queue))
        except StopIteration:
            results.append("end")

    queue._changed = condition = WaitSeen()
    thread = threading.Thread(target=run)
    thread.start()
    assert condition.waiting.wait(LONG)
    return thread, results


def test_a_queue_of_four_takes_four_and_gives_them_back_in_order() -> None:
    queue: PrefetchQueue[dict] = PrefetchQueue(4)
    for i in range(4):
        queue.put({"dense": torch.tensor([i]), "ragged": Ragged.from_lists([[i], [i, i]]), "s": "text", "none": None})
    assert queue.size() == 4
    for i in range(4):
        entry = queue.get()
        assert entry["dense"].tolist() == [i]
        assert entry["ragged"].to_lists() == [[i], [i, i]]
        assert (entry["s"], entry["none"]) == ("text", None)
    assert queue.size() == 0


def test_closing_frees_a_blocked_put() -> None:
    queue: PrefetchQueue[int] = PrefetchQueue(1)
    queue.put(0)
    thread, results = blocked(lambda queue: queue.put(1), queue)
    queue.close()
    thread.join(LONG)
    assert results == [False]
    assert queue.get() == 0


def test_closing_frees_a_blocked_get() -> None:
    thread, results = blocked(lambda queue: queue.get(), queue := PrefetchQueue(1))
    queue.close()
    thread.join(LONG)
    assert results == ["end"]


def test_a_queue_without_room_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="capacity"):
        PrefetchQueue(0)
    with pytest.raises(InvalidArgumentError, match="capacity"):
        Prefetch([], capacity=-1)


@pytest.mark.parametrize("capacity", [0, 1, 4, 100])
def test_twenty_elements_come_out_as_they_went_in(capacity: int) -> None:
    with Prefetch(count_to(20), capacity=capacity) as batches:
        assert numbers(batches) == list(range(20))


def test_capacity_zero_stays_in_the_callers_thread() -> None:
    seen = []

    def source() -> Iterator[dict[str, torch.Tensor]]:
        seen.append(threading.current_thread())
        yield {"x": torch.tensor(1)}

    assert numbers(Prefetch(source(), capacity=0)) == [1]
    assert seen == [threading.current_thread()]
    given = [1, 2]
    assert enqueue_dicts_with_queue_return(given, capacity=0) == (given, None)
    assert enqueue_dicts_with_queue_return(given, capacity=0)[0] is given


def test_it_reads_ahead_as_far_as_its_capacity_and_one_in_hand() -> None:
    drawn, enough = [], threading.Event()

    def source() -> Iterator[dict[str, torch.Tensor]]:
        for i in range(10):
            drawn.append(i)
            if i == 3:
                enough.set()
            yield {"x": torch.tensor(i)}

    batches = Prefetch(source(), capacity=3)
    first = next(iter(batches))
    # One handed out, three in the queue, so the fifth at most is in the reader's hand.
    assert enough.wait(LONG)
    assert int(first["x"]) == 0
    batches.close()
    assert len(drawn) <= 5


@pytest.mark.parametrize("capacity", [0, 1, 5])
def test_an_exception_arrives_after_the_batches_before_it_with_its_traceback(capacity: int) -> None:
    def broken_source() -> Iterator[dict[str, torch.Tensor]]:
        yield {"x": torch.tensor(0)}
        yield {"x": torch.tensor(1)}
        raise RuntimeError("disk on fire")

    seen: list[int] = []
    batches = Prefetch(broken_source(), capacity=capacity)
    with pytest.raises(RuntimeError, match="on fire") as caught:
        seen.extend(int(batch["x"]) for batch in batches)
    assert seen == [0, 1]
    assert "broken_source" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_a_loop_that_was_left_goes_on_and_a_finished_one_starts_again() -> None:
    batches = Prefetch([{"x": torch.tensor(i)} for i in range(5)], capacity=2)
    assert int(next(iter(batches))["x"]) == 0
    assert numbers(batches) == [1, 2, 3, 4]
    assert numbers(batches) == [0, 1, 2, 3, 4]


def criteo(batches: int = 12) -> CriteoLike:
    return CriteoLike(CriteoLikeConfig(batch_size=4, batches=batches, cardinalities=(50,)))


def first_ids(source: object) -> list[list[int]]:
    return [batch["C1"].tolist() for batch in source]  # type: ignore[attr-defined]


@pytest.mark.parametrize("capacity", [0, 1, 6])
@pytest.mark.parametrize("handed_out", [0, 1, 7, 12])
def test_the_state_counts_only_what_was_handed_out(capacity: int, handed_out: int) -> None:
    whole = first_ids(criteo())
    batches = Prefetch(criteo(), capacity=capacity)
    for _ in zip(range(handed_out), batches, strict=False):
        pass
    state = batches.state_dict()
    batches.close()
    assert state["next"] == handed_out
    resumed = Prefetch(criteo(), capacity=capacity)
    resumed.load_state_dict(state)
    assert first_ids(resumed) == whole[handed_out:]


@pytest.mark.parametrize("capacity", [0, 3])
def test_after_a_whole_loop_the_state_is_that_of_the_source(capacity: int) -> None:
    source = criteo()
    batches = Prefetch(source, capacity=capacity)
    whole = first_ids(batches)
    assert batches.state_dict() == source.state_dict() == criteo().state_dict()
    assert first_ids(batches) == whole


def test_closing_sets_the_source_back_to_what_was_handed_out() -> None:
    source = criteo()
    whole = first_ids(criteo())
    with Prefetch(source, capacity=5) as batches:
        for _ in zip(range(3), batches, strict=False):
            pass
    assert source.state_dict()["next"] == 3
    assert first_ids(source) == whole[3:]


def test_loading_a_state_forgets_what_was_read_ahead() -> None:
    whole = first_ids(criteo())
    with Prefetch(criteo(), capacity=4) as batches:
        start = batches.state_dict()
        next(iter(batches))
        batches.load_state_dict(start)
        assert first_ids(batches) == whole


def test_a_source_without_state_says_so() -> None:
    with pytest.raises(InvalidArgumentError, match="resumable"):
        Prefetch(count_to(3)).state_dict()


def test_losing_the_last_reference_stops_the_thread() -> None:
    batches = Prefetch(count_to(1000), capacity=1)
    next(iter(batches))
    assert batches._reader is not None
    thread = batches._reader._thread
    assert thread.is_alive()
    del batches
    gc.collect()
    thread.join(LONG)
    assert not thread.is_alive()


def test_close_does_not_wait_for_a_source_that_never_answers() -> None:
    inside, release = threading.Event(), threading.Event()

    def silent() -> Iterator[dict[str, torch.Tensor]]:
        inside.set()
        release.wait(LONG)
        yield {"x": torch.tensor(0)}

    batches = Prefetch(silent(), capacity=1)
    thread = batches._start()._thread
    assert inside.wait(LONG)
    assert batches.close(timeout=0.01) is False
    release.set()
    thread.join(LONG)
    assert not thread.is_alive()


EXIT = """
import torch
from monolith.data.prefetch import Prefetch
def endless():
    while True:
        yield {"x": torch.zeros(10)}
batches = Prefetch(endless(), capacity=2)
next(iter(batches))
print("left", flush=True)
"""


def test_the_interpreter_ends_with_a_reader_still_running() -> None:
    ended = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=LONG, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left\n", "")


def test_moving_to_a_device_keeps_structure_and_values() -> None:
    batch = {"x": torch.tensor([1.0]), "ids": Ragged.from_lists([[1], [2, 3]]), "n": (None, "s")}
    with Prefetch([batch], device="cpu") as batches:
        (moved,) = list(batches)
    assert moved["x"].tolist() == [1.0]
    assert moved["ids"].to_lists() == [[1], [2, 3]]
    assert moved["n"] == (None, "s")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("capacity", [0, 2])
def test_batches_arrive_on_the_gpu(capacity: int) -> None:
    with Prefetch(count_to(5), capacity=capacity, device="cuda") as batches:
        arrived = [batch["x"] for batch in batches]
    assert all(tensor.is_cuda for tensor in arrived)
    assert [tensor.item() for tensor in arrived] == [0, 1, 2, 3, 4]


class Point(NamedTuple):
    x: torch.Tensor
    y: None


def test_moving_leaves_parameters_splits_and_other_values_alone() -> None:
    parameter, ragged = torch.nn.Parameter(torch.ones(1)), Ragged.from_lists([[5], []])
    batch: dict[str, Any] = {"parts": [(parameter, 4), Point(torch.tensor([1]), None)], "ids": ragged, "name": "a"}
    with Prefetch([batch], device="meta") as batches:
        (moved,) = batches
    (kept, four), point = moved["parts"]
    assert (kept is parameter, four, moved["name"]) == (True, 4, "a")
    assert isinstance(point, Point)
    assert (point.x.is_meta, point.y) == (True, None)
    assert (moved["ids"].values.is_meta, moved["ids"].offsets.tolist()) == (True, [0, 1, 1])
    assert not batch["parts"][1].x.is_meta, "the batch of the source was changed"


def test_what_cannot_be_moved_to_a_device_is_refused() -> None:
    batches = [{"x": torch.ones(2), "y": np.ones(2)}]
    with pytest.raises(InvalidArgumentError, match="got a ndarray"):
        list(Prefetch(batches, capacity=1, device="cpu"))
    (same,) = Prefetch(batches, capacity=1)
    assert same["y"] is batches[0]["y"]  # without a device nothing is moved
