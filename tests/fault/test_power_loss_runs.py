"""Danger: something was reported as kept, then the power went, and it is gone, torn, or mixed with something older."""

from __future__ import annotations

from campaigns import Campaign, cut_power


def test_the_power_goes_at_any_moment(campaign: Campaign) -> None:
    assert cut_power(campaign, cuts=200, steps=12, seed=1) == 200
