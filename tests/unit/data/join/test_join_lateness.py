"""Danger: an event that comes late is lost without a count, changes an example twice, or brings an impression twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from join_oracle import TYPES, Acted, Shown, SlowJoin, action, config_for, impression
from monolith.data.join.state import Windows
from monolith.data.join.window_join import WindowJoin

TIMES = st.integers(1_000_000, 1_060_000)
KEYS = st.sampled_from("abcde")
STEPS = st.lists(
    st.one_of(
        st.builds(Shown, KEYS, TIMES),
        st.builds(Acted, KEYS, TIMES, st.sampled_from(TYPES)),
        st.integers(1_000_000, 1_090_000),
    ),
    max_size=60,
)
LOST = ("duplicate_impressions", "expired_impressions", "outside_actions", "late_impressions", "unmatched_actions",
        "duplicate_actions", "late_actions")  # fmt: skip


@settings(max_examples=400)
@given(
    steps=STEPS,
    emit=st.sampled_from(["window_end", "on_positive", "fast"]),
    emit_on=st.sampled_from([None, ["buy"]]),
    late=st.sampled_from(["drop", "correction"]),
    keep=st.sampled_from([0, 3, 20]),
    width=st.sampled_from([1, 78, 1000]),
)
def test_late_events_are_treated_as_an_oracle_says(
    steps: list[object], emit: str, emit_on: list[str] | None, late: str, keep: int, width: int
) -> None:
    config = config_for(Path("nowhere"), emit=emit, emit_on=emit_on, late=late, keep_secs=keep)
    join = WindowJoin(config, Windows(bucket_ms=width, limit=1 << 30), partitions=["shown/0", "acted/0"])
    slow = SlowJoin(config, width)
    for offset, step in enumerate(steps):
        if isinstance(step, Shown):
            join.add_impressions(0, [(step.key.encode(), step.time, offset, impression(step))])
            slow.shown(step)
        elif isinstance(step, Acted):
            join.add_actions(1, [(step.key.encode(), step.time, offset, action(step), step.type)])
            slow.acted(step)
        else:
            assert isinstance(step, int)
            watermark = max(step, slow.watermark)
            join.close_windows(watermark)
            slow.passed(watermark)
    found = []
    for one in join.take()[0]:
        fields = orjson.loads(one.value)
        found.append((fields["key"], one.ordinal, one.corrects, {name: fields[name] for name in ("clicked", "value")}))
    assert sorted(found, key=repr) == sorted(slow.out, key=repr)
    assert {name: join.counts[name] for name in LOST} == {name: Counter(slow.lost)[name] for name in LOST}
    origins = [(one.offset, one.ordinal) for one in join.take()[0]]
    assert len(set(origins)) == len(origins)
