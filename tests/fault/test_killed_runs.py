"""Danger: a run is killed and resumes without its saved state, with half of it, or not at all."""

from __future__ import annotations

import pytest
from campaigns import Campaign, kill_often


def test_killed_at_any_moment(campaign: Campaign) -> None:
    assert kill_often(campaign, kills=15, steps=12, seed=1) == 15


@pytest.mark.slow
def test_killed_a_hundred_times(campaign: Campaign) -> None:
    assert kill_often(campaign, kills=120, steps=20, seed=2) == 120
