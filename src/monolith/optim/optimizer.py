"""The step all dense optimizers share: closure, gradients, the refusal of sparse ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, overload

import torch
from torch import Tensor

from monolith.errors import InvalidArgumentError

__all__ = ["DenseOptimizer", "Tensors", "require"]

_CHUNK_NUMBERS = 1 << 15

Tensors = list[Tensor] | tuple[Tensor, ...]


class DenseOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` for parameters with dense gradients; parameters without a gradient are left alone.

    Works with parameter groups, learning-rate schedulers, `state_dict` and closures as every torch optimizer does.
    """

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters; `closure`, if given, computes the loss and the gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # All groups are checked before any is changed.
        work = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        for _, parameters in work:
            self._refuse_sparse(parameters)
        for group, parameters in work:
            for chunk in _chunks(parameters):
                self._update(chunk, [p.grad for p in chunk if p.grad is not None], group)
        return loss

    @abstractmethod
    def _update(self, parameters: list[Tensor], gradients: Tensors, group: dict[str, Any]) -> None:
        """One step of the parameters of a group, in place; `gradients` must not be changed."""

    def _slots(self, parameters: list[Tensor], *names: str) -> list[list[Tensor]]:
        """For each name the state tensors of all parameters, zeros at first."""
        for parameter in parameters:
            state = self.state[parameter]
            for name in names:
                if name not in state:
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return [[self.state[parameter][name] for parameter in parameters] for name in names]

    def _refuse_sparse(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise InvalidArgumentError(
                    f"{type(self).__name__}: expected dense gradients, got one of layout {parameter.grad.layout} for a "
                    f"parameter of shape {list(parameter.shape)}; build the embedding with sparse=False, or keep its rows in "
                    "a monolith.EmbeddingTable, which has sparse optimizers of its own"
                )


def _chunks(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Split into lists to be updated by one call per operation.

    On a CPU, lists save the calls of many small tensors, but over large ones every operation would go through all memory
    again, where one tensor at a time stays in the cache (benchmarks/dense_optimizers.py). A GPU takes them all at once.
    """
    chunk: list[Tensor] = []
    size = 0
    for parameter in parameters:
        numbers = parameter.numel() if parameter.device.type == "cpu" else 0
        if chunk and size + numbers > _CHUNK_NUMBERS:
            yield chunk
            chunk, size = [], 0
        chunk.append(parameter)
        size += numbers
    if chunk:
        yield chunk


def require(name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Refuse a hyperparameter outside [low, high]."""
    if not low <= value <= high:
        bounds = f"a number >= {low:g}" if high == float("inf") else f"a number in [{low:g}, {high:g}]"
        raise InvalidArgumentError(f"{name}: expected {bounds}, got {value}")
