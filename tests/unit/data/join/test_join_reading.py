"""Danger: the core reads an event otherwise than Python does, so one event has two keys, or a bad record becomes an example."""

from __future__ import annotations

import json
from typing import Any, Literal

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from monolith import _core
from monolith.data.join import ActionInput, ImpressionInput
from monolith.data.join.records import ActionParser, ImpressionParser, RefusedRecord
from monolith.streams.stream import Records

NOW_MS = 2_000_000
NAMES = st.sampled_from(["key", "second", "time", "action", "clicked", "other", "k\u00e9y"])
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 70), 1 << 70), st.floats(), st.text(max_size=8), st.integers(0, 3000),
    st.sampled_from(["a", "b", "", "k" * 256, "k" * 257, 1.0, 1.5, 1e-3, 2.0005, -0.0, 1e300, "\u00e9", "\ud834\udd1e"]),
)  # fmt: skip
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))
# Pairs, because an object may have a name twice.
OBJECTS = st.lists(st.tuples(NAMES, VALUES), max_size=7).map(
    lambda pairs: "{" + ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in pairs) + "}"
)
RAW = st.one_of(
    OBJECTS.map(str.encode),
    OBJECTS.map(lambda text: json.dumps(json.loads(text), ensure_ascii=False).encode(errors="replace") + b" \n"),
    st.binary(max_size=20),
    st.tuples(OBJECTS, st.integers(0, 60), st.integers(0, 255)).map(
        lambda given: bytes([*given[0].encode()[: given[1]], given[2], *given[0].encode()[given[1] + 1 :]])
    ),
)


@settings(max_examples=300)
@given(
    value=RAW,
    key=st.sampled_from([None, ("key",), ("key", "second"), ("k\u00e9y",)]),
    time=st.sampled_from([None, "time", "key"]),
    unit=st.sampled_from(["s", "ms"]),
    record_key=st.sampled_from([None, b"", b"k", b"k" * 256, b"k" * 257]),
    timestamp=st.sampled_from([-1, 0, 1, NOW_MS, NOW_MS + 1000, NOW_MS + 1001]),
)
@example(b'{"key": "a", "time": 1, "action": 1, "n": 1e400}', ("key",), "time", "s", None, 1)
@example(b'{"key": "a", "time": 1e0, "action": -0, "n": [[1e309]]}', ("key",), "time", "s", None, 1)
@example(b'{"key": 18446744073709551615, "time": 1, "action": "a"}', ("key",), "time", "s", None, 1)
@example(b'{"key": "a\\u0062", "time": 0.0005, "action": "a"}', ("key",), "time", "s", None, 1)
@example(b'{"key": 1, "key": "a", "time": null, "time": 1.0005, "action": "a"}', ("key",), "time", "s", None, 1)
def test_the_core_and_python_read_the_same(
    value: bytes,
    key: tuple[str, ...] | None,
    time: str | None,
    unit: Literal["s", "ms"],
    record_key: bytes | None,
    timestamp: int,
) -> None:
    shown = ImpressionInput(stream="s", key=key, time=time, time_unit=unit)
    acted = ActionInput(stream="a", key=key, time=time, time_unit=unit)
    bounds = {"max_bytes": 600, "max_future_ms": 1000}
    for parser in (ImpressionParser(shown, ["clicked"], **bounds), ActionParser(acted, **bounds)):
        records = Records(
            partition="p/0", offsets=[7], next_offset=8, timestamps=[timestamp], keys=[record_key], values=[value]
        )
        refused: list[RefusedRecord] = []
        found = parser.parse(records, NOW_MS, refused)
        parser._core = Nothing()  # type: ignore[assignment]
        slowly_refused: list[RefusedRecord] = []
        assert found == parser.parse(records, NOW_MS, slowly_refused)
        assert refused == slowly_refused


class Nothing:
    """A core that leaves every record to Python."""

    def parse(self, *columns: Any) -> int:  # noqa: ANN401
        number: int = columns[4]
        return number


def test_the_core_reads_what_is_common() -> None:
    """Or the test above compares Python with itself."""
    parser = _core.EventParser(
        key=["key", "item"], time="time", time_scale=1000, type="action", absent=["clicked"], max_bytes=100
    )
    values = [
        b'{"key": "a\xc3\xa9", "item": 12, "time": 1.5, "action": "click", "x": [1, {"y": null}]}',
        b'{"time": 2, "action": -7, "key": "b", "item": "c" } ',
        b'{"time": 2, "action": "click", "key": "b", "item": "c", "clicked": 1}',
    ]
    found: list[tuple[object, ...]] = []
    assert parser.parse([5, 6, 7], [0] * 3, [None] * 3, values, 0, 10_000, found) == 2
    assert found == [
        (orjson.dumps(["a\u00e9", "12"]), 1500, 5, values[0], "click"),
        (b'["b","c"]', 2000, 6, values[1], "-7"),
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b'{"user": 7}', b'{"user": 7,"clicked":1.0}'),
        (b'{"user": 7 \n} \n', b'{"user": 7,"clicked":1.0}'),
        (b'{"user": "}"}', b'{"user": "}","clicked":1.0}'),
        (b'{"user": {}}', b'{"user": {},"clicked":1.0}'),
        (b"{}", b'{"clicked":1.0}'),
        (b"{ \t} ", b'{"clicked":1.0}'),
    ],
)
def test_columns_are_added_to_an_object(value: bytes, expected: bytes) -> None:
    assert _core.with_columns(b"head" + value, b'"clicked":1.0', 4) == expected
