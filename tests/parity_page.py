"""The tables of docs/parity.md, and what the names in them stand for."""

from __future__ import annotations

import importlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "parity.md"


def tables() -> list[list[list[str]]]:
    """The cells of every row of every table, the header first, without the line under it."""
    found: list[list[list[str]]] = [[]]
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
        if not line.startswith("|"):
            found.append([])
        elif set("".join(cells)) != {"-"}:
            found[-1].append(cells)
    return [table for table in found if table]


def names(kind: str) -> list[list[str]]:
    """The rows of the tables whose first column is `kind` of the original."""
    return [row for table in tables() if table[0][0] == f"{kind} of the original" for row in table[1:]]


def resolved(dotted: str) -> object:
    """What a dotted name stands for, or None."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = member(found, part)
        return found
    return None


def member(owner: object, name: str) -> object:
    fields = getattr(owner, "model_fields", None) or getattr(owner, "__dataclass_fields__", {})
    return fields[name] if name in fields else getattr(owner, name, None)
