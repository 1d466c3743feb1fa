"""Importing optional packages, with an error that says how to install them."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from monolith.errors import MissingPackageError

__all__ = ["import_extra"]


def import_extra(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import `module` of the optional dependencies `extra`. Raises `MissingPackageError` if it is not installed.

    Example:
        >>> import_extra("no_such_package", extra="zookeeper", purpose="discovery through ZooKeeper")
        Traceback (most recent call last):
        monolith.errors.MissingPackageError: discovery through ZooKeeper needs the package 'no_such_package'; to install it:
        pip install 'monolith-torch[zookeeper]'
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        message = f"{purpose} needs the package {package!r}; to install it: pip install 'monolith-torch[{extra}]'"
        raise MissingPackageError(message, name=package) from error
