"""Names that were read from a file, before they become paths."""

from __future__ import annotations

from pathlib import PurePosixPath

from monolith.errors import CorruptFileError

__all__ = ["safe_name"]


def safe_name(name: str, where: object) -> str:
    """`name` if it is a relative path inside of its folder, otherwise `CorruptFileError` about `where` it was found.

    Example:
        >>> safe_name("item/0-4095.table", "manifest.json")
        'item/0-4095.table'
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or "\0" in name or "\\" in name or ".." in parts or "/".join(parts) != name:
        raise CorruptFileError(f"{where}: names {name!r}, expected a relative path that stays inside of the folder")
    return name
