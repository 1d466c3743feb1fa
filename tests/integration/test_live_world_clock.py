"""Danger: the made-up world goes on while the loop is stopped, so that a model looks ruined when it is started again."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

LIVE = Path(__file__).parents[2] / "examples" / "live"


@pytest.fixture
def world_clock(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401 - a module without types
    monkeypatch.syspath_prepend(str(LIVE))
    return import_module("world_clock")


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_time_passes_only_while_the_site_is_open(tmp_path: Path, world_clock: Any) -> None:  # noqa: ANN401
    clock = Clock(500.0)
    first = world_clock.WorldClock(tmp_path / "world.json", 1000.0, clock)
    clock.now += 90  # while the replica starts
    assert first.tick() == 1000.0
    for _ in range(8):
        clock.now += 0.5
        first.tick()
    assert first.now == 1004.0
    first.save()

    clock.now += 9000  # the loop is stopped
    second = world_clock.WorldClock(tmp_path / "world.json", 1000.0, clock)
    assert second.tick() == second.opened == 1004.0
    clock.now += 0.5
    assert second.tick() == 1004.5


def test_time_stands_still_while_the_machine_sleeps(tmp_path: Path, world_clock: Any) -> None:  # noqa: ANN401
    clock = Clock(0.0)
    world = world_clock.WorldClock(tmp_path / "world.json", 0.0, clock)
    world.tick()
    clock.now += 3600
    assert world.tick() == world_clock.MOST_SECS


def test_a_site_that_is_killed_goes_back_to_the_last_save(tmp_path: Path, world_clock: Any) -> None:  # noqa: ANN401
    clock = Clock(0.0)
    first = world_clock.WorldClock(tmp_path / "world.json", 0.0, clock)
    first.tick()
    clock.now = 0.5
    first.tick()
    first.save()
    clock.now = 1.0
    first.tick()
    assert world_clock.WorldClock(tmp_path / "world.json", 0.0, clock).now == 0.5
