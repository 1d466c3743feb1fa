"""Danger: a dropped row that still gets a gradient, or a NaN through its zero, trains an id that was refused."""

from __future__ import annotations

import pytest
import torch

from monolith import InvalidArgumentError
from monolith.table.admission import AdmissionFilter, SlidingAdmission, intercept_gradient


def admission(threshold: int) -> AdmissionFilter:
    return AdmissionFilter(SlidingAdmission(capacity=300, default_threshold=threshold))


def test_reference_golden() -> None:
    counting, ids = admission(3), torch.tensor([1, 3 << 17, 1])
    for mask in ([0, 0, 0], [0, 0, 1], [1, 0, 1], [1, 1, 1]):
        rows = torch.randn(3, 2, requires_grad=True)
        out = intercept_gradient(counting, ids, rows)
        assert torch.equal(out, rows)
        (out * 5).sum().backward()
        assert rows.grad is not None
        assert rows.grad.tolist() == [[5.0 * admitted] * 2 for admitted in mask]


def test_forward_alone_counts_nothing() -> None:
    counting = admission(1)
    for _ in range(3):
        with torch.no_grad():
            intercept_gradient(counting, [7], torch.ones(1, 1))
    assert counting.admit([7]).tolist() == [False]


def test_dropped_rows_are_zero_even_if_their_gradient_is_not_finite() -> None:
    rows = torch.ones(2, 1, requires_grad=True)
    (intercept_gradient(admission(1), [5, 5], rows) * torch.tensor([[float("nan")], [2.0]])).sum().backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [[0.0], [2.0]]


def test_ids_changed_after_the_forward_do_not_matter() -> None:
    counting, ids = admission(1), torch.tensor([5])
    counting.admit([5])
    rows = torch.ones(1, 3, 2, requires_grad=True)
    out = intercept_gradient(counting, ids, rows)
    ids.fill_(99)
    out.sum().backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [[[1.0, 1.0]] * 3]


def test_no_filter_passes_everything() -> None:
    rows = torch.ones(1, 1, requires_grad=True)
    assert intercept_gradient(None, [1], rows) is rows


def test_one_row_per_id() -> None:
    with pytest.raises(InvalidArgumentError, match=r"embeddings: expected \[2, \.\.\.\], one row per id, got \[3, 1\]"):
        intercept_gradient(admission(1), [1, 2], torch.ones(3, 1))
