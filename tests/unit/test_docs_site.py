"""Danger: a public name, a field or a command without a place in the reference, or a page that nobody finds.

`make docs` builds the site. These tests check what it is built from, in seconds. The build itself is a slow test.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from monolith.cli import _VERBS

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SITE))
    return importlib.import_module("reference")


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SITE))
    return importlib.import_module("stage")


def test_every_exported_name_is_in_the_reference_exactly_once(reference: ModuleType) -> None:
    pages = reference.api_pages()
    text = "\n".join(pages.values())
    documented = Counter(re.findall(r"^\.\. (?:auto(?!module)\w+|py:data):: (\S+)$", text, re.MULTILINE))
    assert [name for name, count in documented.items() if count != 1] == []
    exported = {(name, each) for name, package in reference.public_packages().items() for each in package.__all__}
    assert len(exported) > 600
    homes = reference.documented()
    assert set(homes) == exported
    for package, name in sorted(exported):
        home = ".".join(homes[package, name])
        value = getattr(importlib.import_module(package), name)
        assert home in documented or f".. automodule:: {getattr(value, '__name__', '')}" in text, f"{package}.{name}"
        linked = f"| `{package}.{name}` | {{py:obj}}`{home}` |"
        assert (linked in pages[package]) == (homes[package, name] != (package, name))


def test_a_name_is_documented_in_its_own_package(reference: ModuleType) -> None:
    homes = reference.documented()
    assert homes["monolith", "EmbeddingBagCollection"] == ("monolith.nn", "EmbeddingBagCollection")
    assert homes["monolith.original", "ServiceDiscovery"] == ("monolith.cluster", "ServiceDiscovery")
    assert homes["monolith", "ConfigError"] == ("monolith.errors", "ConfigError")


def test_a_constant_without_a_text_is_an_error(reference: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference.attribute_docstring("monolith.streams", "END")
    monkeypatch.setattr(importlib.import_module("monolith.streams"), "END", 10**20)
    with pytest.raises(LookupError, match=r"monolith\.streams\.END has no docstring"):
        reference.attribute_docstring("monolith.streams", "END")


def test_the_page_of_the_commands_has_every_verb_with_its_options(reference: ModuleType) -> None:
    page = reference.cli_page()
    named = set(re.findall(r"^## `monolith ([\w-]+)`$", page, re.MULTILINE))
    assert named == set(_VERBS)
    assert "### `monolith rollout rollback`" in page
    assert "| `--metrics-port <int range>` | Port on loopback for /metrics" in page


def test_every_page_is_in_the_navigation_once(stage: ModuleType) -> None:
    groups = stage.navigation((ROOT / "docs/index.md").read_text())
    named = Counter(place for group in groups.values() for place in group)
    pages = set(stage.pages().values()) - {"index"}
    missing = sorted(pages - set(named))
    assert missing == [], f"docs/index.md does not name {missing}: add a line with the question that the page answers"
    assert [page for page, count in named.items() if count > 1] == []


def test_every_line_of_the_navigation_is_a_question() -> None:
    index = (ROOT / "docs/index.md").read_text()
    lines = re.findall(r"^- \[.*\]\(.*\): (.*)$", index, re.MULTILINE)
    assert len(lines) == len(re.findall(r"^- ", index, re.MULTILINE)) > 40
    assert [line for line in lines if not line.endswith("?")] == []


def test_a_page_that_is_in_no_group_is_still_on_the_site(stage: ModuleType, tmp_path: Path) -> None:
    assert "glossary" in [
        place for places in stage.navigation("## A\n- [G](glossary.md): what?").values() for place in places
    ]
    stage.main(tmp_path / "site")
    index = (tmp_path / "site" / "index.md").read_text()
    trees = re.findall(r"```\{toctree\}.*?```", index, re.DOTALL)
    for place in stage.pages().values():
        assert (tmp_path / "site" / f"{place}.md").is_file()
        assert place == "index" or sum(f" <{place}>\n" in tree for tree in trees) == 1, place


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_asks_nobody_else(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="needs sphinx, furo and myst-parser: make docs installs them")
    for command in (
        [sys.executable, str(SITE / "stage.py"), str(tmp_path / "source")],
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(tmp_path / "source"), str(tmp_path / "html")],
    ):
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
    loaded = re.compile(
        r"<(?:script|img|iframe)[^>]*\ssrc=\"(?:https?:)?//|<link[^>]*stylesheet[^>]*href=\"(?:https?:)?//|url\(\"?(?:https?:)?//"
    )
    pages = [path for kind in ("*.html", "*.css") for path in (tmp_path / "html").rglob(kind)]
    assert len(pages) > 70
    assert [str(page) for page in pages if loaded.search(page.read_text(errors="replace"))] == []
