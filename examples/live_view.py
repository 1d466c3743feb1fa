"""What `06_live.py` shows while the loop runs: one view on a terminal, lines elsewhere."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from live.world_clock import HISTORY_BATCHES
from live_numbers import GAP, LABEL, favourite, plain, rows
from rich.console import Console, ConsoleOptions
from rich.text import Text

PLAIN_SECS, SHOWN_PROBLEMS = 5.0, 3
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
