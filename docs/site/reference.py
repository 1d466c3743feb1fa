"""The generated pages of the site: every public name from its docstring, and every command from its help."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import typer

import monolith
from monolith.cli import _VERBS, _add
from monolith.config import Config

__all__ = ["Name", "api_pages", "cli_page", "documented", "public_packages"]

EXTENSION_CONSTANTS = {"NUM_BUCKETS": "Buckets of ids, the unit in which rows move between servers and ranks."}
"""What a C++ constant is: only Python source has docstrings of constants."""
Name = tuple[str, str]
"""A package and a name of its `__all__`."""


def public_packages() -> dict[str, ModuleType]:
    """Return what exports names to users, by name: the packages, and two modules that are in none."""
    names = [info.name for info in pkgutil.walk_packages(monolith.__path__, "monolith.") if info.ispkg]
    packages = {
        name: importlib.import_module(name)
        for name in ("monolith", "monolith.errors", "monolith.models", *sorted(names))
    }
    return {name: package for name, package in packages.items() if hasattr(package, "__all__")}


def documented() -> dict[Name, Name]:
    """Return, for every exported name, the one under which the reference documents it.

    An object that several packages export is documented in the package that defines it. A constant has no identity: each package
    documents its own.
    """
    exports: dict[object, list[Name]] = {}
    for package, module in public_packages().items():
        for name in module.__all__:
            value = getattr(module, name)
            has_identity = inspect.isclass(value) or inspect.isroutine(value)
            exports.setdefault(id(value) if has_identity else (package, name), []).append((package, name))
    return {export: min(same, key=_distance) for same in exports.values() for export in same}


def _distance(export: Name) -> tuple[bool, bool, int, Name]:
    """Order exports of one object: its own package first, the packages for newcomers and for the original last."""
    package, name = export
    home = getattr(getattr(importlib.import_module(package), name), "__module__", None) or ""
    inside = home == package or home.startswith(f"{package}.")
    return package in ("monolith", "monolith.original"), not inside, -len(package), export


def api_pages() -> dict[str, str]:
    """Return the pages of the API reference as MyST Markdown, by the name of their package."""
    homes = documented()
    return {name: "\n".join(_page(name, package, homes)) for name, package in public_packages().items()}


def _page(package: str, module: ModuleType, homes: dict[Name, Name]) -> Iterator[str]:
    own = [name for name in module.__all__ if homes[package, name] == (package, name)]
    others = [name for name in module.__all__ if name not in own]
    yield f"# {package}\n"
    yield from _rst(f".. automodule:: {package}", "   :no-members:")
    if others:
        yield "These names of the package are documented where they are defined:\n"
        yield "| name | documented as |\n|---|---|"
        for name in others:
            home = ".".join(homes[package, name])
            yield f"| `{package}.{name}` | {{py:obj}}`{home}` |"
        yield ""
    for name in own:
        yield f"## {name}\n"
        yield from _rst(*_directive(package, name, getattr(module, name)))


def _directive(package: str, name: str, value: object) -> list[str]:
    path = f"{package}.{name}"
    if inspect.ismodule(value):
        return [f".. automodule:: {value.__name__}", "   :members:"]
    if inspect.isclass(value):
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        lines = [f".. {kind}:: {path}", "   :members:", "   :show-inheritance:"]
        if issubclass(value, Config):  # every field, also one whose name says it all
            lines += ["   :undoc-members:", "   :exclude-members: model_config, config_group, model_post_init"]
        return lines
    if inspect.isroutine(value):
        return [f".. autofunction:: {path}"]
    # A constant or an alias: what its own __doc__ says is about int, str or dict.
    text = [f"   {line}" for line in attribute_docstring(package, name)]
    return [f".. py:data:: {path}", f"   :value: {value!r}", "", *text, ""]


def attribute_docstring(package: str, name: str) -> list[str]:
    """Return the text below the assignment of a module's name. Raises `LookupError` where there is none."""
    if name in EXTENSION_CONSTANTS:
        return [EXTENSION_CONSTANTS[name]]
    value = getattr(importlib.import_module(package), name)
    for module in [module for key, module in sorted(sys.modules.items()) if key.startswith("monolith.")]:
        if vars(module).get(name) is value and (module.__file__ or "").endswith(".py"):
            for assigned, below in pairwise(ast.parse(inspect.getsource(module)).body):
                targets = getattr(assigned, "targets", [getattr(assigned, "target", None)])
                is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                if is_text and any(getattr(target, "id", "") == name for target in targets):
                    return inspect.cleandoc(below.value.value).splitlines()
    raise LookupError(f"{package}.{name} has no docstring below its assignment")


def _rst(*lines: str) -> list[str]:
    return ["```{eval-rst}", *lines, "```\n"]


def cli_page() -> str:
    """Return the reference of the command line as Markdown."""
    app = typer.Typer(rich_markup_mode=None)
    for verb in _VERBS:
        _add(app, verb)
    program: Any = typer.main.get_command(app)
    lines = ["# Command line\n", "Which commands are there, and what are their options?\n"]
    lines.append("`monolith COMMAND --help` prints the same.\n")
    for name, command in program.commands.items():
        lines += _command(f"monolith {name}", command, depth=2)
    return "\n".join(lines)


def _command(path: str, command: Any, *, depth: int) -> Iterator[str]:  # noqa: ANN401 - click is vendored by typer
    yield f"{'#' * depth} `{path}`\n"
    yield inspect.cleandoc(command.help or "") + "\n"
    subcommands = getattr(command, "commands", None)
    if subcommands:
        for name, inner in subcommands.items():
            yield from _command(f"{path} {name}", inner, depth=depth + 1)
        return
    with command.make_context(path, [], resilient_parsing=True) as context:
        yield f"```text\n{' '.join([path, *command.collect_usage_pieces(context)])}\n```\n"
        rows = [record for parameter in command.params if (record := parameter.get_help_record(context))]
    if rows:
        yield "| argument or option | |\n|---|---|"
        for given, text in rows:
            shown = given.replace("|", "\\|")
            yield f"| `{shown}` | {' '.join(text.split()).replace('|', chr(92) + '|').replace('<', '&lt;')} |"
        yield ""
