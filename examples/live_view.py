"""What `06_live.py` shows: one view on a terminal, lines elsewhere, and an HTML report at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from demo_report import figures, heading, page
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from svg_chart import line_chart

BARS, PLAIN_SECS = " ▁▂▃▄▅▆▇█", 5.0
INTRODUCTION = (
    "Users' tastes drift, and new items keep appearing. Each item shown at random is scored by three models before anybody knows "
    "whether it is clicked: by the one that learns from every click, by the one that stopped learning when the site opened, and "
    "by the true chances, which nobody can beat."
)
STARTING = {
    "prepare": "training on the history of a minute",
    "trainer": "the trainer continues on the stream",
    "replica": "the replica follows the trainer",
    "site": "the site opens",
}


class View:
    """What is shown, on a terminal as one view, elsewhere as lines."""

    def __init__(self, console: Console, page: str) -> None:
        self.console, self.page = console, page
        self.reports: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.state = "starting"
        self._said = 0.0

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in an event of the launcher."""
        role = str(event.get("role", ""))
        if event["event"] == "started":
            self._say(STARTING.get(role.partition(" ")[0], f"{role} starts"))
        elif event["event"] in ("restarting", "failed", "killed"):
            self.problems.append(f"{role} {event['event']}: {event.get('reason') or event.get('code')}")
            self._say(self.problems[-1])
        elif event["event"] == "line" and role == "site" and event["text"].startswith('{"report"'):
            said = json.loads(event["text"])
            self.reports.append({**said["report"], "fresh_ms": said["fresh_ms"]})
            if not self.console.is_terminal and time.monotonic() >= self._said + PLAIN_SECS:
                self._said = time.monotonic()
                self.console.print(plain(self.reports[-1]), soft_wrap=True)

    def _say(self, text: str) -> None:
        changed, self.state = text != self.state, text
        if changed and not self.console.is_terminal:
            self.console.print(text, soft_wrap=True)

    def __rich__(self) -> Group:
        if not self.reports:
            return Group(Text(f"{self.state} ...", style="dim"))
        now, grid = self.reports[-1], Table.grid(padding=(0, 3))
        for name, values in rows(self.reports):
            grid.add_row(Text(name, style="dim"), *values)
        title = Text.assemble(("Monolith, live", "bold"), f"   page {self.page}   Ctrl-C ends it")
        parts: list[Any] = [title, "", grid, "", Text(favourite(now))]
        return Group(*parts, *(Text(problem, style="yellow") for problem in self.problems[-3:]))


def rows(reports: list[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Yield the lines of the view."""
    now, before = reports[-1], reports[max(len(reports) - 6, 0)]
    secs = max(now["time"] - before["time"], 1e-9)
    speed = [f"{(now[name] - before[name]) / secs:,.0f} {name}/s" for name in ("impressions", "clicks")]
    yield "site", [*speed, f"{now['impressions']:,} impressions so far"]
    yield "a click is in the answers after", [milliseconds(now["fresh_ms"]), "joined, trained and served; median"]
    yield "the replica is behind training by", [milliseconds(now["lag_ms"]), ""]
    if now["auc"]:
        yield "AUC of the last ten seconds", ["", ""]
        for name, said in {
            "online": "learns on",
            "frozen": "stopped at the start",
            "best": "by the true chances",
        }.items():
            yield f"  {name}", [f"{now['auc'][name]:.3f} {sparkline([r['auc'].get(name) for r in reports])}", said]
    rates = now["click_rate"]
    yield "clicks per impression", [f"{rates['ranked']:.1%} ranked", f"{rates['random']:.1%} at random"]


def sparkline(values: list[float | None], low: float = 0.5, high: float = 1.0) -> str:
    """Draw the last values as bars."""
    known = [value for value in values if value is not None][-30:]
    steps = [round((len(BARS) - 1) * (min(max(value, low), high) - low) / (high - low)) for value in known]
    return "".join(BARS[step] for step in steps)


def milliseconds(value: float | None) -> str:
    """Return a duration as text."""
    return "-" if value is None else f"{value:,.0f} ms"


def favourite(now: Mapping[str, Any]) -> str:
    """Say which new item is recommended most."""
    new = now["new_item"]
    if new is None:
        return "no item of the last minute was on offer often enough yet"
    return (
        f"item {new['item']} did not exist {new['age_secs']:.0f} s ago: of {new['offers']} users who could get it, "
        f"{new['wins'] / new['offers']:.0%} are shown it first (by chance {1 / 20:.0%})"
    )


def plain(now: Mapping[str, Any]) -> str:
    """Return the state as one line."""
    aucs = ", ".join(f"{name} {value:.3f}" for name, value in now["auc"].items())
    return (
        f"{now['impressions']:,} impressions, {now['clicks']:,} clicks; a click is in the answers after "
        f"{milliseconds(now['fresh_ms'])}; AUC {aucs}; {favourite(now)}"
    )


def write_report(path: Path, reports: list[dict[str, Any]]) -> bool:
    """Write the curves of the run as one HTML page. Returns False if it was too short for curves."""
    measured = [report for report in reports if report["auc"] and report["fresh_ms"] is not None]
    if len(measured) < 2:
        return False
    last = reports[-1]
    seconds = [report["time"] - reports[0]["time"] for report in measured]
    curves = {name: [report["auc"][name] for report in measured] for name in ("online", "frozen", "best")}
    path.write_text(
        page(
            "Monolith, live",
            heading("A model that learns while it serves", INTRODUCTION, level=1),
            figures(
                {
                    **{f"AUC, {name}": f"{value:.3f}" for name, value in last["auc"].items()},
                    "from a click to the next answer": milliseconds(last["fresh_ms"]),
                    "impressions": f"{last['impressions']:,}",
                }
            ),
            heading("AUC", "Of the ten seconds before, on items shown at random."),
            line_chart("seconds", seconds, curves, form=".3f"),
            heading("From a click to an answer that has learnt from it", "Milliseconds, median of the last 30."),
            line_chart("seconds", seconds, {"ms": [report["fresh_ms"] for report in measured]}, form=",.0f"),
            heading("New items", favourite(last)),
        )
    )
    return True
