"""Danger: labels that depend on the order in which events happen to arrive, instead of on when they happened."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from join_oracle import (
    TYPES,
    Acted,
    Shown,
    action,
    config_for,
    impression,
    join_all,
    joined,
    labels_by_key,
    write_events,
    written,
)
from monolith.data.join import Joiner

TIMES = st.integers(1_000_000, 1_030_000)
KEYS = st.sampled_from("abcdefgh")
EVENTS = st.lists(
    st.one_of(st.builds(Shown, KEYS, TIMES), st.builds(Acted, KEYS, TIMES, st.sampled_from(TYPES))), max_size=40
)


@settings(max_examples=40)
@given(
    events=EVENTS,
    emit=st.sampled_from(["window_end", "on_positive", "fast"]),
    poll=st.integers(1, 7),
    spill=st.booleans(),
)
def test_any_order_gives_the_labels_of_the_times(events: list[object], emit: str, poll: int, *, spill: bool) -> None:
    shown = [event for event in events if isinstance(event, Shown)]
    acted = [event for event in events if isinstance(event, Acted)]
    with tempfile.TemporaryDirectory() as folder:
        # Later than any disorder here: nothing is late.
        config = config_for(
            Path(folder), out_of_order_secs=60, emit=emit, late="correction", poll_records=poll,
            state={"folder": f"{folder}/state", "spill": spill},
        )  # fmt: skip
        write_events(Path(folder), shown, acted)
        join_all(config)
        found = written(f"{folder}/examples")
        expected = joined(shown, acted, config)
        # The last word on each impression. Corrections and fast positives come after what they correct.
        last = {one.fields["key"]: {name: one.fields[name] for name in ("clicked", "value")} for one in found}
        assert last == expected
        assert len({one.origin for one in found}) == len(found)
        if emit == "window_end":
            assert labels_by_key(found) == expected


def test_an_action_that_comes_before_its_impression_is_kept(tmp_path: Path) -> None:
    write_events(tmp_path, [], [Acted("a", 1_001_000, "click")])
    config = config_for(tmp_path)
    with Joiner(config) as joiner:
        joiner.run(until_end=True)
    write_events(tmp_path, [Shown("a", 1_000_000)], [])
    join_all(config)
    assert labels_by_key(written(tmp_path / "examples")) == {"a": {"clicked": 1.0, "value": 1.0}}


@pytest.mark.parametrize(("at", "counts"), [(998_000, True), (1_010_000, True), (997_999, False), (1_010_001, False)])
def test_the_window_has_both_its_ends(tmp_path: Path, at: int, *, counts: bool) -> None:
    write_events(tmp_path, [Shown("a", 1_000_000)], [Acted("a", at, "click")])
    found = join_all(config_for(tmp_path))
    assert labels_by_key(written(tmp_path / "examples"))["a"]["clicked"] == float(counts)
    assert found.get("outside_actions", 0) == int(not counts)


def test_repeated_events_are_counted_and_ignored(tmp_path: Path) -> None:
    shown, acted = [Shown("a", 1_000_000)] * 3, [Acted("a", 1_001_000, "click")] * 4
    write_events(tmp_path, shown, acted)
    found = join_all(config_for(tmp_path))
    assert (found["duplicate_impressions"], found["duplicate_actions"]) == (2, 3)
    assert len(written(tmp_path / "examples")) == 1


def test_the_features_are_the_bytes_of_the_impression(tmp_path: Path) -> None:
    write_events(tmp_path, [Shown("a", 1_000_000)], [])
    join_all(config_for(tmp_path))
    (one,) = written(tmp_path / "examples")
    assert one.value.startswith(impression(Shown("a", 1_000_000))[:-1])
    assert action(Acted("a", 1, "click")) not in one.value
