"""Danger: time limits that contradict each other: a chief that is killed before it saves, or given up while it is restarted."""

from __future__ import annotations

import pytest

from monolith.cluster.liveness import Liveness
from monolith.errors import ConfigError

QUICK = {
    "heartbeat_secs": 0.1,
    "lease_secs": 1.0,
    "hang_secs": 1.0,
    "startup_secs": 10.0,
    "backoff_secs": 0.1,
    "max_backoff_secs": 1.0,
    "grace_secs": 5.0,
    "orphan_secs": 60.0,
}


def test_defaults() -> None:
    assert Liveness().model_dump() == {
        "heartbeat_secs": 5.0,
        "lease_secs": 30.0,
        "hang_secs": 60.0,
        "startup_secs": 120.0,
        "restarts": 0,
        "restart_window_secs": 3600.0,
        "backoff_secs": 1.0,
        "max_backoff_secs": 30.0,
        "jitter": 0.1,
        "grace_secs": 120.0,
        "orphan_secs": 21600.0,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lease_secs": 0.2}, r"lease_secs must be at least 3 \* heartbeat_secs, 0.2 >= 0.3"),
        ({"hang_secs": 0.9}, "hang_secs must be at least lease_secs, 0.9 >= 1"),
        ({"backoff_secs": 2.0}, "max_backoff_secs must be at least backoff_secs, 1 >= 2"),
        (
            {"grace_secs": 1.0},
            "grace_secs must be greater than lease_secs, 1 > 1: the chief would be killed before it has saved",
        ),
        ({"orphan_secs": 12.2}, "orphan_secs must be greater than replacement_secs, 12.2 > 12.2"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(change: dict[str, float], message: str) -> None:
    Liveness(**QUICK)
    with pytest.raises(ConfigError, match=message):
        Liveness(**{**QUICK, **change})


def test_others_wait_longer_than_the_slowest_replacement_takes() -> None:
    quick = Liveness(**QUICK, jitter=0.5)
    # Noticed, the longest pause with all of its jitter, started, and one heartbeat to be seen.
    assert quick.replacement_secs == pytest.approx(1.0 + 1.5 + 10.0 + 0.1)


def test_pauses_double_up_to_the_longest_and_are_spread() -> None:
    quick = Liveness(**QUICK, jitter=0.5)
    assert [quick.backoff(restarts) for restarts in (0, 1, 2, 4, 1000)] == [0.1, 0.2, 0.4, 1.0, 1.0]
    assert quick.backoff(4, chance=lambda: 0.9999) == pytest.approx(1.5, abs=1e-3)
