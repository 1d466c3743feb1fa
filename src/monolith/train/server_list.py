"""The servers that a run has taken, in a file of its model_dir."""

from __future__ import annotations

import re
from collections.abc import Sequence

from monolith.errors import ConfigError
from monolith.state.storage import open_folder

__all__ = ["ServerListFile"]

FOLDER = "ps_cluster_dir"
"""The folder of the model_dir with one file for each job."""
DEFAULT_NAME = "ps_info"
"""The file of a job without a name."""


class ServerListFile:
    """An `AddressList`: addresses with commas in `<model_dir>/ps_cluster_dir/<uuid>`, written as a whole.

    Example:
        >>> servers = ServerListFile("memory://run", uuid="job-7")
        >>> servers.read()
        ()
        >>> servers.write(["10.0.0.7:2222", "10.0.0.8:2222"])
        >>> ServerListFile("memory://run", uuid="job-7").read()
        ('10.0.0.7:2222', '10.0.0.8:2222')
    """

    def __init__(self, model_dir: str, *, uuid: str = "") -> None:
        self._name = uuid or DEFAULT_NAME
        # It becomes the name of a file: nothing that leads elsewhere.
        if not re.fullmatch(r"[\w.:@+-]+", self._name) or not self._name.strip("."):
            raise ConfigError(f"RunnerConfig.uuid: expected letters, digits and _.:@+-, got {uuid!r}")
        self._folder = f"{model_dir.rstrip('/')}/{FOLDER}"

    def read(self) -> tuple[str, ...]:
        """The addresses; none if there is no file."""
        folder = open_folder(self._folder)
        if folder.size(self._name) is None:
            return ()
        return tuple(filter(None, folder.read(self._name).decode(errors="replace").strip().split(",")))

    def write(self, addresses: Sequence[str]) -> None:
        """Replace the file."""
        open_folder(self._folder).write(self._name, ",".join(addresses).encode())
