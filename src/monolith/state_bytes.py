"""Nested state (what `state_dict()` methods return) as bytes: JSON for the structure, safetensors for the tensors.

Nothing in such bytes can run code. Checkpoints keep them as two files, the change log as a part of a segment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from monolith.errors import CorruptFileError, InvalidArgumentError

__all__ = ["PackedState", "State", "Stateful", "pack_state", "unpack_state"]

_PLAIN = (bool, int, float, str)

State = object
"""Tensors, numbers, strings, booleans, None, and lists, tuples and dicts of them."""


@runtime_checkable
class Stateful(Protocol):
    """Modules, optimizers, readers: anything that can return its state and load it again."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return nested tensors, numbers and strings."""

    def load_state_dict(self, state: Any, /) -> object:  # noqa: ANN401 - each has its own
        """Load what `state_dict` returned."""


@dataclass(frozen=True, kw_only=True)
class PackedState:
    """A copy of a state as it was when it was packed."""

    structure: bytes
    """JSON."""
    tensors: dict[str, torch.Tensor]
    """Copies on the CPU, by the number `structure` refers to them with."""

    def tensor_bytes(self) -> bytes:
        """Return the tensors in the safetensors format. Safe to call on another thread."""
        return save(self.tensors)


def pack_state(state: State, where: str = "state") -> PackedState:
    """Copy `state`. `where` begins the message about a part that cannot be saved.

    Example:
        >>> packed = pack_state({"step": 3, 0: [torch.ones(2)]})
        >>> unpack_state(packed.structure, packed.tensor_bytes())
        {'step': 3, 0: [tensor([1., 1.])]}
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = _encode(state, tensors, where)
    return PackedState(structure=json.dumps(tree).encode(), tensors=tensors)


def unpack_state(structure: bytes, tensors: bytes, where: str = "state") -> State:
    """Return the state that was packed. Raises `CorruptFileError`, beginning with `where`, if the bytes are damaged."""
    try:
        return _decode(json.loads(structure), load(tensors))
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptFileError(f"{where}: the state cannot be read: {error}") from None


def _encode(state: State, tensors: dict[str, torch.Tensor], where: str) -> object:
    # Plain values stay as they are. Containers and tensors become objects with one key that names their kind.
    match state:
        case None | bool() | int() | float() | str():
            return state
        case torch.Tensor():
            key = str(len(tensors))
            # A copy: safetensors refuses views that share memory, and training continues while the state is written.
            tensors[key] = state.detach().to("cpu").clone().contiguous()
            return {"tensor": key}
        case list():
            return {"list": _encode_all(state, tensors, where)}
        case tuple():
            return {"tuple": _encode_all(state, tensors, where)}
        case dict():
            items = []
            for key, value in state.items():
                if not isinstance(key, str | int):
                    raise InvalidArgumentError(f"{where}: expected keys of type str or int, got {key!r}")
                plain = value is None or isinstance(value, _PLAIN)
                items.append([key, value if plain else _encode(value, tensors, f"{where}.{key}")])
            return {"dict": items}
    raise InvalidArgumentError(
        f"{where}: cannot be saved: expected tensors, numbers, strings and containers of them, got {type(state).__name__}"
    )


def _encode_all(items: Sequence[State], tensors: dict[str, torch.Tensor], where: str) -> list[object]:
    return [
        item if isinstance(item, _PLAIN) else _encode(item, tensors, f"{where}.{number}")
        for number, item in enumerate(items)
    ]


def _decode(tree: object, tensors: Mapping[str, torch.Tensor]) -> State:
    if not isinstance(tree, dict):
        if isinstance(tree, list):
            raise ValueError("a list without its kind")
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: item if isinstance(item, _PLAIN) else _decode(item, tensors) for key, item in value}
    if kind in ("list", "tuple"):
        items = [item if isinstance(item, _PLAIN) else _decode(item, tensors) for item in value]
        return items if kind == "list" else tuple(items)
    raise ValueError(f"unknown kind {kind!r}")
