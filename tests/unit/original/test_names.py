"""Danger: docs/parity.md says where a name of the original is, but it is not there."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import monolith.original
from parity_page import member, names, resolved

# Fields of an answer or a configuration, and keys of a JSON text: there is nothing to import.
NO_OBJECTS = {"AsyncPushHook", "EXTRA_DSWORKERS", "KDATA", "KMETA", "KTYPE", "SyncHook"}


def listed() -> list[tuple[str, str]]:
    """The public names of the original that have a home here, with the first home of each."""
    found = []
    for row in names("name"):
        homes = re.findall(r"`(monolith\.[\w.]+)`", row[1])
        for name in re.findall(r"`([\w.]+)`", row[0]):
            if homes and not name.startswith("_") and name not in NO_OBJECTS:
                found.append((name, homes[0]))
    return found


@pytest.mark.parametrize(("name", "home"), listed())
def test_every_name_of_the_original_is_what_the_page_says(name: str, home: str) -> None:
    first, *rest = name.split(".")
    found = getattr(monolith.original, first)
    if not rest:
        assert found is resolved(home)
    elif home.rpartition(".")[0].endswith(found.__name__):
        assert member(found, home.rpartition(".")[2]) is not None


def test_there_are_names_to_check() -> None:
    assert len(listed()) > 150
    assert {"MLPEnv.wait", "AdamomOptimizer", "fused_value_rowids"} <= {name for name, _ in listed()}


def test_a_name_of_a_field_has_no_object() -> None:
    assert set(monolith.original.__all__) & NO_OBJECTS == set()


def test_names_are_listed_before_they_are_loaded() -> None:
    assert {"MLPEnv", "AdamomOptimizer"} <= set(dir(monolith.original))
    assert "import_module" not in dir(monolith.original)


def test_one_name_does_not_load_everything() -> None:
    script = "from monolith.original import get_local_host; import sys; assert 'monolith.train' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_what_the_original_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'monolith.original' has no attribute 'MlpEnv'"):
        monolith.original.MlpEnv  # noqa: B018
