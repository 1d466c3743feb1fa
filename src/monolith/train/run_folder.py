"""The folder a run continues from: dense state, tables and the position in the data, all of one step.

`state/save-<n>/` is the n-th save and `state/latest` names the last complete one. The name is replaced at the end, so a crash
while saving leaves the save before.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from monolith.checkpoint.state_file import State, load_state, save_state
from monolith.errors import CorruptFileError, StorageError
from monolith.table.store import Store
from monolith.table.store_folder import sync_to_disk

__all__ = ["RunFolder"]


class RunFolder:
    """Where one run keeps its state; one writer at a time.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as model_dir:
        ...     folder = RunFolder(model_dir)
        ...     print(folder.exists())
        ...     folder.save({"step": 3}, stores=[])
        ...     print(folder.exists(), folder.state())
        False
        True {'step': 3}
    """

    def __init__(self, model_dir: str | os.PathLike[str]) -> None:
        self._root = Path(model_dir) / "state"

    def create(self) -> None:
        """Make the folder, so that a run that cannot be saved fails before it starts."""
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{self._root}: cannot be made: {error.strerror}") from error

    def exists(self) -> bool:
        """Whether there is a saved step."""
        return (self._root / "latest").is_file()

    def save(self, state: State, stores: Sequence[Store]) -> None:
        """Keep `state` and the tables of `stores`, in place of what was saved before."""
        self.create()
        temporary = self._root / ".saving"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            save_state(state, temporary, "trainer")
            for number, store in enumerate(stores):
                store.save(temporary / f"tables-{number}")
            self._publish(temporary)
        except OSError as error:
            raise StorageError(f"{self._root}: cannot save: {error}") from error

    def state(self) -> State:
        """The state of the last complete save."""
        return load_state(self.latest(), "trainer")

    def restore(self, stores: Sequence[Store]) -> None:
        """Give `stores` the rows of the last complete save."""
        for number, store in enumerate(stores):
            store.restore(self.latest() / f"tables-{number}")

    def latest(self) -> Path:
        """The folder of the last complete save."""
        name = (self._root / "latest").read_text().strip()
        folder = self._root / name
        if Path(name).name != name or not folder.is_dir():
            raise CorruptFileError(f"{self._root / 'latest'}: names {name!r}, which is not a folder beside it")
        return folder

    def _publish(self, temporary: Path) -> None:
        earlier = sorted(self._root.glob("save-*"))
        target = self._root / f"save-{int(earlier[-1].name[5:]) + 1 if earlier else 0:08}"
        for path in temporary.iterdir():
            sync_to_disk(path)
        temporary.replace(target)
        pointer = self._root / ".latest"
        pointer.write_text(target.name)
        sync_to_disk(pointer)
        pointer.replace(self._root / "latest")
        sync_to_disk(self._root)
        for folder in earlier:
            shutil.rmtree(folder, ignore_errors=True)
