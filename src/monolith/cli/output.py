"""Output of verbs: tables and progress for people, JSON for programs."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Table

from monolith.console import Progress

__all__ = ["plain", "show", "showing_progress"]


def show(answer: Mapping[str, object], *, as_json: bool, title: str | None = None) -> None:
    """Print `answer` to stdout. JSON has null for numbers that are not finite. The table leaves out what is None."""
    console = Console(highlight=False, soft_wrap=True)
    if as_json:
        console.print(json.dumps(plain(answer), allow_nan=False), markup=False)
        return
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in _flat(answer):
        if value is None:
            continue
        # A version is a name made of digits, not a quantity.
        table.add_row(name, str(value) if name == "version" else _text(value))
    console.print(table)


def _flat(answer: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for name, value in answer.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", value))
    return rows


def _text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def plain(value: object) -> object:
    """Return `value` with None, which JSON can express, for numbers that are infinite or NaN."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def showing_progress(what: str, console: Console | None = None) -> Iterator[Progress]:
    """Yield a function that shows progress on stderr: as a bar on a terminal, elsewhere as a line for every tenth."""
    console = console or Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _Lines(what, console)
        return
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as bar:
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
