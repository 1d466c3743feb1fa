"""Which files a data service may read: those below the folders and URLs it was given."""

from __future__ import annotations

import re
from collections.abc import Sequence

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.transport.server import ListenConfig, is_loopback
from monolith.urls import lies_below

__all__ = ["EVERYTHING", "require_below", "require_roots"]

EVERYTHING = "*"
"""A root that allows every file that the process may read."""

_PATTERN = re.compile(r"[*?\[{]")


def require_roots(config: ListenConfig, roots: Sequence[str]) -> None:
    """Raise `ConfigError` if other machines can ask for any file."""
    if not roots and not is_loopback(config.host):
        raise ConfigError(
            f"{type(config).__name__}.roots: {config.host!r} can be reached from other machines; give the folders or URLs that "
            f"may be read (--root), or {EVERYTHING!r} for any file this process may read"
        )


def require_below(path: str, roots: Sequence[str]) -> None:
    """Raise `InvalidArgumentError` unless the file, folder or pattern `path` is below one of `roots`. No roots allow any.

    Links and `..` are followed first.

    Example:
        >>> require_below("/data/days/*.csv", ["/data"])
        >>> require_below("/data/../etc/passwd", ["/data"])
        Traceback (most recent call last):
        monolith.errors.InvalidArgumentError: /data/../etc/passwd: is not below /data, where this server may read
    """
    if roots and not any(_is_below(path, root) for root in roots):
        raise InvalidArgumentError(f"{path}: is not below {', '.join(roots)}, where this server may read")


def _is_below(path: str, root: str) -> bool:
    if root == EVERYTHING:
        return True
    found = None if "://" in path else _PATTERN.search(path)
    if found is None:
        return lies_below(path, root)
    # Of a pattern, the folder that it is matched in; what matches is asked about when it is read.
    folder = path[: found.start()].rpartition("/")[0] or path[:1]
    return ".." not in path[found.start() :].split("/") and lies_below(folder, root)
