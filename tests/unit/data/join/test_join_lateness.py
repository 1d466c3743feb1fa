"""Danger: an event that comes late is lost without a count, changes an example twice, or brings an impression twice."""

from __future__ import annotations

import tempfile
from collections import Counter
from itertools import groupby
from pathlib import Path

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from join_oracle import TYPES, Acted, Shown, SlowJoin, action, config_for, impression
from monolith.data.join import origin_of
from monolith.data.join.lmdb_store import LmdbStore
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
    found, origins = [], []
    for one in join.take()[0]:
        fields, origin = orjson.loads(one.value), origin_of(one.headers)
        assert origin is not None
        origins.append(origin)
        corrects = "correction" in dict(one.headers)
        found.append((fields["key"], origin[2], corrects, {name: fields[name] for name in ("clicked", "value")}))
    assert sorted(found, key=repr) == sorted(slow.out, key=repr)
    assert {name: join.counts[name] for name in LOST} == {name: Counter(slow.lost)[name] for name in LOST}
    assert len(set(origins)) == len(origins)


@settings(max_examples=300)
@given(
    steps=STEPS,
    emit=st.sampled_from(["window_end", "on_positive"]),
    late=st.sampled_from(["drop", "correction"]),
    keep=st.sampled_from([0, 3, 20]),
    spill=st.booleans(),
)
def test_many_records_at_a_time_are_as_one_by_one(
    steps: list[object], emit: str, late: str, keep: int, *, spill: bool
) -> None:
    """The core takes what is common of a batch and leaves the rest: the order of events of one key must not change."""
    config = config_for(Path("nowhere"), emit=emit, late=late, keep_secs=keep, sampling={"rate": 0.5})
    results = []
    for whole in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            store = LmdbStore(Path(folder), epoch=1, max_bytes=1 << 24) if spill else None
            windows = Windows(bucket_ms=1000, limit=1000, store=store)
            join = WindowJoin(config, windows, partitions=["shown/0", "acted/0"])
            for of, run in groupby(enumerate(steps), key=lambda step: type(step[1])):
                events = list(run)
                for part in [events] if whole else [[event] for event in events]:
                    add(join, of, part)
                if store is not None and windows.is_full:
                    windows.commit(b"{}")
            join.close_windows(1 << 40)
            results.append((sorted(join.take()[0]), join.counts, windows.size, len(windows)))
            if store is not None:
                store.close()
    assert results[0][:2] == results[1][:2]
    if not spill:
        # What is in memory does not depend on how it came there.
        assert results[0] == results[1]


def add(join: WindowJoin, of: type, events: list[tuple[int, object]]) -> None:
    if of is Shown:
        shown = [(one.key.encode(), one.time, at, impression(one)) for at, one in events if isinstance(one, Shown)]
        join.add_impressions(0, shown)
    elif of is Acted:
        acted = [
            (one.key.encode(), one.time, at, action(one), one.type) for at, one in events if isinstance(one, Acted)
        ]
        join.add_actions(1, acted)
    else:
        for _, step in events:
            assert isinstance(step, int)
            join.close_windows(step)
