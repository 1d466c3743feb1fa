"""Danger: a partition without records keeps all windows open for ever, or one that hangs is taken for one without records."""

from __future__ import annotations

from pathlib import Path

import pytest

from join_oracle import QUIET, Acted, Shown, config_for, labels_by_key, write_events, written
from monolith.data.join import Joiner
from monolith.streams import open_stream


class Clock:
    """Seconds since 1970, as a test says."""

    now = 2_000.0

    def __call__(self) -> float:
        return self.now


def step(joiner: Joiner) -> int:
    """Read what there is. Returns how many examples there are."""
    for _ in range(4):
        joiner._join(joiner._read())
    joiner._find_ends()
    joiner._join([])
    joiner._flush()
    return len(written(joiner.config.output.stream))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_partition_without_records_does_not_hold_windows_open_for_ever(tmp_path: Path, clock: Clock) -> None:
    config = config_for(tmp_path, idle_secs=30, out_of_order_secs=0)
    write_events(tmp_path, [Shown("a", 1_000_000), Shown("b", 1_020_000)], [])
    with Joiner(config, clock=clock) as joiner:
        assert joiner._open_units()
        assert step(joiner) == 0  # actions may be just behind
        clock.now += 29
        assert step(joiner) == 0
        write_events(tmp_path, [Shown("c", 1_021_000)], [])
        clock.now += 1
        # Now there are impressions and, for 30 seconds, no action: a is closed, b and c are not.
        assert step(joiner) == 1


def test_without_any_records_event_time_goes_on_with_the_clock(tmp_path: Path, clock: Clock) -> None:
    config = config_for(tmp_path, idle_secs=2, out_of_order_secs=0)
    write_events(tmp_path, [Shown("a", 1_000_000)], [Acted("a", 1_001_000, "click")])
    with Joiner(config, clock=clock) as joiner:
        assert joiner._open_units()
        assert step(joiner) == 0
        clock.now += 8.9  # event time is 1,009.9: the window ends at 1,010, and closes some milliseconds later
        assert step(joiner) == 0
        clock.now += 0.3
        assert step(joiner) == 1
        assert labels_by_key(written(tmp_path / "examples"))["a"]["clicked"] == 1.0


def test_a_partition_that_has_records_and_gives_none_holds_windows_open(tmp_path: Path, clock: Clock) -> None:
    config = config_for(tmp_path, idle_secs=1, out_of_order_secs=0)
    write_events(tmp_path, [Shown("a", 1_000_000), Shown("b", 1_050_000)], [Acted("a", 1_001_000, "click")])
    with Joiner(config, clock=clock) as joiner:
        assert joiner._open_units()
        (unit,) = joiner.units
        for records in joiner._readers[0].poll(10, 0):
            unit.add(records)
        joiner._find_ends()
        clock.now += 1000
        joiner._join([])
        joiner._flush()
        assert written(tmp_path / "examples") == []  # the action is known to be there
        assert joiner.status().lag_records == 1
        step(joiner)
        clock.now += 2
        assert step(joiner) == 1
        assert labels_by_key(written(tmp_path / "examples"))["a"]["clicked"] == 1.0


def test_the_input_that_is_behind_in_event_time_is_read_first(tmp_path: Path, clock: Clock) -> None:
    """Else the shorter stream is read to its end, and all of it waits in memory."""
    shown = [Shown(f"k{n}", 1_000_000 + n * 100) for n in range(1000)]
    acted = [Acted(f"k{n}", 1_000_000 + n * 100, "click") for n in range(0, 1000, 2)]
    config = config_for(tmp_path, poll_records=10, lead_secs=0, out_of_order_secs=0)
    write_events(tmp_path, shown, acted)
    most = 0
    with Joiner(config, clock=clock) as joiner:
        assert joiner._open_units()
        for _ in range(200):
            joiner._join(joiner._read())
            most = max(most, len(joiner.units[0].windows))
    # A window and the time for which its key is kept are 200 impressions. Taken in turn, they would be twice as many.
    assert most < 250


def test_the_watermark_is_that_of_the_unit(tmp_path: Path, clock: Clock) -> None:
    """Another partition that is behind does not keep this one waiting: their keys have nothing to do with each other."""
    config = config_for(tmp_path, idle_secs=600, out_of_order_secs=0)
    for name in ("shown", "acted"):
        open_stream(f"{tmp_path}/{name}", partitions=2, settings=QUIET)
    for number, first in enumerate((1_000_000, 1_500_000)):
        for name, key in (("shown", "key"), ("acted", "key")):
            with open_stream(f"{tmp_path}/{name}").writer([number]) as writer:
                for at in (first, first + 11_000):
                    writer.append(b'{"key":"%d-%d","time":%d,"action":"x"}' % (number, at, at), partition=number)
                assert key
    with Joiner(config, clock=clock) as joiner:
        assert joiner._open_units()
        assert step(joiner) == 2
        assert [unit.watermark for unit in joiner.units] == [1_011_000, 1_511_000]
