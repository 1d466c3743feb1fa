"""Nested batches as a flat list of tensors, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monolith.errors import InvalidArgumentError
from monolith.features import Ragged

__all__ = ["NestedTensors"]

Nested = Any
"""A tensor, a `Ragged`, a constant, or lists, tuples and dicts of these, to any depth."""


@dataclass(frozen=True)
class _Place:
    """Stands in the structure for element `index` of one of the three lists."""

    kind: str
    index: int


class NestedTensors:
    """The tensors inside lists, tuples and dicts, to be sent, copied or replaced as a flat list.

    Leaves are tensors, `Ragged` (two tensors each: values and offsets) and constants: bool, int, str, None and
    `torch.nn.Parameter`, which stay where they are. Subclasses of dict and named tuples keep their type. The same object in
    several places is one entry of the list. The structure given is not changed.

    Example:
        >>> nested = NestedTensors({"a": torch.ones(2), "b": (Ragged.from_lists([[], [1]]), "name", None)})
        >>> [tensor.tolist() for tensor in nested.get_tensors()]
        [[1.0, 1.0], [1], [0, 0, 1]]
        >>> again = nested.get_nested_result([tensor + tensor for tensor in nested.get_tensors()[:2]]
        ...                                  + nested.get_tensors()[2:])
        >>> again["a"].tolist(), again["b"][0].to_lists(), again["b"][1:]
        ([2.0, 2.0], [[], [2]], ('name', None))
    """

    def __init__(self, nested: Nested) -> None:
        self._tensors: list[torch.Tensor] = []
        self._ragged: list[Ragged] = []
        self._others: list[Any] = []
        # Objects are identified by id, and the lists above keep them alive, so no id is used twice.
        self._places: dict[int, _Place] = {}
        self._skeleton = _map_leaves(nested, self._place)

    def get_tensors(self) -> list[torch.Tensor]:
        """Return the tensors in order of appearance, then values and offsets of each `Ragged`."""
        return self._tensors + [part for ragged in self._ragged for part in (ragged.values, ragged.offsets)]

    def get_nested_result(self, tensors: Sequence[torch.Tensor]) -> Nested:
        """Return the structure with `tensors` in place of those of `get_tensors()`."""
        dense, flat = tensors[: len(self._tensors)], tensors[len(self._tensors) :]
        if len(tensors) != len(self._tensors) + 2 * len(self._ragged):
            raise InvalidArgumentError(
                f"tensors: expected {len(self._tensors)} and two for each of {len(self._ragged)} Ragged, got {len(tensors)}"
            )
        ragged = [Ragged(values, splits) for values, splits in zip(flat[0::2], flat[1::2], strict=True)]
        found: dict[str, Sequence[Any]] = {"tensor": dense, "ragged": ragged, "other": self._others}
        return _map_leaves(self._skeleton, lambda place: found[place.kind][place.index])

    def _place(self, leaf: object) -> _Place:
        if id(leaf) not in self._places:
            kind, objects = self._list_of(leaf)
            self._places[id(leaf)] = _Place(kind, len(objects))
            objects.append(leaf)
        return self._places[id(leaf)]

    def _list_of(self, leaf: object) -> tuple[str, list[Any]]:
        if isinstance(leaf, bool | int | str | torch.nn.Parameter):
            return "other", self._others
        if isinstance(leaf, Ragged):
            return "ragged", self._ragged
        if isinstance(leaf, torch.Tensor):
            if leaf.is_nested:
                raise InvalidArgumentError(
                    "Nested tensor doesn't support nested RaggedTensor. Give torch nested tensors as Ragged(values, offsets)."
                )
            return "tensor", self._tensors
        raise InvalidArgumentError(
            f"Tensor is not supported. {leaf!r} is a {type(leaf).__name__}; leaves are tensors, Ragged, bool, int, str, None "
            "and torch.nn.Parameter"
        )


def _map_leaves(nested: Nested, action: Callable[[Any], Any]) -> Nested:
    if nested is None:
        return None
    if isinstance(nested, dict):
        # A copy keeps the class of the dict and its attributes, such as the default_factory of a defaultdict.
        mapped = copy.copy(nested)
        for key, value in nested.items():
            mapped[key] = _map_leaves(value, action)
        return mapped
    if isinstance(nested, list):
        return [_map_leaves(value, action) for value in nested]
    if isinstance(nested, tuple):
        parts = [_map_leaves(value, action) for value in nested]
        return type(nested)(*parts) if hasattr(nested, "_fields") else tuple(parts)
    return action(nested)
