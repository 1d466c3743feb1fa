"""Where the package is installed, under the names that the original finds its own files by."""

from __future__ import annotations

from pathlib import Path

from monolith.errors import InvalidArgumentError

__all__ = ["find_main", "get_libops_path"]

_MARKERS = ("/__main__/", "/site-packages/", "/monolith/")


def find_main(path: str | None = None) -> str:
    """Return the folder that the package `monolith` is in: of a Bazel build, of an installation, or of a source tree.

    `path` is a file of the package, by default this one.

    Raises:
        InvalidArgumentError: the folder has no package `monolith`.

    Example:
        >>> (Path(find_main()) / "monolith").is_dir()
        True
    """
    path = str(Path(path or __file__).absolute())
    marker = next((marker for marker in _MARKERS if marker in path), None)
    if marker is not None:
        end = path.rindex(marker) + (0 if marker == "/monolith/" else len(marker) - 1)
        folder = Path(path[:end])
        if (folder / "monolith").exists():
            return str(folder)
    raise InvalidArgumentError(
        f"path: {path} is in no folder {', '.join(_MARKERS)} next to or above a package monolith; the package must be installed, "
        "or run from its source tree"
    )


def get_libops_path(lib_name: str) -> str:
    """Return the path of a file, which is given relative to `find_main()`.

    Example:
        >>> Path(get_libops_path("monolith/__init__.py")).is_file()
        True
    """
    return str(Path(find_main()) / lib_name)
