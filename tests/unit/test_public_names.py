"""Danger: a name that is promised and missing, public by accident, or explained by an example that no longer runs."""

from __future__ import annotations

import doctest
import importlib
import importlib.resources
import inspect
import pkgutil
import subprocess
import sys
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


# What a package offers, as opposed to what its modules share among themselves.
PACKAGES = [name for name, module in MODULES.items() if hasattr(module, "__path__") and hasattr(module, "__all__")]
PACKAGES.append("monolith.models")
PUBLIC = [(package, name) for package in PACKAGES for name in MODULES[package].__all__]


def test_the_top_level_stays_small_enough_to_read() -> None:
    assert 10 <= len(monolith.__all__) <= 25


def test_every_package_offers_names() -> None:
    needed = (
        "cli",
        "cluster",
        "data",
        "data.transforms",
        "features",
        "log",
        "metrics",
        "nn",
        "optim",
        "serve",
        "table",
        "train",
        "train.hooks",
    )
    assert {f"monolith.{name}" for name in needed} <= set(PACKAGES)


def test_names_that_are_loaded_when_asked_for_are_those_of_their_home() -> None:
    script = (
        "import monolith, sys\n"
        "assert set(monolith.__all__) <= set(dir(monolith))\n"
        "assert 'monolith.train' not in sys.modules, 'train came with the package'\n"
        "for name, home in monolith._HOMES.items():\n"
        "    assert getattr(monolith, name) is getattr(sys.modules[home], name), name\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=300)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'monolith' has no attribute 'Estimater'"):
        monolith.Estimater  # type: ignore[attr-defined] # noqa: B018


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
