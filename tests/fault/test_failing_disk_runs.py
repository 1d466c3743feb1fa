"""Danger: a disk that is full or fails now and then loses saved data, or makes a failed save look successful."""

from __future__ import annotations

import pytest
from campaigns import Campaign, cut_power, fail_often


def test_one_change_in_128_fails(campaign: Campaign) -> None:
    assert fail_often(campaign, runs=6, steps=15, seed=1) > 3


def test_one_change_in_16_fails(campaign: Campaign) -> None:
    assert fail_often(campaign, runs=4, steps=12, seed=2, one_in=16) > 10


def test_a_failing_disk_loses_power(campaign: Campaign) -> None:
    cuts = 20 if campaign.slow_to_restore else 60
    assert cut_power(campaign, cuts=cuts, steps=10, seed=3, one_in=24) == cuts


@pytest.mark.slow
def test_one_change_in_128_fails_for_long(campaign: Campaign) -> None:
    assert fail_often(campaign, runs=60, steps=40, seed=4) > 100


@pytest.mark.slow
def test_a_failing_disk_loses_power_for_long(campaign: Campaign) -> None:
    for seed in range(10):
        assert cut_power(campaign, cuts=100, steps=20, seed=seed, one_in=128) == 100
        campaign.start_again()
