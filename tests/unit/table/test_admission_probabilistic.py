"""Danger: draws with another probability than stated, or that do not repeat, make two equal runs build two tables."""

from __future__ import annotations

import torch

from monolith.table.admission import AdmissionFilter, ProbabilisticAdmission


def share(config: ProbabilisticAdmission, count: int) -> float:
    ids = torch.arange(100_000)
    return AdmissionFilter(config).admit(ids, torch.full_like(ids, count)).float().mean().item()


def test_count_over_threshold() -> None:
    config = ProbabilisticAdmission(default_threshold=5, equal_probability=False)
    assert abs(share(config, 1) - 0.2) < 0.01
    assert abs(share(config, 4) - 0.8) < 0.01
    assert share(config, 5) == 1.0


def test_equal_probability_lets_95_percent_in_after_threshold_occurrences() -> None:
    config = ProbabilisticAdmission(default_threshold=5)
    p = 1 - 0.05 ** (1 / 5)
    assert abs(share(config, 1) - p) < 0.01
    assert abs(share(config, 3) - (1 - (1 - p) ** 3)) < 0.01
    admission, inside = AdmissionFilter(config), torch.zeros(50_000, dtype=torch.bool)
    for _ in range(5):
        inside |= admission.admit(torch.arange(50_000))
    assert abs(inside.float().mean().item() - 0.95) < 0.01


def test_the_same_seed_repeats_and_another_differs() -> None:
    ids = torch.arange(1000)
    runs = [AdmissionFilter(ProbabilisticAdmission(default_threshold=3, seed=seed)).admit(ids) for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_thresholds_by_slot_and_zero_admits_always() -> None:
    config = ProbabilisticAdmission(default_threshold=0, slot_thresholds={7: 10**6}, equal_probability=False)
    admission = AdmissionFilter(config)
    assert admission.admit(torch.arange(1000)).all()
    assert admission.admit(torch.arange(1000) | 7 << 48).sum() < 10
    assert admission.failure_count == 0
