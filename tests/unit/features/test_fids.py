"""Danger: a slot that leaks into a signature, or a signature cut silently: rows of one feature trained by another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monolith import InvalidArgumentError
from monolith.features import FidLayout, fid_v1, fid_v1_to_v2, fid_v2, fid_v2_to_v1, to_fids

LAYOUTS = pytest.mark.parametrize("layout", [fid_v1, fid_v2], ids=lambda layout: layout.name)


@LAYOUTS
@given(data=st.data())
def test_make_and_split_are_inverse(layout: FidLayout, data: st.DataObject) -> None:
    slot = data.draw(st.integers(0, 2**layout.slot_bits - 1))
    signatures = data.draw(st.lists(st.integers(0, 2**layout.signature_bits - 1), max_size=8))
    fids = layout.make(slot, torch.tensor(signatures, dtype=torch.int64))
    assert [fid % 2**64 for fid in fids.tolist()] == [slot << layout.signature_bits | s for s in signatures]
    slots, back = layout.split(fids)
    assert slots.tolist() == [slot] * len(signatures)
    assert back.tolist() == signatures


@LAYOUTS
def test_arrays_in_arrays_out_with_a_slot_for_each(layout: FidLayout) -> None:
    slots = np.array([[0, 1], [2, 2**layout.slot_bits - 1]])
    fids = layout.make(slots, np.full((2, 2), 9))
    assert isinstance(fids, np.ndarray)
    np.testing.assert_array_equal(layout.slot_of(fids), slots)
    np.testing.assert_array_equal(layout.switch_slot(fids, 3), layout.make(3, np.full((2, 2), 9)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fid_v1.make(1024, torch.tensor([1])), r"slot: expected 0\.\.2\*\*10 - 1 in a fid v1, got 1024"),
        (lambda: fid_v2.make(32768, torch.tensor([1])), r"slot: expected 0\.\.2\*\*15 - 1 in a fid v2, got 32768"),
        (lambda: fid_v2.make(-1, torch.tensor([1])), "got -1"),
        (
            lambda: fid_v2.make(1, torch.tensor([0, 2**48])),
            r"signature\[1\]: expected 0\.\.2\*\*48 - 1 .* got 281474976710656",
        ),
        (lambda: fid_v1.make(1, torch.tensor([-1])), r"signature\[0\]: .* got -1"),
        (lambda: fid_v2.make(torch.tensor([0, 32768]), torch.tensor([1, 1])), r"slot\[1\]: .* got 32768"),
        (lambda: fid_v2.slot_of(torch.tensor([-1])), r"fid\[0\]: expected 0\.\.2\*\*63 - 1 in a fid v2, got -1"),
        (lambda: fid_v2_to_v1(fid_v2.make(1024, torch.tensor([1]))), r"slot\[0\]: .* fid v1, got 1024"),
        (lambda: to_fids([1], 32768), r"slot: expected 0\.\.32767, got 32768"),
        (lambda: to_fids([1, 2], -1), r"slot: expected 0\.\.32767, got -1"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_place(call: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(InvalidArgumentError, match=message):
        call()


def test_v1_to_v2_drops_six_bits_of_signature_and_nothing_else() -> None:
    fids = fid_v1.make(1023, torch.tensor([5, 2**48 + 5, 2**53 + 5, 2**48 - 1]))
    slots, signatures = fid_v2.split(fid_v1_to_v2(fids))
    assert slots.tolist() == [1023] * 4
    assert signatures.tolist() == [5, 5, 5, 2**48 - 1]


def test_v2_survives_a_way_through_v1() -> None:
    fids = fid_v2.make(700, torch.tensor([0, 2**48 - 1]))
    assert torch.equal(fid_v1_to_v2(fid_v2_to_v1(fids)), fids)


@given(slot=st.integers(0, 32767), ids=st.lists(st.integers(0, 2**48 - 1), unique=True))
def test_ids_that_fit_never_collide_and_stamping_twice_changes_nothing(slot: int, ids: list[int]) -> None:
    fids = to_fids(ids, slot)
    assert fid_v2.signature_of(fids).tolist() == ids
    assert torch.equal(to_fids(fids, slot), fids)
    # In one batch with an id that must be hashed, the others still stay.
    mixed = to_fids([*ids, -5], slot)
    assert torch.equal(mixed[:-1], fids)
    assert 0 <= mixed[-1].item() >> 48 == slot


def test_hashed_signatures_spread() -> None:
    ids = torch.arange(100_000) - 2**63
    signatures = fid_v2.signature_of(to_fids(ids, 3))
    assert signatures.unique().numel() == 100_000
    # Each bit is one in half of them, within five standard deviations.
    ones = ((signatures[:, None] >> torch.arange(48)) & 1).sum(0)
    assert (ones - 50_000).abs().max() < 5 * 100_000**0.5 / 2


def test_shapes_survive() -> None:
    assert to_fids(torch.tensor(5), 7).shape == ()
    assert to_fids([], 7).tolist() == []
    assert to_fids(torch.zeros(2, 3, dtype=torch.int64), 7).shape == (2, 3)
