"""What `06_live.py` shows: one view on a terminal, lines elsewhere, and an HTML report at the end."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from demo_report import figures, heading, page
from live.world_clock import HISTORY_BATCHES
from rich.console import Console, ConsoleOptions
from rich.text import Text
from svg_chart import line_chart

BARS, PLAIN_SECS, SHOWN_PROBLEMS = " ▁▂▃▄▅▆▇█", 5.0, 3
LABEL, GAP = 21, 2
"""Columns of the labels, so that they stay where they are while the curves grow."""
MOST_BARS = 60
INTRODUCTION = (
    "Users' tastes drift, and new items keep appearing. Each item shown at random is scored by three models before anybody knows "
    "whether it is clicked: by the one that learns from every click, by the same model as it was when the site opened, and by "
    "the true chances, which nobody can beat."
)
PREPARING = {
    "monolith stream": "making the streams",
    "monolith train": "training on the history of a minute",
    "monolith export": "freezing the model that the site opens with",
}
STARTING = {
    "joiner": "the joiner starts",
    "trainer": "the trainer continues on the stream",
    "replica": "the replica follows the trainer",
    "site": "the site opens",
}
AUCS = {"online": "learns on", "frozen": "as at the start", "best": "true chances"}


def introduction(secs: float, page: str, *, continues: bool) -> str:
    """Return what is going to happen, how long it takes, and where to look, in lines that fit on a narrow terminal."""
    begins = "goes on from where it was" if continues else "first learns a minute of history"
    how_long = f"for {secs:g} s" if secs else "until Ctrl-C"
    return (
        "A site that is made up shows items. A model learns from each click, and ranks\n"
        f"for the site. It {begins}, then four processes start:\n"
        f"half a minute, more on a busy machine. Open {how_long}, then a report.\n"
        f"page    {page} as soon as the site is open"
    )


class View:
    """What is shown, on a terminal as one view, elsewhere as lines."""

    def __init__(
        self, console: Console, page: str, prepare: Sequence[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Show a loop whose commands in `prepare` run first, and whose replica has its page at the address `page`."""
        self.console, self.page = console, page
        self.reports: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.running: dict[str, None] = {}  # in the order in which they were started
        self.state, self.done, self.ending = "starting", "", False
        self._prepare, self._clock = prepare, clock
        self._since = self._said = clock()
        self._printed: dict[str, Any] | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        """Take in an event of the launcher."""
        role, kind = str(event.get("role", "")), event["event"]
        if kind == "started":
            self._say(self._starts(role))
            if not role.startswith("prepare"):
                self.running[role] = None
        elif kind == "ended":
            self.running.pop(role, None)
            self.end()  # the site has closed, or the parts were asked to end
        elif kind in ("restarting", "failed", "killed"):
            self.running.pop(role, None)
            self.problems.append(f"{role} {kind}: {event.get('reason') or event.get('code')}")
            self._say(self.problems[-1])
        elif kind == "line" and role == "site" and event["text"].startswith('{"report"'):
            said = json.loads(event["text"])
            self.reports.append({**said["report"], "fresh_ms": said["fresh_ms"]})
            if self._say_sometimes(plain(self.reports[-1])):
                self._printed = self.reports[-1]
        elif kind == "line" and role.startswith("prepare"):
            self._take_progress(event["text"])

    def _take_progress(self, text: str) -> None:
        if step := re.match(r"step +(\d+)", text):
            self.done = f": {step[1]} of {HISTORY_BATCHES} batches"
            self._say_sometimes(f"{self._state()} ...")

    def wait(self) -> None:
        """Say that the loop still runs, when no event has come for a while."""
        if not self.reports:
            self._say_sometimes(f"{self._state()} ...")

    def end(self) -> None:
        """Say that the parts are ending."""
        began, self.ending = not self.ending, True
        if began and not self.console.is_terminal:
            self._print(self._ending())

    def last(self) -> None:
        """Print the last numbers, unless they have just been printed."""
        if self.reports and self.reports[-1]["auc"] and self.reports[-1] is not self._printed:
            self._print(plain(self.reports[-1]))

    def _starts(self, role: str) -> str:
        name, _, number = role.partition(" ")
        if name == "prepare" and int(number) < len(self._prepare):
            command = self._prepare[int(number)]
            return PREPARING.get(" ".join(command.split()[:2]), command)
        return STARTING.get(name, f"{role} starts")

    def _ending(self) -> str:
        return f"ending the parts: {', '.join(self.running)} ..." if self.running else "ending ..."

    def _state(self) -> str:
        return f"{self.state}{self.done}, {self._clock() - self._since:.0f} s"

    def _say(self, text: str) -> None:
        if text == self.state:
            return
        self.state, self.done, self._since = text, "", self._clock()
        if not self.console.is_terminal:
            self._print(f"{text} ...")

    def _say_sometimes(self, text: str) -> bool:
        due = not self.console.is_terminal and self._clock() >= self._said + PLAIN_SECS
        if due:
            self._print(text)
        return due

    def _print(self, text: str) -> None:
        self._said = self._clock()
        self.console.print(text, soft_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in self._lines(options.max_width):
            # A terminal that is too narrow loses the end of a line, not the shape of the view.
            line.no_wrap, line.overflow = True, "ellipsis"
            yield line

    def _lines(self, width: int) -> Iterator[Text]:
        if not self.reports:
            yield Text(self._ending() if self.ending else f"{self._state()} ...", style="dim")
        else:
            now = self.reports[-1]
            yield Text.assemble(("Monolith, live", "bold"), f"   page {self.page}   Ctrl-C ends it")
            yield Text(self._ending() if self.ending else "", style="bold")
            for name, value in rows(self.reports, width - LABEL - GAP):
                yield Text.assemble((name.ljust(LABEL + GAP), "dim"), value)
            yield Text()
            yield from map(Text, favourite(now))
        yield from (Text(problem, style="yellow") for problem in self.problems[-SHOWN_PROBLEMS:])


def rows(reports: list[dict[str, Any]], width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of the view: a label, and what is said in `width` columns."""
    now, before = reports[-1], reports[max(len(reports) - 6, 0)]
    secs = max(now["time"] - before["time"], 1e-9)
    speed = [f"{(now[name] - before[name]) / secs:,.0f} {name}/s" for name in ("impressions", "clicks")]
    yield "site", "   ".join([*speed, f"{now['impressions']:,} so far"])
    yield "click to answer", f"{milliseconds(now['fresh_ms'])}   joined, trained and served; median"
    yield "replica behind by", milliseconds(now["lag_ms"])
    if now["auc"]:
        yield "AUC of ten seconds", f"same impressions for all; tastes have turned by {now['turned']:.0f}°"
        # "0.812 ", the bars, and what the curve is.
        bars = min(width - 6 - GAP - max(map(len, AUCS.values())), MOST_BARS)
        for name, said in AUCS.items():
            line = sparkline([report["auc"].get(name) for report in reports], bars)
            yield f"  {name}", f"{now['auc'][name]:.3f} {line}{' ' * GAP}{said}"
    rates = now["click_rate"]
    yield "clicks/impression", f"{rates['ranked']:.1%} ranked   {rates['random']:.1%} at random"


def sparkline(values: Sequence[float | None], most: int, low: float = 0.5, high: float = 1.0) -> str:
    """Draw the last values as bars, `most` at most."""
    known = [value for value in values if value is not None][-max(most, 1) :]
    steps = [round((len(BARS) - 1) * (min(max(value, low), high) - low) / (high - low)) for value in known]
    return "".join(BARS[step] for step in steps)


def milliseconds(value: float | None) -> str:
    """Return a duration as text."""
    return "-" if value is None else f"{value:,.0f} ms"


def favourite(now: Mapping[str, Any]) -> tuple[str, str]:
    """Say which new item is recommended most, in two lines."""
    new = now["new_item"]
    if new is None:
        return "no item of the last minute was on offer often enough yet", ""
    return (
        f"item {new['item']} did not exist {new['age_secs']:.0f} s ago:",
        f"of {new['offers']} users who could get it, {new['wins'] / new['offers']:.0%} are shown it first "
        f"(by chance {1 / 20:.0%})",
    )


def plain(now: Mapping[str, Any]) -> str:
    """Return the state as one line."""
    aucs = ", ".join(f"{name} {value:.3f}" for name, value in now["auc"].items())
    return (
        f"{now['impressions']:,} impressions, {now['clicks']:,} clicks; a click is in the answers after "
        f"{milliseconds(now['fresh_ms'])}; AUC {aucs}; {' '.join(favourite(now)).rstrip()}"
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
            heading("New items", " ".join(favourite(last))),
        )
    )
    return True
