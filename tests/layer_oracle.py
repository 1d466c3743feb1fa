"""NumPy versions of what layers are made of, in float64, for formulas written out in the tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

Array = npt.NDArray[np.float64]


def random(*dims: int, seed: int = 0) -> Array:
    """Standard normal numbers."""
    return np.random.default_rng([seed, *dims]).standard_normal(dims)


def prepared(module: nn.Module, seed: int = 0) -> tuple[Any, dict[str, Array]]:
    """The module in float64 and evaluation mode with all parameters drawn anew, and those parameters by name."""
    module = module.double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module, {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}


def tensor(values: Any) -> torch.Tensor:  # noqa: ANN401 - whatever NumPy makes an array of
    """As a tensor, float64 for floats."""
    return torch.from_numpy(np.asarray(values).copy())


def assert_same(actual: torch.Tensor, expected: Any, tolerance: float = 1e-10) -> None:  # noqa: ANN401
    """Same shape, and same values up to `tolerance`."""
    expected = np.asarray(expected)
    assert tuple(actual.shape) == expected.shape
    np.testing.assert_allclose(actual.detach().numpy(), expected, rtol=tolerance, atol=tolerance)


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array, axis: int = -1) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def mlp(x: Array, parameters: dict[str, Array], prefix: str, activations: list[Any]) -> Array:
    """An MLP without weight norm, from the parameters of `MLP.layers`."""
    for index, activation in enumerate(activations):
        weight, bias = parameters[f"{prefix}layers.{index}.0.weight"], parameters[f"{prefix}layers.{index}.0.bias"]
        x = x @ weight.T + bias
        x = x if activation is None else activation(x)
    return x
