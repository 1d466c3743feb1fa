"""Danger: a run over a stream hangs when nothing comes, cannot be stopped, or loses what its thread had read ahead."""

from __future__ import annotations

import threading

import pytest
import torch

from monolith.data.prefetch import Prefetch
from monolith.data.sources.source import Source
from monolith.data.synthetic import ClickStream
from monolith.data.transforms import FilterByValue
from monolith.data.transforms.compose import Shuffle, Transformed
from monolith.errors import InvalidArgumentError
from waiting_source import WaitingSource, until


def ids(batch: dict[str, torch.Tensor]) -> list[int]:
    return batch["id"].tolist()


def test_a_batch_that_does_not_come_is_a_timeout_and_the_next_call_waits_again() -> None:
    source = WaitingSource()
    with Prefetch(source, capacity=0) as ahead:
        with pytest.raises(TimeoutError):
            ahead.take(timeout=0.01)
        source.append(1, 2)
        assert ids(ahead.take(timeout=60)) == [1, 2]


def test_closing_ends_a_read_that_waits_and_returns_to_the_last_batch_taken() -> None:
    source = WaitingSource()
    source.append(1, 2, 3, 4, 5, 6)
    ahead = Prefetch(source, capacity=2)
    assert ids(ahead.take()) == [1, 2]
    until(lambda: source.reads == 3)
    assert ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "monolith-prefetch"]
    again = Prefetch(source)
    assert ids(again.take()) == [3, 4]
    source.waiting.wait(60)
    assert again.close()


def test_a_waiting_read_is_ended_wherever_the_thread_is() -> None:
    for _ in range(20):
        source = WaitingSource()
        ahead = Prefetch(source)
        with pytest.raises(TimeoutError):
            ahead.take(timeout=0)
        assert ahead.close()


def test_a_source_that_waits_does_not_start_again_at_its_end() -> None:
    source = WaitingSource(ends=True)
    source.append(1, 2, 3)
    assert [ids(batch) for batch in source] == [[1, 2], [3]]
    assert list(source) == []
    source.append(4)
    assert [ids(batch) for batch in source] == [[4]]


def test_transforms_and_shuffles_forward_waiting_and_interruption() -> None:
    source = WaitingSource()
    filtered = Transformed(source, FilterByValue(column="id", op="gt", operand=1))
    shuffled = Shuffle(filtered, buffer_rows=2, batch_size=1)
    assert filtered.waits
    assert shuffled.waits
    assert Prefetch(shuffled).waits
    with Prefetch(shuffled) as ahead, pytest.raises(TimeoutError):
        ahead.take(timeout=0.01)
    assert not [thread for thread in threading.enumerate() if thread.name == "monolith-prefetch"]


def test_other_sources_do_not_wait_and_cannot_be_taken_from_without_a_thread() -> None:
    assert not Source.waits
    assert not Transformed(ClickStream()).waits
    with Prefetch(ClickStream(), capacity=0) as ahead, pytest.raises(InvalidArgumentError, match="capacity"):
        ahead.take()
