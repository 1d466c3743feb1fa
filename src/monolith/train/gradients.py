"""Gradients of inputs from gradients of what was computed of them, for training parts of a model by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from monolith.errors import InvalidArgumentError

__all__ = ["propagate_back_dict_gradients", "propagate_back_gradients"]

Key = TypeVar("Key", bound=Hashable)


def propagate_back_gradients(
    grads_and_vars: Iterable[tuple[Tensor, Tensor]],
    xs: Iterable[Tensor],
    valid_var_set: Iterable[Tensor] | None = None,
) -> list[Tensor | None]:
    """The gradient of each of `xs`, given pairs of (gradient, variable) for variables computed of them; None if unused.

    A variable that is not in `valid_var_set`, if there is one, is an error.

    Example:
        >>> x = torch.tensor(8.0, requires_grad=True)
        >>> y = 2 * x
        >>> propagate_back_gradients([(3 * y.detach(), y)], [x])
        [tensor(96.)]
    """
    pairs = list(grads_and_vars)
    valid = None if valid_var_set is None else {id(variable) for variable in valid_var_set}
    for place, (_, variable) in enumerate(pairs):
        if valid is not None and id(variable) not in valid:
            raise InvalidArgumentError(
                f"grads_and_vars[{place}]: its variable of shape {list(variable.shape)} is not one of the {len(valid)} valid ones"
            )
    variables = [variable for _, variable in pairs]
    return list(torch.autograd.grad(variables, list(xs), [gradient for gradient, _ in pairs], allow_unused=True))


def propagate_back_dict_gradients(
    grads_and_vars: Iterable[tuple[Tensor, Tensor]],
    x_to_key: Mapping[Tensor, Key],
    valid_var_set: Iterable[Tensor] | None = None,
) -> dict[Key, list[tuple[Tensor | None, Tensor]]]:
    """`propagate_back_gradients` for the keys of `x_to_key`, as pairs (gradient, x) grouped by its values.

    Example:
        >>> x = torch.tensor(8.0, requires_grad=True)
        >>> y = 2 * x
        >>> propagate_back_dict_gradients([(3 * y.detach(), y)], {x: "group1"})
        {'group1': [(tensor(96.), tensor(8., requires_grad=True))]}
    """
    grouped: dict[Key, list[tuple[Tensor | None, Tensor]]] = defaultdict(list)
    gradients = propagate_back_gradients(grads_and_vars, x_to_key, valid_var_set)
    for gradient, (x, key) in zip(gradients, x_to_key.items(), strict=True):
        grouped[key].append((gradient, x))
    return dict(grouped)
