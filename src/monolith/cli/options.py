"""Options that several verbs share, and what their values stand for: sizes, YAML files, things in modules."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from monolith.config import nearest_name
from monolith.errors import ConfigError, StorageError

__all__ = ["Json", "Sets", "Target", "Untrained", "named", "read_yaml", "set_field", "size_in_bytes"]

Target = Annotated[str, typer.Argument(help="A YAML file, or module:Model.", metavar="TARGET")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a field of the configuration, such as run.clip_norm=10. May be repeated.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON instead of text.")]
Untrained = Annotated[
    bool,
    typer.Option("--untrained", help="If the model_dir has no checkpoint, use the initial weights instead of failing."),
]


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the fields in a YAML file. Raises `ConfigError` if it has none."""
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from None
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError(f"{path}: expected fields and values, got {type(tree).__name__}")
    return tree


def set_field(tree: dict[str, Any], assignment: str) -> None:
    """Set a field of what a YAML file has, as `--set KEY.KEY=VALUE` says.

    Example:
        >>> tree = {"run": {"threads": 1}}
        >>> set_field(tree, "run.clip_norm=10")
        >>> tree
        {'run': {'threads': 1, 'clip_norm': 10}}
    """
    path, equals, text = assignment.partition("=")
    *parents, last = path.split(".")
    if not equals or not all([*parents, last]):
        raise ConfigError(f"--set: expected key.key=value, got {assignment!r}")
    for key in parents:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {assignment}: {key!r} is a value, it has no fields")
    try:
        tree[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {assignment}: the value is not YAML: {error}") from None


def named(name: str) -> Any:  # noqa: ANN401 - whatever the user has under that name
    """Return the object `module:name`, also from a module in the working directory. Raises `ConfigError` if there is none.

    Example:
        >>> named("torch.nn:Identity").__name__
        'Identity'
    """
    module_name, _, attribute = name.partition(":")
    # As `python -m` does: the user's own modules are in the working directory.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{name!r}: there is no module {error.name!r}; is it installed, or in this folder?") from None
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            near = nearest_name(part, vars(found)) if hasattr(found, "__dict__") else None
            hint = f"; did you mean {near!r}?" if near else ""
            raise ConfigError(f"{name!r}: there is no {part!r} in {module_name}{hint}") from None
    return found


_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def size_in_bytes(text: str, option: str) -> int:
    """Return the number of bytes that `text`, the value of `option`, stands for.

    Example:
        >>> size_in_bytes("8GiB", "--memory-limit"), size_in_bytes("1.5k", "--memory-limit")
        (8589934592, 1536)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ConfigError(f"{option}: expected a size such as 8GiB or 500MB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])
