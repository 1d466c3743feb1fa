"""Paths and URLs as users write them. Every scheme is treated alike, and what cannot be a valid path or URL is refused.

A slip such as `s3:/bucket/run` would otherwise be a folder called `s3:` on the local disk, unnoticed until the data is needed.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

from pydantic import AfterValidator, BeforeValidator

from monolith.errors import InvalidArgumentError

if TYPE_CHECKING:
    import fsspec

__all__ = [
    "LocalPath",
    "Location",
    "StrPath",
    "checked_location",
    "filesystem_of",
    "is_remote",
    "is_url",
    "lies_below",
    "local_path",
]

StrPath = str | os.PathLike[str]
"""A local path, or a URL that fsspec knows, such as `s3://bucket/model`."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+._-]*):(/*)(.*)", re.DOTALL)
_LOCAL = ("file", "local")
_WITH_DEFAULT_HOST = ("hdfs", "viewfs", "memory")
"""Schemes with `scheme:///path`, which means the configured name node, or a store without hosts."""
_HADOOP = ("hdfs", "viewfs")
"""Hadoop itself writes `hdfs:/path`."""


def checked_location(path: StrPath) -> str:
    """Return `path` in normal form: a local path without a scheme, or a URL with two slashes and a known scheme.

    Raises:
        InvalidArgumentError: it is not valid. The message suggests the likely spelling.

    Example:
        >>> checked_location("runs/a"), checked_location("file:///runs/a"), checked_location("hdfs:/runs/a")
        ('runs/a', '/runs/a', 'hdfs:///runs/a')
        >>> checked_location("s3:/bucket/run")
        Traceback (most recent call last):
        monolith.errors.InvalidArgumentError: 's3:/bucket/run': one slash after the scheme; did you mean 's3://bucket/run'?
    """
    text = os.fspath(path)
    if "::" in text and "://" in text:
        return "::".join(checked_location(part) if ":/" in part else part for part in text.split("::"))
    found = _SCHEME.match(text)
    if found is None:
        return text
    scheme, slashes, rest = found.groups()
    if len(scheme) == 1:
        if slashes or rest.startswith("\\"):
            _refuse(text, "is a Windows path, and this is not Windows", f"/{rest.replace(chr(92), '/').lstrip('/')}")
        return text
    known = scheme.lower() in _known()
    if not slashes:
        # A name with a colon, unless it begins as a URL does.
        return _refuse(text, "no slashes after the scheme", _spelled(scheme, rest)) if known else text
    if scheme not in _known():
        # Not `nearest_name`, which allows no slip in a word of two letters: schemes are often that short.
        near = difflib.get_close_matches(scheme.lower(), _known(), 1, cutoff=0.5)
        hint = _spelled(near[0], rest) if near else f"./{text}"
        _refuse(text, f"no store is known for {scheme!r}", hint)
    if len(slashes) == 1:
        if scheme in _HADOOP:
            return f"{scheme}:///{rest}"
        _refuse(text, "one slash after the scheme", _spelled(scheme, rest))
    return _with_host(text, scheme, slashes, rest)


def is_url(path: StrPath) -> bool:
    """Return whether `path` is on a store other than this machine's disks.

    Example:
        >>> [is_url(path) for path in ("model", "/data/model", "file:///data", "hdfs:/model", "s3://bucket/model")]
        [False, False, False, True, True]
    """
    text = checked_location(path)
    return re.match(r"[A-Za-z][A-Za-z0-9+._-]+::?", text) is not None and "://" in text


def is_remote(path: StrPath) -> bool:
    """Return whether `path` is a URL of another store than this machine's disks. Raises `InvalidArgumentError` for a typo.

    Example:
        >>> [is_remote(path) for path in ("model", "/data/model", "file:///data", "hdfs:/model", "s3://bucket/model")]
        [False, False, False, True, True]
    """
    if "::" in os.fspath(path) and "://" in os.fspath(path):
        raise InvalidArgumentError(
            f"{os.fspath(path)!r}: expected a path or one URL; a chain of stores is for reading data"
        )
    return is_url(path)


