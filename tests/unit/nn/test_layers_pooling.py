"""Danger: pooling over the elements of one tensor instead of over several tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from layer_oracle import Array, assert_same, random, tensor
from monolith import InvalidArgumentError
from monolith.nn import AvgPooling, MaxPooling, SumPooling

LAYERS = [(SumPooling(), np.sum), (AvgPooling(), np.mean), (MaxPooling(), np.max)]


@pytest.mark.parametrize(("layer", "reduce"), LAYERS)
def test_element_by_element(layer: torch.nn.Module, reduce: Callable[..., Array]) -> None:
    xs = [random(3, 4, seed=s) for s in range(5)]
    assert_same(layer([tensor(x) for x in xs]), reduce(np.stack(xs), axis=0))


@pytest.mark.parametrize(("layer", "reduce"), LAYERS)
def test_a_single_tensor_is_returned_as_it_is(layer: torch.nn.Module, reduce: object) -> None:
    x = torch.randn(3)
    assert layer([x]) is x


@pytest.mark.parametrize(("layer", "reduce"), LAYERS)
def test_nothing_and_different_shapes_are_refused(layer: torch.nn.Module, reduce: object) -> None:
    with pytest.raises(InvalidArgumentError, match="expected at least one tensor"):
        layer([])
    with pytest.raises(InvalidArgumentError, match=r"xs\[1\]: expected the shape of the first, \[2\], got \[1\]"):
        layer([torch.zeros(2), torch.zeros(1)])
