"""`VersionWatch`: serves the newest export below a folder, and swaps to newer ones when they appear."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from monolith.errors import MonolithError
from monolith.serve.replica import Replica
from monolith.serve.repository import ModelRepository

__all__ = ["VersionWatch", "export_versions"]

_log = logging.getLogger(__name__)


def export_versions(folder: Path) -> dict[int, Path]:
    """Return the complete exports below `folder` by version. An export itself has none below it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name:
        ...     (Path(name) / "7").mkdir()
        ...     _ = (Path(name) / "7" / "manifest.json").write_text("{}")
        ...     list(export_versions(Path(name)))
        [7]
    """
    if not folder.is_dir():
        return {}
    found = (path for path in folder.iterdir() if path.name.isdecimal() and path.name.isascii())
    # The manifest is written last: an export without it is not complete.
    return {int(path.name): path for path in sorted(found) if (path / "manifest.json").is_file()}


class VersionWatch:
    """Looks for newer exports in a thread of its own until `close`.

    A newer version is loaded and made ready while the old one answers, and then replaces it without a failed request. One that
    cannot be loaded is reported once, and the old one stays.

    Args:
        repository: Gets the replicas.
        folder: With numbered exports. A folder that is one export never changes.
        current: The version that is served, found by the caller.
        open_version: Returns a replica of an export that is ready to answer.
        poll_secs: Seconds between two looks at the folder.
        on_swap: Called with every new replica after it was added.
        wanted: Whether newer versions are to be loaded now, as long as no rollout decides about versions.
        swap: Replaces the others by a replica. Returns False, and closes it, if a rollout has begun meanwhile.
    """

    def __init__(
        self,
        repository: ModelRepository,
        folder: Path,
        *,
        current: int,
        open_version: Callable[[Path], Replica],
        poll_secs: float = 1.0,
        on_swap: Callable[[Replica], None] = lambda replica: None,
        wanted: Callable[[], bool] = lambda: True,
        swap: Callable[[Replica], bool] | None = None,
    ) -> None:
        self._repository, self._folder, self._current = repository, folder, current
        self._open, self._poll_secs, self._on_swap = open_version, poll_secs, on_swap
        self._wanted, self._swap = wanted, swap
        self._refused: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monolith-versions", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking. A version that is being loaded is waited for."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._poll_secs):
            try:
                self.look()
            except Exception:
                _log.exception(
                    "%s: looking for newer versions failed, the next look is in %g s", self._folder, self._poll_secs
                )

    def look(self) -> bool:
        """Swap to the newest version, if it is newer. Returns whether it was."""
        if not self._wanted():
            return False
        versions = export_versions(self._folder)
        newer = [version for version in versions if version > self._current and version not in self._refused]
        for version in sorted(newer, reverse=True):
            try:
                replica = self._open(versions[version])
            except MonolithError as error:
                self._refused.add(version)
                _log.error("version %d cannot be served, %d stays: %s", version, self._current, error)
                continue
            if self._swap is None:
                self._repository.replace(replica)
            elif not self._swap(replica):
                return False
            self._current = version
            self._on_swap(replica)
            return True
        return False
