"""Backpropagation from given gradients, for training parts of a model by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from monolith.errors import InvalidVariableError

__all__ = ["propagate_back_dict_gradients", "propagate_back_gradients"]

Key = TypeVar("Key", bound=Hashable)


def propagate_back_gradients(
    grads_and_vars: Iterable[tuple[Tensor, Tensor]],
    xs: Iterable[Tensor],
    valid_var_set: Iterable[Tensor] | None = None,
) -> list[Tensor | None]:
    """Compute the gradient of each of `xs` from pairs of (gradient, variable) for variables computed from them.

    The graph is kept, so this may be called again on the same variables.

    Args:
        grads_and_vars: the pairs. Gradients of several variables add up.
        xs: what the variables were computed from.
        valid_var_set: variables that may occur. None or an empty set allows all.

    Returns:
        One gradient per x, None for an x that no variable depends on.

    Raises:
        InvalidVariableError: (a RuntimeError) a variable is not in `valid_var_set`.

    Example:
        >>> x = torch.tensor(8.0, requires_grad=True)
        >>> y = 2 * x
        >>> propagate_back_gradients([(3 * y.detach(), y)], [x])
        [tensor(96.)]
    """
    pairs, inputs = list(grads_and_vars), list(xs)
    _require_valid([variable for _, variable in pairs], list(valid_var_set or ()))
    # autograd refuses tensors outside of a graph, whose gradient is simply None.
    pairs = [(gradient, variable) for gradient, variable in pairs if variable.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    gradients, variables = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(variables, wanted, gradients, allow_unused=True, retain_graph=True))
    return [next(found) if x.requires_grad else None for x in inputs]


def _require_valid(variables: Sequence[Tensor], valid: Sequence[Tensor]) -> None:
    known = {id(variable) for variable in valid}
    for place, variable in enumerate(variables):
        if known and id(variable) not in known:
            raise InvalidVariableError(
                f"Invalid variables in the input: grads_and_vars[{place}] is of a variable of shape {list(variable.shape)}, "
                f"which is not one of the {len(known)} in valid_var_set"
            )


def propagate_back_dict_gradients(
    grads_and_vars: Iterable[tuple[Tensor, Tensor]],
    x_to_key: Mapping[Tensor, Key],
    valid_var_set: Iterable[Tensor] | None = None,
) -> dict[Key, list[tuple[Tensor | None, Tensor]]]:
    """Call `propagate_back_gradients` for the keys of `x_to_key`. Returns pairs (gradient, x) grouped by its values.

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
