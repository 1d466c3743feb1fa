"""`HostServiceDiscovery`: processes find each other through files in a shared folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from monolith.cluster.discovery.service_discovery import ServiceDiscovery, check_entry, check_name
from monolith.cluster.net import split_address
from monolith.errors import InvalidArgumentError

__all__ = ["HostServiceDiscovery"]


class HostServiceDiscovery(ServiceDiscovery):
    """One file per process, `<folder>/<name>/<index>`, that holds its address. For one machine, or a shared disk.

    The file of a process that died stays until its successor overwrites it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, HostServiceDiscovery(folder) as discovery:
        ...     discovery.register("worker", 1, "127.0.0.1:2223")
        ...     discovery.register("worker", 0, "127.0.0.1:2222")
        ...     discovery.query("worker")
        {0: '127.0.0.1:2222', 1: '127.0.0.1:2223'}
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Use `folder`, which is created when the first process registers."""
        self._folder = Path(folder)

    def register(self, name: str, index: int, addr: str) -> None:
        """Write the file atomically."""
        check_entry(name, index, addr)
        path = self._folder / name / str(index)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{index}.", delete=False) as file:
            file.write(addr)
        Path(file.name).replace(path)

    def deregister(self, name: str, index: int, addr: str) -> None:
        """Remove the file, if it has this address."""
        check_entry(name, index, addr)
        path = self._folder / name / str(index)
        if _read_address(path) == addr:
            path.unlink(missing_ok=True)

    def query(self, name: str) -> dict[int, str]:
        """Read all files of a service."""
        check_name(name)
        found = {int(path.name): _read_address(path) for path in _entries(self._folder / name)}
        return {index: found[index] for index in sorted(found) if found[index]}

    def deregister_all(self) -> None:
        """Remove all files of all services. Other files in the folder stay."""
        for folder in self._folder.iterdir() if self._folder.is_dir() else ():
            for path in _entries(folder):
                path.unlink(missing_ok=True)


def _entries(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.name.isascii() and path.name.isdecimal()]


def _read_address(path: Path) -> str:
    """Return the address in a file, or an empty string if the file was removed or truncated by a crash."""
    try:
        address = path.read_text()
        split_address(address)
    except (FileNotFoundError, UnicodeDecodeError, InvalidArgumentError):
        return ""
    return address
