"""Danger: training outside the hours a machine is lent for, above all in windows that span midnight, or waiting forever."""

from __future__ import annotations

import logging
from datetime import datetime
from datetime import time as TimeOfDay

import pytest
import torch

from monolith.errors import ConfigError
from monolith.original import TideStoppingHook, before, tide_available_now
from monolith.train import Trainer
from monolith.train.hooks import CustomGlobalStepWaiterHook, TideWindow
from training import ClickModel, Stream


def clock(hour: int, minute: int = 0, second: int = 0) -> datetime:
    return datetime(2024, 5, 17, hour, minute, second)


def window(start: str, end: str) -> TideWindow:
    return TideWindow(start=TimeOfDay.fromisoformat(start), end=TimeOfDay.fromisoformat(end))


def test_before_compares_hours_then_minutes() -> None:
    assert before(1, 59, 2, 0)
    assert before(2, 0, 2, 1)
    assert not before(2, 1, 2, 1)
    assert not before(3, 0, 2, 59)


@pytest.mark.parametrize(
    ("start", "end", "inside", "outside"),
    [
        ("01:00", "03:00", ["01:00", "02:59"], ["00:59", "03:00", "23:00"]),
        ("22:30", "06:15", ["22:30", "23:59", "00:00", "06:14"], ["06:15", "12:00", "22:29"]),
        ("00:00", "00:01", ["00:00"], ["00:01", "23:59"]),
        ("23:59", "00:00", ["23:59"], ["00:00", "23:58"]),
        ("05:00", "05:00", ["00:00", "05:00", "23:59"], []),
    ],
)
def test_window_includes_its_start_excludes_its_end_and_may_span_midnight(
    start: str, end: str, inside: list[str], outside: list[str]
) -> None:
    tide = window(start, end)
    assert [moment for moment in inside if not tide.contains(TimeOfDay.fromisoformat(moment))] == []
    assert [moment for moment in outside if tide.contains(TimeOfDay.fromisoformat(moment))] == []


def test_every_minute_is_in_the_window_or_in_its_complement() -> None:
    day, night = window("06:15", "22:30"), window("22:30", "06:15")
    minutes = [TimeOfDay(hour, minute) for hour in range(24) for minute in range(60)]
    assert all(day.contains(minute) != night.contains(minute) for minute in minutes)
    assert sum(day.contains(minute) for minute in minutes) == 16 * 60 + 15


def test_tide_available_now_asks_the_clock() -> None:
    assert tide_available_now(22, 0, 6, 0, now=lambda: clock(23))
    assert not tide_available_now(22, 0, 6, 0, now=lambda: clock(21, 59, 59))


def test_a_window_needs_times_of_day() -> None:
    with pytest.raises(ConfigError, match=r"TideWindow\.start"):
        TideWindow(start="25:00", end=TimeOfDay(1))  # type: ignore[arg-type]


def stops_in_window(now: datetime) -> int:
    model = ClickModel()
    hook = TideStoppingHook(window("01:00", "03:00"), now=lambda: now)
    return Trainer(model, torch.optim.SGD(model.parameters()), hooks=[hook]).fit(Stream(), steps=3)


def test_training_stops_if_tide_is_not_available() -> None:
    assert stops_in_window(clock(4)) == 0


def test_training_does_not_stop_if_tide_is_available() -> None:
    assert stops_in_window(clock(2)) == 3


class Waiter:
    """A step waiter in a world where sleeping moves a clock and lets other workers make steps."""

    def __init__(
        self, wait_until: int, steps_per_poll: int, *, tide: TideWindow | None = None, **options: float
    ) -> None:
        self.step, self.seconds, self.polls = 0, 0.0, 0
        self.steps_per_poll = steps_per_poll
        self.stopped: list[str] = []
        self.hook = CustomGlobalStepWaiterHook(
            wait_until,
            lambda: self.step,
            window=tide,
            now=lambda: clock(12),
            monotonic=lambda: self.seconds,
            sleep=self.sleep,
            extra_seconds=lambda: 30.0,
            **options,
        )

    def sleep(self, seconds: float) -> None:
        self.polls += 1
        self.seconds += seconds
        self.step += self.steps_per_poll
        assert self.polls < 10_000, "waits for ever"

    def wait(self) -> None:
        self.hook.wait(self.stopped.append)


def test_it_does_not_wait_for_step_zero() -> None:
    waiter = Waiter(0, 1)
    waiter.wait()
    assert waiter.polls == 0


def test_it_waits_until_the_step_is_reached_and_only_once() -> None:
    waiter = Waiter(2, 1)
    waiter.wait()
    assert (waiter.polls, waiter.seconds) == (2, 1.0)
    waiter.step = 0
    waiter.wait()
    assert waiter.polls == 2


def test_it_does_not_wait_if_tide_is_not_available() -> None:
    waiter = Waiter(10, 1, tide=window("01:00", "03:00"))
    waiter.wait()
    assert waiter.polls == 0
    assert len(waiter.stopped) == 1


def test_it_waits_inside_the_tide() -> None:
    waiter = Waiter(10, 1, tide=window("11:00", "13:00"))
    waiter.wait()
    assert waiter.step == 10
    assert waiter.stopped == []


def test_it_starts_anyway_after_the_limit_counted_from_the_first_real_step() -> None:
    waiter = Waiter(10**9, 1, max_non_tide_wait_minute=1)
    waiter.wait()
    # Two polls until the step exceeds 1, then 60 + 30 seconds, and the first poll beyond them.
    assert waiter.seconds == 1.0 + 90.0 + 0.5
    assert waiter.stopped == []


def test_the_limit_does_not_count_while_nobody_has_started() -> None:
    waiter = Waiter(10, 0, max_non_tide_wait_minute=0)
    with pytest.raises(AssertionError, match="waits for ever"):
        waiter.wait()


def test_it_says_every_30_seconds_what_it_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    waiter = Waiter(130, 1)
    with caplog.at_level(logging.INFO):
        waiter.wait()
    assert waiter.seconds == 65.0
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for global step 130, now 0: slow start",
        "still waiting after 30 s for global step 130, now 60: slow start",
        "still waiting after 60 s for global step 130, now 120: slow start",
    ]
