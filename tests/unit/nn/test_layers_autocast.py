"""Danger: a layer that fails, overflows or loses its meaning in bfloat16 autocast."""

from __future__ import annotations

import pytest
import torch

from layer_catalog import CATALOG, build, inputs, tensors


@pytest.mark.parametrize("name", CATALOG)
def test_bfloat16_stays_near_float32(name: str) -> None:
    layer, batch = build(name).eval(), inputs(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = layer(*batch)
    for left, right in zip(tensors(rough), tensors(layer(*batch)), strict=True):
        torch.testing.assert_close(left.float(), right, rtol=0.05, atol=0.06)


@pytest.mark.parametrize("name", [name for name in CATALOG if list(build(name).parameters())])
def test_gradients_of_an_autocast_step_are_finite_and_reach_every_parameter(name: str) -> None:
    layer, batch = build(name).train(), inputs(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = tensors(layer(*batch))
    torch.stack([output.float().square().sum() for output in outputs]).sum().backward()
    for parameter_name, parameter in layer.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all(), parameter_name
