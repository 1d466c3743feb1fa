"""Nested state (what `state_dict()` methods return) as two files: `name.json` and `name.safetensors`."""

from __future__ import annotations

from pathlib import Path

from monolith.errors import StorageError
from monolith.state_bytes import State, pack_state, unpack_state

__all__ = ["State", "load_state", "save_state"]


def save_state(state: State, folder: Path, name: str) -> None:
    """Write `state` as two files of `folder`, which must exist.

    Example:
        >>> import tempfile
        >>> import torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_state({"step": 3, 0: [torch.ones(2)]}, Path(folder), "trainer")
        ...     load_state(Path(folder), "trainer")
        {'step': 3, 0: [tensor([1., 1.])]}
    """
    packed = pack_state(state, name)
    try:
        (folder / f"{name}.safetensors").write_bytes(packed.tensor_bytes())
        (folder / f"{name}.json").write_bytes(packed.structure)
    except OSError as error:
        raise StorageError(f"{folder / name}: cannot write the state: {error}") from error


def load_state(folder: Path, name: str) -> State:
    """Read what `save_state` wrote; `CorruptFileError` if it is damaged."""
    try:
        structure = (folder / f"{name}.json").read_bytes()
        tensors = (folder / f"{name}.safetensors").read_bytes()
    except OSError as error:
        raise StorageError(f"{folder / name}: cannot read the state: {error}") from error
    return unpack_state(structure, tensors, str(folder / name))
