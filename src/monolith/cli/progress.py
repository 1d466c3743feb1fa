"""Progress of long commands: a bar on a terminal, a line every tenth of the way elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from monolith.console import Progress as Report

__all__ = ["showing_progress"]


@contextlib.contextmanager
def showing_progress(what: str, console: Console | None = None) -> Iterator[Report]:
    """Gives a function to call with how much is done and of how much; it writes to stderr, so that stdout stays the answer."""
    console = console or Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _Lines(what, console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _Lines:
    def __init__(self, what: str, console: Console) -> None:
        self._what, self._console, self._tenths = what, console, 0

    def __call__(self, done: int, total: int) -> None:
        tenths = 10 * done // max(total, 1)
        if tenths > self._tenths:
            self._tenths = tenths
            self._console.print(f"{self._what}: {10 * tenths}%", soft_wrap=True)
