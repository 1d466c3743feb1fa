"""Danger: JSON that other parsers read otherwise, or a bad record that stops a batch, leaves half a row, or becomes good."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith.data import BadMessage, Column, MessageDecoder, decode_messages
from monolith.errors import SchemaError

COLUMNS = [
    Column(name="one", shape=(), default=-1),
    Column(name="ids"),
    Column(name="price", dtype="float64", shape=(), default=0.5),
    Column(name="pair", dtype="float32", shape=(2,), default=0.0),
    Column(name="name", dtype="bytes"),
    Column(name="tags", dtype="bytes", nested=True),
    Column(name="lists", nested=True),
]


def lists(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: rows.to_lists() if hasattr(rows, "to_lists") else rows.tolist() for name, rows in batch.items()}


def reason(record: bytes | str, *columns: Column) -> str | None:
    decoder = MessageDecoder(columns or COLUMNS)
    bad = decoder.add([record if isinstance(record, bytes) else record.encode()])
    assert decoder.rows == (bad is None)
    return None if bad is None else bad.reason


INTS = st.integers(-(2**63), 2**64 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
OTHER = st.recursive(
    st.none() | st.booleans() | INTS | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "one": INTS | st.none(),
        "ids": st.lists(INTS, max_size=4) | INTS | st.none(),
        "price": FLOATS | INTS | st.none(),
        "pair": st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=2),
        "name": TEXT | st.none(),
        "tags": st.lists(TEXT, max_size=3),
        "lists": st.lists(st.lists(INTS, max_size=3), max_size=3),
        "other": OTHER,
        "ünused": OTHER,
    },
)


def expected(row: dict[str, Any]) -> dict[str, Any]:
    """The row as a batch of one, written down independently of the parser."""

    def signed(value: int) -> int:
        return value - 2**64 if value >= 2**63 else value

    def given(name: str, otherwise: object) -> Any:  # noqa: ANN401 - any value of JSON
        value = row.get(name)
        return otherwise if value is None else value

    ids = given("ids", [])
    tags = [tag.encode() for tag in given("tags", [])]
    inner = given("lists", [])
    return {
        "one": [signed(given("one", -1))],
        "ids": [[signed(value) for value in (ids if isinstance(ids, list) else [ids])]],
        "price": [float(given("price", 0.5))],
        "pair": [given("pair", [0.0, 0.0])],
        "name": [list(given("name", "").encode())],
        "tags": [list(b"".join(tags))],
        "tags.lengths": [[len(tag) for tag in tags]],
        "lists": [[signed(value) for part in inner for value in part]],
        "lists.lengths": [[len(part) for part in inner]],
    }


@settings(max_examples=200, deadline=None)
@given(ROWS, st.booleans(), st.sampled_from([None, 1]))
def test_what_python_writes_is_read_as_it_was(row: dict[str, Any], ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(row, ensure_ascii=ascii_only, indent=indent).encode()
    assert lists(decode_messages([text], COLUMNS)) == expected(row)


@settings(max_examples=200, deadline=None)
@given(ROWS, st.data())
def test_damaged_json_is_accepted_exactly_when_orjson_accepts_it(row: dict[str, Any], data: st.DataObject) -> None:
    text = bytearray(json.dumps({"free": row}, ensure_ascii=data.draw(st.booleans())).encode())
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        byte = data.draw(
            st.sampled_from(b'"\\{}[],:0123456789.-+eEtfnu \n\x00\x1f\x7f\x80\xc3\xed\xf4\xff') | st.integers(0, 255)
        )
        if data.draw(st.booleans()):
            text[at] = byte
        else:
            text.insert(at, byte)
    try:
        parsed: object = orjson.loads(bytes(text))
    except orjson.JSONDecodeError:
        parsed = None
    assert (reason(bytes(text), Column(name="asked")) is None) == isinstance(parsed, dict)


@settings(max_examples=200, deadline=None)
@given(st.from_regex(r"-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?", fullmatch=True))
def test_decimal_numbers_are_rounded_as_python_rounds_them(text: str) -> None:
    wanted = float(text)
    column = Column(name="x", dtype="float64", shape=())
    if math.isinf(wanted):
        assert "expected a number in the range of its type" in str(reason(f'{{"x": {text}}}', column))
        return
    (got,) = decode_messages([f'{{"x": {text}}}'.encode()], [column])["x"].tolist()
    assert struct.pack("<d", got) == struct.pack("<d", wanted)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3.4028235677973362e38", 3.4028234663852886e38),
        ("1e-60", 0.0),
        ("-0.0", -0.0),
        ("16777217", 16777216.0),
        ("true", 1.0),
    ],
)
def test_numbers_become_the_nearest_float32(text: str, value: float) -> None:
    column = Column(name="x", dtype="float32", shape=())
    (got,) = decode_messages([f'{{"x": {text}}}'.encode()], [column])["x"].tolist()
    assert struct.pack("<f", got) == struct.pack("<f", np.float32(value))


@pytest.mark.parametrize(
    ("record", "part"),
    [
        ("", "the record is empty"),
        ("[]", "expected an object"),
        ("null", "expected an object"),
        ('{"one": 1', "expected ',' or '}'"),
        ('{"one": 1}}', "expected the end of the record"),
        ('{"one": 1,}', "expected the name of a field"),
        ('{"one" 1}', "expected ':'"),
        ('{"one": NaN}', "NaN and Infinity are not JSON"),
        ('{"price": Infinity}', "NaN and Infinity are not JSON"),
        ('{"price": -Infinity}', "expected a digit"),
        ('{"other": NaN}', "NaN and Infinity are not JSON"),
        ('{"one": 01}', "begins with 0"),
        ('{"one": 1.0}', "field 'one': expected an integer of 64 bits, got 1.0"),
        ('{"one": 1e3}', "expected an integer of 64 bits, got 1e3"),
        ('{"one": 18446744073709551616}', "expected an integer of 64 bits, got 18446744073709551616"),
        ('{"one": -9223372036854775809}', "expected an integer of 64 bits"),
        ('{"one": "7"}', 'expected an integer of 64 bits, got "7"'),
        ('{"one": {}}', "expected an integer of 64 bits, got {"),
        ('{"one": [1, 2]}', "field 'one' has 2 values, expected 1"),
        ('{"ids": [1, null]}', "expected an integer of 64 bits, got null"),
        ('{"ids": [[1]]}', "expected an integer of 64 bits, got ["),
        ('{"price": 1e309}', "expected a number in the range of its type, got 1e309"),
        ('{"pair": [1, 1e39]}', "expected a number in the range of its type, got 1e39"),
        ('{"pair": [1]}', "field 'pair' has 1 values, expected 2"),
        ('{"name": 5}', "field 'name': expected a string, got 5"),
        ('{"name": ["a"]}', "expected a string"),
        ('{"tags": "a"}', "expected a list of strings"),
        ('{"lists": [1]}', "expected a list of lists"),
        ('{"one": 1, "one": 1}', "field 'one' is there twice"),
        ('{"one": 1, "\\u006fne": 1}', "field 'one' is there twice"),
        ('{"name": "\\ud800"}', "half of a surrogate pair"),
        ('{"name": "\\x"}', "an escape that JSON does not have"),
        ('{"name": "a\nb"}', "a control character"),
        (b'{"name": "\xff"}', "not UTF-8"),
        (b'\xef\xbb\xbf{"one": 1}', "expected an object"),
        ('{"other": ' + "[" * 70 + "]" * 70 + "}", "nested too deeply"),
    ],
)
def test_every_way_to_be_bad_has_its_reason(record: str | bytes, part: str) -> None:
    assert part in str(reason(record))


def test_a_missing_field_needs_a_default() -> None:
    assert "field 'x' is missing" in str(reason("{}", Column(name="x", shape=())))
    assert "field 'x' is missing" in str(reason('{"x": null}', Column(name="x", shape=())))
    assert "field 'x' is missing" in str(reason('{"x": []}', Column(name="x", shape=())))


def test_long_records_are_bad_without_being_read() -> None:
    decoder = MessageDecoder(COLUMNS, max_record_bytes=20)
    assert decoder.add([b'{"one": 1}' + b" " * 11]) == BadMessage(
        0, "the record has 21 bytes, more than max_record_bytes, 20"
    )


def test_good_records_around_bad_ones_are_all_there() -> None:
    records = [b'{"one": %d}' % i if i % 3 else b'{"lists": [[1]], "ids": [7, "x"]}' for i in range(20)]
    decoder, bad, at = MessageDecoder(COLUMNS), [], 0
    while at < len(records):
        found = decoder.add(records, at)
        bad += [] if found is None else [found.number]
        at, _ = decoder.position
    batch = lists(decoder.take())
    assert bad == [i for i in range(20) if i % 3 == 0]
    assert batch["one"] == [i for i in range(20) if i % 3]
    assert not any(batch["ids"])
    assert not any(batch["lists.lengths"])


def test_several_columns_may_ask_for_one_field() -> None:
    columns = [Column(name="exact", field="x", shape=()), Column(name="real", field="x", dtype="float32", shape=())]
    batch = lists(decode_messages([b'{"x": 7}'], columns))
    assert batch == {"exact": [7], "real": [7.0]}


def test_decoding_at_once_names_the_bad_message() -> None:
    with pytest.raises(SchemaError, match=r"messages\[1\]: not JSON at byte 0: expected an object"):
        decode_messages([b"{}", b"7"], COLUMNS)
