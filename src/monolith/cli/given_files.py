"""What a command line names: YAML files, and things in modules."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import yaml

from monolith.errors import ConfigError, StorageError

__all__ = ["named", "read_yaml"]


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The fields in a YAML file; a `ConfigError` if it has none."""
    try:
        tree = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from None
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError(f"{path}: expected fields and values, got {type(tree).__name__}")
    return tree


def named(name: str) -> Any:  # noqa: ANN401 - whatever the user has under that name
    """What `module:name` means, also in a module of the folder one works in; `ConfigError` if there is no such thing.

    Example:
        >>> named("torch.nn:Identity").__name__
        'Identity'
    """
    module, _, attribute = name.partition(":")
    # As with `python -m`: the folder one works in is where one's own modules are.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{name!r}: there is no module {error.name!r}; is it installed, or in this folder?") from None
    except AttributeError as error:
        raise ConfigError(f"{name!r}: {error}") from None
