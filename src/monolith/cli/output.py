"""Answers of read commands: a table for people, JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

__all__ = ["plain", "show"]


def show(answer: Mapping[str, object], *, as_json: bool, title: str | None = None) -> None:
    """Print `answer` to stdout. JSON has null for numbers that it cannot express. The table leaves out what is None."""
    console = Console(highlight=False, soft_wrap=True)
    if as_json:
        console.print(json.dumps(plain(answer), allow_nan=False), markup=False)
        return
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in _flat(answer):
        if value is None:
            continue
        # A version is a name made of digits, not an amount.
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
    """`value` as JSON can say it: a number that is infinite or not a number becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
