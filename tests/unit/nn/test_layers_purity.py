"""Danger: a layer that changes its inputs, gives another answer the second time, or starts differently from the same seed."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import monolith.nn
from layer_catalog import CATALOG, build, inputs, tensors


def test_the_catalog_has_every_layer() -> None:
    public = [getattr(monolith.nn, name) for name in monolith.nn.__all__]
    modules = [value for value in public if inspect.isclass(value) and issubclass(value, nn.Module)]
    layers = {layer.__name__ for layer in modules if layer.__module__.startswith("monolith.nn.layers.")}
    assert {name.split()[0] for name in CATALOG} == layers


@pytest.mark.parametrize("name", CATALOG)
@pytest.mark.parametrize("training", [True, False])
def test_inputs_are_left_as_they_are(name: str, training: bool) -> None:
    batch = inputs(name)
    before = [leaf.clone() for leaf in tensors(batch)]
    build(name).train(training)(*batch)
    for leaf, copied in zip(tensors(batch), before, strict=True):
        assert torch.equal(leaf, copied)


@pytest.mark.parametrize("name", CATALOG)
def test_evaluation_repeats_itself_and_does_not_depend_on_the_other_rows(name: str) -> None:
    layer, batch = build(name).eval(), inputs(name)
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    whole = tensors(layer(*batch))
    for left, right in zip(whole, tensors(layer(*batch)), strict=True):
        assert torch.equal(left, right)
    half = [type(part)(x[3:] for x in part) if isinstance(part, list) else part[3:] for part in batch]
    for left, right in zip(whole, tensors(layer(*half)), strict=True):
        torch.testing.assert_close(left[3:], right, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(value, state[key]) for key, value in layer.state_dict().items())


@pytest.mark.parametrize("name", CATALOG)
def test_the_seed_decides_the_initial_values(name: str) -> None:
    def initial(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return list(CATALOG[name][0]().state_dict().values())

    first, again, other = initial(0), initial(0), initial(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    drawn = [tensor for tensor in first if tensor.is_floating_point() and len(tensor.flatten().unique()) > 2]
    assert not drawn or not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", CATALOG)
def test_a_layer_is_copied_and_pickled_after_a_training_step(name: str) -> None:
    layer, batch = build(name).train(), inputs(name)
    layer(*batch)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        for left, right in zip(tensors(layer.eval()(*batch)), tensors(twin.eval()(*batch)), strict=True):
            assert torch.equal(left, right)
