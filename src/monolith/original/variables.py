"""What a saver saves: tensors, objects with a `state_dict` and stores, by name, and how they take back what was saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from monolith.errors import CheckpointMismatchError, InvalidArgumentError
from monolith.state_bytes import State, Stateful
from monolith.table.store import Store

__all__ = ["Saveable", "Variable", "Variables", "load_variables", "named_variables", "saved_value"]


Variable = Tensor | Stateful
Saveable = Variable | Store
Variables = Mapping[str, Saveable] | Iterable[tuple[str, Saveable]]
"""By name, or pairs of name and value, as `module.named_parameters()` gives them."""


def named_variables(variables: Variables) -> dict[str, Saveable]:
    """Return `variables` by name. Two of one name, or one under two names, are an error.

    Example:
        >>> list(named_variables(nn.Linear(2, 1).named_parameters()))
        ['weight', 'bias']
        >>> named_variables([("v1", torch.zeros(1)), ("v1", torch.ones(1))])
        Traceback (most recent call last):
        monolith.errors.InvalidArgumentError: variables: two have the same name: 'v1'
    """
    named: dict[str, Saveable] = {}
    names_of: dict[int, str] = {}
    for name, value in variables.items() if isinstance(variables, Mapping) else variables:
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(f"variables: expected names, got {name!r}")
        if not isinstance(value, Tensor | Stateful | Store):
            raise InvalidArgumentError(
                f"variables[{name!r}]: expected a tensor, a store, or an object with state_dict and load_state_dict, "
                f"got {type(value).__name__}"
            )
        if name in named:
            raise InvalidArgumentError(f"variables: two have the same name: {name!r}")
        if id(value) in names_of:
            raise InvalidArgumentError(
                f"variables: the same one would be restored by two names: {names_of[id(value)]!r} and {name!r}"
            )
        named[name], names_of[id(value)] = value, name
    return named


def saved_value(variable: Variable) -> State:
    """Return what is written for a variable."""
    return variable.detach() if isinstance(variable, Tensor) else dict(variable.state_dict())


def load_variables(
    variables: Mapping[str, Variable], saved: Mapping[str, State], *, reshape: bool = False, where: str
) -> None:
    """Give `variables` the values that were `saved`. Everything is checked before anything changes.

    Example:
        >>> v0 = torch.zeros(2)
        >>> load_variables({"v0": v0}, {"v0": torch.tensor([1.0, 2.0])}, where="model.ckpt-3")
        >>> v0
        tensor([1., 2.])
    """
    problems = [p for name, value in variables.items() for p in _problems(name, value, saved, reshape)]
    if problems:
        raise CheckpointMismatchError(f"{where}: does not fit: " + "; ".join(problems))
    for name, value in variables.items():
        found: Any = saved[name]
        if not isinstance(value, Tensor):
            value.load_state_dict(found)
    with torch.no_grad():
        for name, value in variables.items():
            if isinstance(value, Tensor):
                found = saved[name]
                value.copy_(found.reshape(value.shape))


def _problems(name: str, value: Variable, saved: Mapping[str, State], reshape: bool) -> list[str]:
    if name not in saved:
        return [f"{name!r} was not found in the checkpoint, which has {', '.join(map(repr, saved)) or 'nothing'}"]
    found = saved[name]
    if isinstance(value, Tensor):
        return _tensor_problems(repr(name), value, found, reshape)
    if not isinstance(found, dict):
        return [f"{name!r} was saved as a {_kind(found)}, and is a {type(value).__name__} here"]
    if not isinstance(value, nn.Module):
        return []
    here = value.state_dict()
    missing = [f"'{name}.{key}' was not found in the checkpoint" for key in here if key not in found]
    strange = [f"'{name}.{key}' is not in the model" for key in found if key not in here]
    both = [(key, tensor) for key, tensor in here.items() if key in found and isinstance(tensor, Tensor)]
    return missing + strange + [p for k, t in both for p in _tensor_problems(f"'{name}.{k}'", t, found[k], reshape)]


def _tensor_problems(label: str, here: Tensor, found: State, reshape: bool) -> list[str]:
    if not isinstance(found, Tensor):
        return [f"{label} was saved as a {_kind(found)}, and is a tensor here"]
    if found.dtype != here.dtype:
        return [f"{label} is of {here.dtype}, but its original dtype is {found.dtype}"]
    if found.shape == here.shape or (reshape and found.numel() == here.numel()):
        return []
    advice = "" if reshape or found.numel() != here.numel() else "; reshape=True would allow it"
    return [f"{label} has shape {list(here.shape)}, but was saved with {list(found.shape)}{advice}"]


def _kind(found: State) -> str:
    return "state" if isinstance(found, dict) else type(found).__name__
