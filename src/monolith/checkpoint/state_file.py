"""Nested state (what `state_dict()` methods return) as JSON plus safetensors: nothing in such a file can run code.

`name.json` holds the structure, `name.safetensors` the tensors it refers to.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from monolith.errors import CorruptFileError, InvalidArgumentError, StorageError

__all__ = ["load_state", "save_state"]

State = object
"""Tensors, numbers, strings, booleans, None, and lists, tuples and dicts of them."""


def save_state(state: State, folder: Path, name: str) -> None:
    """Write `state` as two files of `folder`, which must exist.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_state({"step": 3, 0: [torch.ones(2)]}, Path(folder), "trainer")
        ...     load_state(Path(folder), "trainer")
        {'step': 3, 0: [tensor([1., 1.])]}
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = _encode(state, tensors, name)
    try:
        save_file(tensors, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(tree))
    except OSError as error:
        raise StorageError(f"{folder / name}: cannot write the state: {error}") from error


def load_state(folder: Path, name: str) -> State:
    """Read what `save_state` wrote; `CorruptFileError` if it is damaged."""
    try:
        tree = json.loads((folder / f"{name}.json").read_text())
        tensors = load_file(folder / f"{name}.safetensors")
        return _decode(tree, tensors)
    except OSError as error:
        raise StorageError(f"{folder / name}: cannot read the state: {error}") from error
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CorruptFileError(f"{folder / name}: the state cannot be read: {error}") from None


def _encode(state: State, tensors: dict[str, torch.Tensor], where: str) -> object:
    # Plain values stay as they are; containers and tensors become objects with one key that says what they are.
    match state:
        case None | bool() | int() | float() | str():
            return state
        case torch.Tensor():
            key = str(len(tensors))
            # A copy, because safetensors refuses views that share memory.
            tensors[key] = state.detach().to("cpu").clone().contiguous()
            return {"tensor": key}
        case list():
            return {"list": [_encode(item, tensors, f"{where}.{i}") for i, item in enumerate(state)]}
        case tuple():
            return {"tuple": [_encode(item, tensors, f"{where}.{i}") for i, item in enumerate(state)]}
        case dict():
            items = []
            for key, value in state.items():
                if not isinstance(key, str | int):
                    raise InvalidArgumentError(f"{where}: expected keys of type str or int, got {key!r}")
                items.append([key, _encode(value, tensors, f"{where}.{key}")])
            return {"dict": items}
    raise InvalidArgumentError(
        f"{where}: cannot be saved: expected tensors, numbers, strings and containers of them, got {type(state).__name__}"
    )


def _decode(tree: object, tensors: dict[str, torch.Tensor]) -> State:
    if not isinstance(tree, dict):
        if isinstance(tree, list):
            raise ValueError("a list without its kind")
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in value}
    if kind in ("list", "tuple"):
        items = [_decode(item, tensors) for item in value]
        return items if kind == "list" else tuple(items)
    raise ValueError(f"unknown kind {kind!r}")
