"""Danger: something was reported as saved, and after a power cut it is lost, torn, or mixed with something older."""

from __future__ import annotations

import pytest
from campaigns import Campaign, cut_power


def test_the_power_goes_at_any_moment(campaign: Campaign) -> None:
    cuts = 50 if campaign.slow_to_restore else 200
    assert cut_power(campaign, cuts=cuts, steps=12, seed=1) == cuts


@pytest.mark.slow
def test_the_power_goes_a_thousand_times(campaign: Campaign) -> None:
    for seed in range(10):
        assert cut_power(campaign, cuts=100, steps=25, seed=seed, deaths=5) == 100
        campaign.start_again()
