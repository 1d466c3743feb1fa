"""Danger: a changed hash. Tables on disk are keyed by these ids; after a change every trained row would belong to another id.

The values may change only together with a migration of all saved tables.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from monolith.features import fid_v2, hash_ids, hash_strings, to_fids

# The first six are those of core/tests/hash_golden.cc: there is one hash in the project.
HASHES = {
    0: 0xE220A8397B1DCDAF,
    1: 0x910A2DEC89025CC1,
    -1: 0xE4D971771B652C20,
    42: 0xBDD732262FEB6E95,
    -(2**63): 0x481EC0A212A9F3DB,
    2**63 - 1: 0x2A67D7552E039EA7,
}


def test_integers() -> None:
    assert [value % 2**64 for value in hash_ids(list(HASHES)).tolist()] == list(HASHES.values())


def mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def string_hash(text: bytes) -> int:
    """The documented formula, one byte string at a time."""
    h = mix(len(text))
    for begin in range(0, len(text), 8):
        h = mix(h ^ int.from_bytes(text[begin : begin + 8], "little"))
    return h


STRINGS = {
    "": -2152535657050944081,
    "red": 1033286751639266714,
    "green": -7367443839428055789,
    "a long string of more than 8 bytes": -5885323805015067713,
}


def test_strings() -> None:
    assert hash_strings(list(STRINGS)).tolist() == list(STRINGS.values())


def test_the_documented_vectors() -> None:
    page = (Path(__file__).parents[2] / "docs/formats.md").read_text()
    vectors = {
        text: int(id_) for text, id_ in re.findall(r"^\| (\(empty\)|`.*?`) \| .*\| (-?\d{15,}) \|$", page, re.MULTILINE)
    }
    assert len(vectors) == 7
    texts = ["" if text == "(empty)" else text.strip("`") for text in vectors]
    assert hash_strings(texts).tolist() == list(vectors.values())


@pytest.mark.parametrize(
    "text", [b"", b"1234567", b"12345678", b"123456789", b"\0", b"\0\0", "каша".encode(), bytes(200)]
)
def test_strings_follow_the_documented_formula(text: bytes) -> None:
    assert hash_strings([text]).item() % 2**64 == string_hash(text)


def test_ids_beyond_the_signature() -> None:
    fids = to_fids([-1, 2**48, 2**63 - 1], 7)
    expected = [7 << 48 | HASHES[-1] >> 16, 7 << 48 | mix(2**48) >> 16, 7 << 48 | HASHES[2**63 - 1] >> 16]
    assert fids.tolist() == expected
    assert torch.equal(fid_v2.slot_of(fids), torch.tensor([7, 7, 7]))