def lies_below(path: str, root: str) -> bool:
    """Return whether `path` is `root` or inside of it, after resolving symbolic links and `..` on a local disk.

    Example:
        >>> lies_below("s3://bucket/run/a", "s3://bucket/run"), lies_below("s3://bucket/runs", "s3://bucket/run")
        (True, False)
        >>> lies_below("/runs/../etc/passwd", "/runs")
        False
    """
    if "://" in path or "://" in root:
        whole, beginning = f"{path.rstrip('/')}/", f"{root.rstrip('/')}/"
        rest = whole.removeprefix(beginning)
        return whole.startswith(beginning) and ".." not in rest.split("/") and "::" not in rest
    try:
        return Path(path).resolve().is_relative_to(Path(root).resolve())
    except ValueError:  # a null byte
        return False


def local_path(path: StrPath, what: str) -> str:
    """Return `path`, which must be on a local disk. `what` is the argument that the error names.

    Example:
        >>> local_path("file:///runs/a", "folder")
        '/runs/a'
        >>> local_path("s3://bucket/a", "folder")
        Traceback (most recent call last):
        monolith.errors.InvalidArgumentError: folder: expected a path on a local disk, got 's3://bucket/a'
    """
    text = os.fspath(path)
    found = _SCHEME.match(text)
    # One slash is enough: a `Path` that was made of a URL has lost the other.
    if found is not None and len(found[1]) > 1 and found[2] and found[1] not in _LOCAL:
        raise InvalidArgumentError(f"{what}: expected a path on a local disk, got {text!r}")
    try:
        return checked_location(text)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{what}: {error}") from None


def filesystem_of(path: StrPath, what: str = "path") -> tuple[fsspec.AbstractFileSystem, str]:
    """Return the file system that `path` is on, and its path there.

    Raises:
        InvalidArgumentError: the URL is not valid, or a package for its store is not installed.

    Example:
        >>> filesystem_of("memory://run/a.txt")[1]
        '/run/a.txt'
    """
    import fsspec

    try:
        filesystem, plain = fsspec.core.url_to_fs(checked_location(path))
    except (ValueError, ImportError) as error:
        raise InvalidArgumentError(f"{what}: {os.fspath(path)!r}: {error}") from None
    return filesystem, plain


Location = Annotated[str, AfterValidator(checked_location)]
"""A field of a configuration that takes a path or a URL."""


def _as_local(path: object) -> object:
    return Path(local_path(path, "path")) if isinstance(path, os.PathLike) else path


LocalPath = Annotated[Path, BeforeValidator(_as_local)]
"""A field of a configuration that takes a path on a local disk."""


def _with_host(text: str, scheme: str, slashes: str, rest: str) -> str:
    host, slash, inside = rest.partition("/")
    if scheme in _LOCAL:
        if len(slashes) != 3 and (host != "localhost" or not slash):
            _refuse(text, f"{host or 'nothing'} is read as a host", f"file:///{rest}")
        return f"/{inside if host == 'localhost' and len(slashes) == 2 else rest}"
    if len(slashes) > 2 and scheme not in _WITH_DEFAULT_HOST:
        _refuse(text, "no host or bucket after the two slashes", _spelled(scheme, rest))
    if len(slashes) > 3 or (not rest and scheme not in _WITH_DEFAULT_HOST):
        _refuse(text, "nothing is named", _spelled(scheme, rest or "bucket/path"))
    return text


def _spelled(scheme: str, rest: str) -> str:
    rest = rest.lstrip("/")
    return f"file:///{rest}" if scheme in _LOCAL else f"{scheme}://{'/' if scheme in _HADOOP else ''}{rest}"


def _refuse(text: str, why: str, hint: str) -> NoReturn:
    raise InvalidArgumentError(f"{text!r}: {why}; did you mean {hint!r}?")


def _known() -> list[str]:
    import fsspec

    return [*fsspec.available_protocols(), *fsspec.registry, "viewfs"]
