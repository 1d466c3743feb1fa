"""Danger: a name that is promised and missing, public by accident, or explained by an example that no longer runs."""

from __future__ import annotations

import doctest
import importlib
import importlib.resources
import inspect
import pkgutil
from types import ModuleType

import pytest

import monolith


def modules() -> list[ModuleType]:
    """Every Python module of the package that imports without an optional dependency."""
    found = [monolith]
    for info in pkgutil.walk_packages(monolith.__path__, prefix="monolith."):
        if not info.name.endswith("._core"):
            found.append(importlib.import_module(info.name))
    return found


MODULES = {module.__name__: module for module in modules()}


PUBLIC = [(module, name) for module in ("monolith", "monolith.table") for name in MODULES[module].__all__]


def test_the_top_level_stays_small_enough_to_read() -> None:
    assert 10 <= len(monolith.__all__) <= 25


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_public_name_exists_and_is_documented(module: str, name: str) -> None:
    value = getattr(MODULES[module], name)
    assert (inspect.getdoc(value) or "").strip(), f"{module}.{name} has no docstring"
    assert value.__doc__, f"{module}.{name} only inherits its docstring"


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_public_methods_are_documented(module: str, name: str) -> None:
    value = getattr(MODULES[module], name)
    if not inspect.isclass(value):
        return
    undocumented = [
        member
        for member, attribute in vars(value).items()
        if not member.startswith("_")
        and (inspect.isfunction(attribute) or isinstance(attribute, property | classmethod))
        and not inspect.getdoc(getattr(value, member, attribute))
    ]
    assert undocumented == []


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_for_and_keeps_its_all_true(name: str) -> None:
    module = MODULES[name]
    assert module.__doc__
    names = getattr(module, "__all__", [])
    assert names == sorted(set(names))
    assert [missing for missing in names if not hasattr(module, missing)] == []


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name: str) -> None:
    results = doctest.testmod(MODULES[name], optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0, f"{results.failed} of {results.attempted} examples in {name} failed, see above"


def test_there_are_examples_to_run() -> None:
    finder = doctest.DocTestFinder()
    examples = sum(len(test.examples) for module in MODULES.values() for test in finder.find(module))
    assert examples >= 20


def test_the_package_is_typed() -> None:
    assert importlib.resources.files(monolith).joinpath("py.typed").is_file()
