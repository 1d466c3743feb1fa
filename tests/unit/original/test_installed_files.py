"""Danger: a program that looks for its files in another installation than its own."""

from __future__ import annotations

from pathlib import Path

import pytest

import monolith
from monolith.errors import InvalidArgumentError
from monolith.original import find_main, get_libops_path


def made(file: Path) -> str:
    file.parent.mkdir(parents=True)
    file.touch()
    return str(file)


def test_the_folder_is_that_of_the_running_package() -> None:
    assert find_main() == str(Path(monolith.__file__).parents[1])
    assert Path(get_libops_path("monolith/original/installed_files.py")).is_file()
    assert get_libops_path("a/b.so") == f"{find_main()}/a/b.so"


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        # Bazel comes first, then an installation, then a source tree, and each by its last occurrence.
        ("run/__main__/monolith/core/x.py", "run/__main__"),
        ("run/__main__/lib/site-packages/monolith/x.py", None),
        ("site-packages/lib/site-packages/monolith/x.py", "site-packages/lib/site-packages"),
        ("home/monolith/src/monolith/x.py", "home/monolith/src"),
        ("home/other/x.py", None),
    ],
)
def test_the_folder_is_found_by_its_name(tmp_path: Path, file: str, expected: str | None) -> None:
    path = made(tmp_path / file)
    if expected is not None:
        assert find_main(path) == str(tmp_path / expected)
        return
    with pytest.raises(ValueError, match="the package must be installed") as caught:
        find_main(path)
    assert isinstance(caught.value, InvalidArgumentError)
    assert path in str(caught.value)
