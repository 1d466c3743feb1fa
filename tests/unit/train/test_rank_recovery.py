"""Danger: nobody learns who was lost and what it cost, or a rank repeats for ever what fails every time."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from monolith.errors import (
    FencedError,
    InvalidArgumentError,
    RankLostError,
    RanksDisagreeError,
    RepeatedFailureError,
    RunInterruptedError,
)
from monolith.train.distributed.rank_recovery import FailureRecord, RankRecovery, loss_in

LOST = RankLostError("rank 1, process 101 of host1, was lost in step 7: it has closed its connection", rank=1, step=7)


def test_each_event_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 2.5, 10.0, 14.0])
    recovery = RankRecovery(FailureRecord(None, rank=0), clock=times.__next__)
    with caplog.at_level(logging.INFO):
        recovery.continued(step=0, ranks=2)
        recovery.lost(LOST, step=6)
        recovery.continued(step=5, ranks=2)
        recovery.lost(LOST, step=6)
        recovery.continued(step=6, ranks=1)
    lost = f"{LOST}; dropping the unfinished step and forming the run again"
    assert caplog.messages == [
        lost,
        "continuing from step 5 with 2 ranks, 2.5 s after the loss; 1 step made before the loss will be made again",
        lost,
        "continuing from step 6 with 1 rank, 4.0 s after the loss",
    ]
    assert recovery.losses == 2


def test_time_is_counted_from_the_first_of_several_losses() -> None:
    times = iter([10.0, 25.0])
    recovery = RankRecovery(FailureRecord(None, rank=0), clock=times.__next__)
    assert recovery.seconds == 0.0
    recovery.lost(LOST, step=6)
    recovery.lost(LOST, step=0)
    assert (recovery.seconds, recovery.losses) == (15.0, 1)


def test_a_mistake_that_the_launcher_does_not_try_again_keeps_its_message_in_the_next_launch(tmp_path: Path) -> None:
    for _ in range(2):
        RankRecovery(FailureRecord(str(tmp_path), rank=1)).failed(InvalidArgumentError("other data"), step=6)


@pytest.mark.parametrize(
    ("step", "error", "repeated"),
    [
        (6, ValueError("bad data"), True),
        (7, ValueError("bad data"), False),
        (6, OSError("bad data"), False),
        (6, RanksDisagreeError("other tables"), False),
    ],
)
def test_the_same_error_in_the_same_step_is_not_tried_a_third_time(
    tmp_path: Path, step: int, error: Exception, repeated: bool
) -> None:
    first, second = (RankRecovery(FailureRecord(str(tmp_path), rank=1)) for _ in range(2))
    first.failed(ValueError("bad data"), step=6)
    if not repeated:
        second.failed(error, step=step)
        return
    with pytest.raises(RepeatedFailureError) as caught:
        second.failed(error, step=step)
    assert "failed in step 7 with the same error as the time before" in str(caught.value)
    assert "ValueError: bad data" in str(caught.value)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [RunInterruptedError("SIGTERM"), FencedError("replaced"), KeyboardInterrupt()])
def test_what_is_no_failure_is_never_a_repeated_one(tmp_path: Path, error: BaseException) -> None:
    for _ in range(2):
        RankRecovery(FailureRecord(str(tmp_path), rank=1)).failed(error, step=6)


def test_a_record_that_cannot_be_read_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "rank_failures").mkdir()
    (tmp_path / "rank_failures" / "1").write_text("{half")
    assert not FailureRecord(str(tmp_path), rank=1).is_repeated(7, ValueError("x"))
    assert FailureRecord(str(tmp_path), rank=1).is_repeated(7, ValueError("y"))
    assert not FailureRecord(str(tmp_path), rank=0).is_repeated(7, ValueError("x")), "that of another rank"


def test_a_loss_is_found_behind_what_it_has_caused() -> None:
    def save() -> None:
        try:
            raise LOST
        finally:
            raise OSError("a save was not finished")

    with pytest.raises(OSError, match="not finished") as caught:
        save()
    assert loss_in(caught.value) is LOST
    assert loss_in(LOST) is LOST
    assert loss_in(ValueError("bad data")) is None
