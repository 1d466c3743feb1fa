"""Danger: a changed or crossed id is not the id that the table of the other side holds."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batch_rows import random_batch, to_rows
from monolith.data.transforms import FeatureCombine, FidMask, LogBucketFid, MapId, SwitchSlot, combine_ids
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features import Batch, Ragged

INT64 = st.integers(-(2**63), 2**63 - 1)


def signed(value: int) -> int:
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def combined(a: int, b: int) -> int:
    """High xor low half of the product, with Python's exact integers."""
    product = (a * b) % 2**128
    return signed((product >> 64) ^ (product % 2**64))


@given(st.lists(st.tuples(INT64, INT64), min_size=1))
def test_combine_ids_is_the_128_bit_product(pairs: list[tuple[int, int]]) -> None:
    left, right = map(torch.tensor, zip(*pairs, strict=True))
    assert combine_ids(left, right).tolist() == [combined(a, b) for a, b in pairs]


@pytest.mark.parametrize(
    "extreme", [(-(2**63), -(2**63)), (2**63 - 1, 2**63 - 1), (-(2**63), 2**63 - 1), (-1, -1), (0, -5)]
)
def test_combine_ids_at_the_edges(extreme: tuple[int, int]) -> None:
    a, b = extreme
    assert combine_ids(torch.tensor([a]), torch.tensor([b])).tolist() == [combined(a, b)]


@pytest.fixture(params=[0, 1, 200])
def batch(request: pytest.FixtureRequest) -> Batch:
    rng = np.random.default_rng(3)
    batch = random_batch(rng, request.param)
    wide = rng.integers(-(2**63), 2**63 - 1, size=len(batch["ids"].values))
    return {**batch, "ids": Ragged(torch.from_numpy(wide), batch["ids"].offsets)}


@pytest.mark.parametrize(("version", "bits"), [(1, 54), (2, 48)])
@pytest.mark.parametrize("right", ["actions", "more_ids"])
def test_feature_combine_is_the_cross_product_of_each_row(batch: Batch, version: int, bits: int, right: str) -> None:
    out = FeatureCombine(left="ids", right=right, out="crossed", slot=900, fid_version=version)(batch)
    for row in to_rows(out):
        others = row[right] if isinstance(row[right], list) else [row[right]]
        expected = [signed(900 << bits | combined(a, b) % 2**bits) for a, b in product(row["ids"], others)]
        assert row["crossed"] == expected
    assert "crossed" not in batch


@pytest.mark.parametrize(("version", "bits"), [(1, 54), (2, 48)])
def test_switch_slot_keeps_the_signature_and_only_the_signature(batch: Batch, version: int, bits: int) -> None:
    rng = np.random.default_rng(5)
    count = len(batch["ids"].values)
    # Odd slots: the original lets the lowest bit of the old slot through.
    old = [signed((2 * int(s) + 1) << bits | int(x)) for s, x in zip(rng.integers(511, size=count), rng.integers(2**bits, size=count), strict=True)]  # fmt: skip  # noqa: E501
    fids = {**batch, "ids": Ragged(torch.tensor(old, dtype=torch.int64), batch["ids"].offsets)}
    out = SwitchSlot(slots={"ids": 6, "more_ids": 7}, fid_version=version)(fids)
    assert out["ids"].values.tolist() == [6 << bits | fid % 2**bits for fid in old]
    assert out["ids"].offsets.tolist() == batch["ids"].offsets.tolist()
    assert out["more_ids"].tolist() == [7 << bits | fid for fid in batch["more_ids"].tolist()]
    assert fids["ids"].values.tolist() == old


def test_map_id(batch: Batch) -> None:
    table = {3: 30, 1: 10, -5: 50}
    out = MapId(column="actions", ids=table, default=-7)(batch)
    assert out["actions"].to_lists() == [[table.get(a, -7) for a in row["actions"]] for row in to_rows(batch)]
    out = MapId(column="chnid", ids=table)(batch)
    assert out["chnid"].tolist() == [table.get(c, -1) for c in batch["chnid"].tolist()]


def test_fid_mask(batch: Batch) -> None:
    out = FidMask(column="actions", fid=2, out="mask")(batch)
    assert out["mask"].tolist() == [2 in row["actions"] for row in to_rows(batch)]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError):
        SwitchSlot(slots={"a": 32768})
    with pytest.raises(InvalidArgumentError, match="slot"):
        SwitchSlot(slots={"a": 1024}, fid_version=1)({"a": torch.tensor([1])})
    with pytest.raises(InvalidArgumentError, match="no such column"):
        FeatureCombine(left="a", right="b", out="c", slot=1)({"a": torch.tensor([1])})


FLOAT32 = st.floats(-(2.0**40), 2.0**40, width=32)


@given(st.lists(FLOAT32))
def test_log_buckets_against_exact_numbers(values: list[float]) -> None:
    values += [0.0, 1.0, -3.0, 2.0**30, float(np.nextafter(np.float32(1), np.float32(0)))]
    expected = [7 << 48 | int(abs(Fraction(value)) + 1).bit_length() - 1 for value in values]
    column = torch.tensor(values, dtype=torch.float32)
    ragged = Ragged(column, torch.tensor([0, 2, 2, len(values)]))
    out = LogBucketFid(slots={"dense": 7, "ragged": 7})({"dense": column, "ragged": ragged, "more": column})
    assert out["dense"].tolist() == expected
    assert out["ragged"].values.tolist() == expected
    assert out["more"] is column


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_without_a_bucket_are_refused(value: float) -> None:
    with pytest.raises(InvalidArgumentError, match="signature"):
        LogBucketFid(slots={"x": 1})({"x": torch.tensor([1.0, value])})
