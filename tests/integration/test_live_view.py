"""Danger: the first screen that a user sees falls apart as its curves grow, shows old numbers, or says nothing for minutes."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = "http://127.0.0.1:54321/"


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def live_view(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module("live_view")


@pytest.fixture
def make(live_view: ModuleType) -> Callable[..., Any]:
    def made(*, width: int, terminal: bool, clock: Clock | None = None) -> Any:  # noqa: ANN401 - a module without types
        console = Console(file=StringIO(), width=width, height=24, force_terminal=terminal, color_system=None)
        return live_view.View(console, PAGE, ["monolith stream create x", "monolith train job.yaml"], clock or Clock())

    return made


def report(second: int, auc: float = 0.75) -> dict[str, object]:
    """What the site says after so many seconds: large numbers, so that lines are long."""
    numbers = {
        "time": float(second),
        "impressions": 30_000_000 + 15_000 * second,
        "clicks": 4_000_000 + 2_000 * second,
        "lag_ms": 12345.0,
        "auc": {"online": auc, "frozen": 0.5, "best": 1.0},
        "turned": 6.0 * second,
        "click_rate": {"ranked": 0.3, "random": 0.1},
        "new_item": {"item": 123456, "age_secs": 59.0, "offers": 12345, "wins": 6000},
    }
    return {
        "event": "line",
        "role": "site",
        "text": json.dumps({"report": numbers, "fresh_ms": 12345.0}),
    }


def screen(view: Any) -> list[str]:  # noqa: ANN401 - a module without types
    with view.console.capture() as capture:
        view.console.print(view)
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
def test_each_line_stays_whole_and_at_its_place_while_the_curves_grow(width: int, make: Callable[..., Any]) -> None:
    view = make(width=width, terminal=True)
    places = set()
    for second in range(1, 201):
        view.take(report(second))
        lines = screen(view)
        assert len(lines) <= 24
        assert not any("…" in line for line in lines), lines
        (online,) = (line for line in lines if line.startswith("  online"))
        places.add((len(lines), online.index("0.750"), tuple(line[:23] for line in lines[2:9])))
    assert len(places) == 1, places
    assert PAGE in lines[0]


@pytest.mark.parametrize("width", [80, 120])
def test_a_curve_ends_with_the_newest_value(width: int, make: Callable[..., Any]) -> None:
    view = make(width=width, terminal=True)
    for second in range(1, 200):
        view.take(report(second, auc=0.5))
    view.take(report(200, auc=1.0))
    (online,) = (line for line in screen(view) if line.startswith("  online"))
    bars = online.removesuffix("learns on").rstrip()
    assert bars.endswith("█")
    assert bars.count("█") == 1


def test_an_error_longer_than_the_screen_does_not_wrap(make: Callable[..., Any]) -> None:
    view = make(width=80, terminal=True)
    view.take({"event": "failed", "role": "trainer", "reason": "x" * 500})
    view.take(report(1))
    *_, last = screen(view)
    assert last.startswith("trainer failed: xxx")
    assert last.endswith("…")


def test_the_training_on_the_history_shows_how_far_it_is(make: Callable[..., Any]) -> None:
    clock = Clock()
    view = make(width=80, terminal=True, clock=clock)
    view.take({"event": "started", "role": "prepare 1"})
    clock.now = 30.0
    view.take({"event": "line", "role": "prepare 1", "text": "step       40  loss 0.31  AUC 0.81"})
    assert screen(view) == ["training on the history of a minute: 40 of 146 batches, 30 s ..."]


def test_the_end_is_announced_before_any_part_has_ended(make: Callable[..., Any]) -> None:
    view = make(width=80, terminal=True)
    for role in ("trainer", "replica"):
        view.take({"event": "started", "role": role})
    view.take(report(1))
    before = screen(view)
    assert not any("ending" in line for line in before)
    view.end()
    assert screen(view) == [before[0], "ending the parts: trainer, replica ...", *before[2:]]
    view.take({"event": "ended", "role": "trainer"})
    assert screen(view)[1] == "ending the parts: replica ..."


def test_without_a_terminal_nothing_is_silent_for_long_and_no_line_comes_twice(make: Callable[..., Any]) -> None:
    clock = Clock()
    view = make(width=80, terminal=False, clock=clock)
    view.take({"event": "started", "role": "prepare 1"})
    for _ in range(3):
        clock.now += 5.0
        view.wait()
    view.take(report(1))  # right after another line
    clock.now += 5.0
    view.take(report(2))
    view.end()
    view.last()
    lines = view.console.file.getvalue().splitlines()
    assert lines[:4] == [
        "training on the history of a minute ...",
        *(f"training on the history of a minute, {secs} s ..." for secs in (5, 10, 15)),
    ]
    assert [line.partition(" ")[0] for line in lines[4:]] == ["30,030,000", "ending"]
    view.take(report(3))
    view.last()
    assert view.console.file.getvalue().splitlines()[-1].startswith("30,045,000 impressions")


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("secs", [0.0, 3600.0])
def test_the_first_lines_fit_and_name_the_page(live_view: ModuleType, secs: float, continues: bool) -> None:
    lines = live_view.introduction(secs, PAGE, continues=continues).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith(f"page    {PAGE}") for line in lines)
