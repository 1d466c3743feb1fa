"""Danger: string columns whose Arrow form (slices, chunks, dictionaries, large offsets) changes the ids they become."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monolith import InvalidArgumentError
from monolith.features import hash_strings

WORDS = ["red", "", "a string that is longer than eight bytes", "grün", "red"]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(WORDS),
        pa.array(WORDS, type=pa.large_string()),
        pa.array(WORDS, type=pa.string_view()),
        pa.array([word.encode() for word in WORDS]),
        pa.array(WORDS).dictionary_encode(),
        pa.array(["skipped", *WORDS, "skipped"]).slice(1, 5),
        pa.array(["skipped", *WORDS, "skipped"]).dictionary_encode().slice(1, 5),
        pa.chunked_array([WORDS[:2], [], WORDS[2:]]),
        tuple(WORDS),
    ],
    ids=lambda column: str(getattr(column, "type", "tuple")),
)
def test_the_form_of_a_column_does_not_matter(column: Any) -> None:  # noqa: ANN401
    assert hash_strings(column).tolist() == [hash_strings([word]).item() for word in WORDS]


@given(words=st.lists(st.binary(max_size=40), unique=True, max_size=50))
def test_distinct_strings_get_distinct_ids(words: list[bytes]) -> None:
    assert hash_strings(words).unique().numel() == len(words)


def test_nothing_gives_nothing() -> None:
    assert hash_strings([]).tolist() == []
    assert hash_strings(pa.chunked_array([], type=pa.string())).tolist() == []
    assert hash_strings(["", ""]).unique().numel() == 1


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["a", None], "1 of 2 are null"),
        (pa.array(["a", None]).dictionary_encode(), "1 of 2 are null"),
        ([1, 2], "expected strings or bytes, got int64"),
        (["a", 2], "expected strings or bytes"),
    ],
)
def test_what_is_no_string_is_refused(column: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(InvalidArgumentError, match=message):
        hash_strings(column)
