"""Parameters read from a copy and trained where they are: a step does not wait for values that come from elsewhere."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from monolith.train.hooks.hook import Hook

if TYPE_CHECKING:
    from monolith.train.trainer import StepResult, Trainer

__all__ = ["Cached", "CachedVariables", "FetchCachedVariablesHook"]


class Cached(Protocol):
    """Values read from a copy; `monolith.ps` has one whose origin is on servers."""

    def fetch(self) -> None:
        """Begin to take the values of the origin."""

    def assign(self) -> None:
        """Read what was fetched last from now on."""


class CachedVariables(nn.Module):
    """A module whose forward pass reads copies of its parameters, while gradients go to the parameters themselves.

    There are two copies: `fetch` takes the parameters into the first, `assign` the first into the second, which is read.
    So fetching may go on beside a step, and what a step reads does not change under it.

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
        self.module = module
        self.fetch()
        self.assign()

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - those of the module
        """What the module computes, with the copies for its parameters."""
        values = {name: _cached(p, self._read[name]) for name, p in self.module.named_parameters()}
        return torch.func.functional_call(self.module, values, args, kwargs)

    def fetch(self) -> None:
        """Take the parameters as they are now; reading goes on with the values of the last `assign`."""
        # New tensors: what a pass has read, or returned, must not change when the next values come.
        self._fetched = {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}

    def assign(self) -> None:
        """Read what was fetched last from now on."""
        self._read = self._fetched


class FetchCachedVariablesHook(Hook):
    """Fetches before every step and assigns after it, so that a step reads what was there before the step before.

    Example:
        >>> hook = FetchCachedVariablesHook(CachedVariables(nn.Linear(1, 1)))
    """

    def __init__(self, cached: Cached) -> None:
        self._cached = cached

    def after_start(self, trainer: Trainer) -> None:
        """The first step reads what was restored."""
        self._cached.fetch()
        self._cached.assign()

    def before_step(self, trainer: Trainer) -> None:
        """Fetch for the next step."""
        self._cached.fetch()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """Let the next step read what was fetched."""
        self._cached.assign()

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        """Leave the model as it was trained, and nothing under way: the connections are closed next."""
        if error is None:
            self._cached.fetch()
            self._cached.assign()
            return
        with contextlib.suppress(Exception):
            self._cached.assign()


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
