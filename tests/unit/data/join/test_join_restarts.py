"""Danger: a joiner that dies at a bad moment writes an example twice, or never, or forgets an action."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from join_oracle import Acted, Shown, config_for, join_all, joined, labels_by_key, write_events, written
from monolith.data.join import Joiner
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.streams import Stream, open_stream


class Died(Exception):  # noqa: N818 - not an error
    pass


class Mortal:
    """Streams whose owner dies at one of their calls."""

    def __init__(self, dies_at: int) -> None:
        self.calls, self.dies_at = 0, dies_at

    def open(self, url: str, *, settings: dict[str, str] | None, partitions: int | None = None) -> Any:  # noqa: ANN401
        return _Watched(open_stream(url, settings=settings, partitions=partitions), self.call)

    def call(self) -> None:
        self.calls += 1
        if self.calls == self.dies_at:
            raise Died


class _Watched:
    """Counts the calls of a stream, and of its readers and writers, that a kill may come before."""

    def __init__(self, inner: object, call: Callable[[], None]) -> None:
        self._inner, self._call = inner, call

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        found = getattr(self._inner, name)
        if name in ("reader", "writer"):
            return lambda *args: _Watched(found(*args), self._call)
        if name == "extend":
            # A kill may come after any of the records.
            return lambda records, **named: [(self._call(), found([record], **named)) for record in records]
        if name in ("append", "flush", "poll", "last"):
            return lambda *args, **named: (self._call(), found(*args, **named))[1]
        return found

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self._inner.close()  # type: ignore[attr-defined]


SHOWN = [Shown(f"k{n}", 1_000_000 + 1500 * n) for n in range(9)]
ACTED = [Acted(f"k{n}", 1_000_000 + 1500 * n + 4000, kind) for n in range(0, 9, 2) for kind in ("click", "buy")]


def ticking() -> Callable[[], float]:
    """A clock that makes every checkpoint due, and none too long."""
    now = [1_100.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    return clock


@pytest.mark.parametrize("emit", ["window_end", "on_positive", "fast"])
@pytest.mark.parametrize("spill", [False, True])
def test_dying_at_every_call_changes_nothing(tmp_path: Path, emit: str, *, spill: bool) -> None:
    expected: Mapping[str, Mapping[str, float]] = {}
    deaths, steps = 0, 1 if emit == "window_end" else 4
    for dies_at in range(1, 1000, steps):
        folder = tmp_path / str(dies_at)
        config = config_for(
            folder,
            emit=emit,
            late="correction",
            out_of_order_secs=3,
            poll_records=3,
            state={"folder": f"{folder}/state", "spill": spill, "checkpoint_secs": 0.004},
        )
        write_events(folder, SHOWN, ACTED)
        mortal = Mortal(dies_at)
        try:
            join_all(config, open_stream=mortal.open, clock=ticking())
        except Died:
            deaths += 1
            join_all(config, clock=ticking())
        found = written(folder / "examples")
        assert len({one.origin for one in found}) == len(found), f"repeats after dying at call {dies_at}"
        last = {one.fields["key"]: {name: one.fields[name] for name in ("clicked", "value")} for one in found}
        expected = expected or joined(SHOWN, ACTED, config)
        assert last == expected, f"after dying at call {dies_at}"
        if emit == "window_end":
            assert labels_by_key(found) == expected
        if mortal.calls < dies_at:
            break
    # Polls, appends, flushes, and looks at the end of the output.
    assert deaths * steps >= 16


def test_dying_twice_in_a_row_changes_nothing(tmp_path: Path) -> None:
    for first in range(8, 50, 9):
        for second in (6, 11, 23):
            folder = tmp_path / f"{first}-{second}"
            config = config_for(folder, out_of_order_secs=3, poll_records=3, state={"folder": f"{folder}/state"})
            write_events(folder, SHOWN, ACTED)
            for dies_at in (first, second):
                # It may be at the end before the second death.
                with suppress(Died):
                    join_all(config, open_stream=Mortal(dies_at).open, clock=ticking())
            join_all(config, clock=ticking())
            assert labels_by_key(written(folder / "examples")) == joined(SHOWN, ACTED, config)


def test_an_action_that_the_written_example_does_not_have_is_late(tmp_path: Path) -> None:
    """After a kill the order of reading may be another one: what is in the output stays, and nothing is lost silently."""
    config = config_for(tmp_path, late="correction", state={"folder": f"{tmp_path}/state", "checkpoint_secs": 1e6})
    write_events(tmp_path, [Shown("a", 1_000_000), Shown("b", 1_100_000)], [Acted("x", 1_100_000, "click")])
    with Joiner(config, clock=lambda: 1_100.0) as joiner:
        assert joiner._open_units()
        for _ in range(20):
            joiner._join(joiner._read())
        joiner._flush()  # and no checkpoint
    assert labels_by_key(written(tmp_path / "examples")) == {"a": {"clicked": 0.0, "value": 0.0}}
    # The state knows nothing of that example, and now the action is there when the window closes.
    write_events(tmp_path, [], [Acted("a", 1_004_000, "buy")])
    config = config.model_copy(update={"out_of_order_secs": 1000.0})
    counts = join_all(config)
    assert counts["late_actions"] == 1
    assert counts["repeated_examples"] == 1
    found = [(one.origin[1:], one.fields["key"], one.fields["value"], "correction" in one.headers)
             for one in written(tmp_path / "examples")]  # fmt: skip
    assert found[:2] == [((0, 0), "a", 0.0, False), ((0, 2), "a", 5.0, True)]


def test_another_window_needs_another_state(tmp_path: Path) -> None:
    write_events(tmp_path, SHOWN, ACTED)
    join_all(config_for(tmp_path))
    with pytest.raises(ConfigError, match=r"window_secs: the state in .* was made with 10\.0, got 20\.0"):
        join_all(config_for(tmp_path, window_secs=20))


def test_an_output_with_records_and_no_state_is_refused(tmp_path: Path) -> None:
    write_events(tmp_path, SHOWN, ACTED)
    join_all(config_for(tmp_path))
    with pytest.raises(InvalidArgumentError, match=r"examples/0 has records, but .* has no state"):
        join_all(config_for(tmp_path, state={"folder": f"{tmp_path}/other"}))


def test_streams_are_the_only_way_out(tmp_path: Path) -> None:
    """The watched stream really is what the joiner uses, or nothing above would be tested."""
    write_events(tmp_path, SHOWN, ACTED)
    mortal = Mortal(0)
    join_all(config_for(tmp_path), open_stream=mortal.open)
    stream: Stream = mortal.open(f"{tmp_path}/examples", settings=None)
    assert mortal.calls > len(written(stream.url))
