"""Danger: what ranks have reported as durable is lost in a power cut, or a disk that fails mixes the steps of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from campaigns import Campaign, cut_power, fail_often, kill_often
from disk_shim import Nursery


@pytest.fixture(scope="module")
def ranks(shim_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(shim_library, "jobs.rank_threads", tmp_path_factory.mktemp("nursery")) as made:
        yield made


@pytest.fixture
def rank_campaign(ranks: Nursery, tmp_path: Path) -> Campaign:
    return Campaign(ranks, tmp_path)


def test_the_power_goes_at_any_moment(rank_campaign: Campaign) -> None:
    assert cut_power(rank_campaign, cuts=60, steps=11, seed=1) == 60


def test_all_ranks_die_at_once(rank_campaign: Campaign) -> None:
    assert kill_often(rank_campaign, kills=5, steps=7, seed=1) == 5


def test_the_disk_fails(rank_campaign: Campaign) -> None:
    assert fail_often(rank_campaign, runs=6, steps=7, seed=1, one_in=32) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_the_power_goes_often(rank_campaign: Campaign, seed: int) -> None:
    assert cut_power(rank_campaign, cuts=150, steps=22, seed=seed, deaths=6, one_in=[0, 128][seed % 2]) == 150


@pytest.mark.slow
@pytest.mark.parametrize("one_in", [16, 128])
def test_the_disk_fails_often(rank_campaign: Campaign, one_in: int) -> None:
    assert fail_often(rank_campaign, runs=60, steps=11, seed=one_in, one_in=one_in) > 0


@pytest.mark.slow
def test_all_ranks_die_often(rank_campaign: Campaign) -> None:
    assert kill_often(rank_campaign, kills=80, steps=11, seed=2) == 80
