"""Danger: the page that says what is done names files that are not there, or calls done what nothing tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parity_page import ROOT, names, resolved, tables

LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def rows() -> list[list[str]]:
    """The rows of the tables that say how far something is."""
    return [row for table in tables() if table[0][2] == "status" for row in table[1:]]


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


@pytest.mark.parametrize(("kind", "count"), [("name", 209), ("field", 125)])
def test_every_name_has_a_home_that_exists_or_a_reason(kind: str, count: int) -> None:
    found = names(kind)
    assert len(found) == count
    for row in found:
        assert len(row) == 3, row
        name, home, reason = row
        homes = re.findall(r"`([\w.]+)`", home)
        assert homes or LINK.findall(home) or (home == "—" and reason), name
        for dotted in homes:
            assert resolves(dotted), f"{name}: there is no {dotted}"
        for dotted in re.findall(r"`(monolith\.[\w.]+)`", reason):
            assert resolves(dotted), f"{name}: there is no {dotted}"


def test_no_field_is_listed_twice() -> None:
    fields = [row[0] for row in names("field")]
    assert len(set(fields)) == len(fields)


def resolves(dotted: str) -> bool:
    """Whether a dotted name is a module, something in one, or a field or attribute of a class."""
    return resolved(dotted) is not None


def test_a_name_that_is_not_there_does_not_resolve() -> None:
    assert resolves("monolith.train.RunConfig.restore_dir")
    assert resolves("monolith.original.mlp_scheduler.HandOver.servers")
    for wrong in ("monolith.train.RunConfig.num_ps", "monolith.train.Nothing", "monolith.nothing", "nothing"):
        assert not resolves(wrong)
