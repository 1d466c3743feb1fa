"""Danger: the page that says what is done names files that are not there, or calls done what nothing tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "parity.md"
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def rows() -> list[list[str]]:
    """The cells of every row of every table, without headers."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if set("".join(row)) != {"-"} and row[2:3] != ["status"]]


@pytest.mark.parametrize("page", ["parity.md", "differences.md"])
def test_every_file_that_is_named_exists(page: str) -> None:
    links = [link for link in LINK.findall((ROOT / "docs" / page).read_text()) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_every_row_says_where_and_how_far() -> None:
    assert len(rows()) > 100
    for row in rows():
        assert len(row) == 4, row
        assert re.match(r"\*\*(done|partly)\*\*|planned|ours|absent", row[2]), row


def test_what_is_done_has_a_test_and_what_is_planned_has_none() -> None:
    for name, _, status, tests in rows():
        done = status.startswith(("**done**", "**partly**", "ours"))
        assert bool(LINK.findall(tests)) == done, name
        assert all(Path(link).name.endswith((".py", ".cc")) for link in LINK.findall(tests)), name


def test_what_is_named_in_code_type_exists_in_the_package() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for name, home, status, _ in rows():
        if status.startswith(("**done**", "ours")) and not LINK.search(home):
            for word in re.findall(r"`([A-Za-z_.]+)`", home):
                assert word.split(".")[-1] in source, f"{name}: {word}"
