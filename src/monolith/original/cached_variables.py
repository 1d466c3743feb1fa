"""Parameters read from a copy and trained where they are: a step does not wait for values that come from elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from monolith.errors import InvalidArgumentError

if TYPE_CHECKING:
    pass

__all__ = ["CachedVariables"]


class CachedVariables(nn.Module):
    """A module whose training steps read copies of its parameters, while gradients go to the parameters themselves.

    There are two copies: `fetch` copies the parameters into the first, `assign` makes the first the one that is read. A fetch
    may run while a step computes, and what a step reads does not change under it.

    Outside training (`eval()`: `evaluate`, `predict`, exports) the parameters themselves are read. `load_state_dict`, of this
    module or of any part of it, replaces the copies as well, and copies follow their parameters to another device or dtype.

    Raises:
        ValueError: `module`, or a part of it, is cached already.

    Example:
        >>> cached = CachedVariables(nn.Linear(1, 1, bias=False))
        >>> with torch.no_grad():
        ...     _ = cached.module.weight.fill_(7.0)
        >>> cached.fetch()
        >>> cached.assign()
        >>> cached(torch.ones(1)).item()
        7.0
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        _require_uncached(module)
        self.module = module
        self._replaced = False
        # A load of a part alone does not reach this module, so every part reports it. A bound method, because a deep copy
        # of the module then reports to the deep copy of this one.
        for part in module.modules():
            part.register_load_state_dict_post_hook(self._on_load)  # type: ignore[no-untyped-call]
        self.fetch()
        self.assign()

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - those of the module
        """Call the module, while training with the copies in place of its parameters."""
        if not self.training:
            return self.module(*args, **kwargs)
        self._follow_parameters()
        values = {name: _cached(p, self._read[name]) for name, p in self.module.named_parameters()}
        return torch.func.functional_call(self.module, values, args, kwargs)

    def fetch(self) -> None:
        """Copy the parameters as they are now. Steps keep reading the values of the last `assign`."""
        # New tensors: what a pass has read, or returned, must not change when the next values come.
        self._fetched = {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}

    def assign(self) -> None:
        """Read what was fetched last from now on."""
        self._read = self._fetched

    def _on_load(self, module: nn.Module, incompatible_keys: object) -> None:
        # Only noted: a load of the whole calls this once for every part.
        self._replaced = True

    def _follow_parameters(self) -> None:
        """Bring the copies to the parameters after a load, a move to another device or dtype, or a change of the module."""
        parameters = dict(self.module.named_parameters())
        if self._replaced or parameters.keys() != self._read.keys():
            self.fetch()
            self.assign()
            self._replaced = False
        for name, parameter in parameters.items():
            # The same tensor if it is where its parameter is.
            self._read[name] = self._read[name].to(parameter)


def _require_uncached(module: nn.Module) -> None:
    for name, part in module.named_modules():
        hooks = part._load_state_dict_post_hooks.values()
        if any(isinstance(getattr(hook, "__self__", None), CachedVariables) for hook in hooks):
            raise InvalidArgumentError(
                f"CachedVariables: {name or type(part).__name__} has already been cached; use the CachedVariables around it, "
                "and wrap each module once"
            )


def _cached(parameter: Tensor, copy: Tensor) -> Tensor:
    value: Tensor = _Cached.apply(parameter, copy)  # type: ignore[no-untyped-call]
    return value


class _Cached(torch.autograd.Function):
    """The value of the copy, the gradient to the parameter."""

    @staticmethod
    def forward(ctx: FunctionCtx, parameter: Tensor, copy: Tensor) -> Tensor:
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
