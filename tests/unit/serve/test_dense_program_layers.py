"""Danger: a layer that trains and cannot be served: `torch.export` refuses it or freezes the batch size it was traced with, or an
exported model cannot run it because an operator is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from layer_catalog import CATALOG, B, build, inputs
from monolith.serve.export import trace_program
from monolith.serve.program import DenseProgram


class Side(nn.Module):
    """Layers side by side, from flat tensors to flat tensors: one trace instead of one per layer."""

    def __init__(self, names: list[str], spec: Any) -> None:  # noqa: ANN401 - a structure of pytree
        super().__init__()
        self.layers = nn.ModuleList(build(name) for name in names)
        self._spec = spec

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batches = pytree.tree_unflatten(list(tensors), self._spec)
        outputs = [layer(*batch) for layer, batch in zip(self.layers, batches, strict=True)]
        return tuple(pytree.tree_leaves(outputs))


@pytest.mark.parametrize("first", range(4))
def test_every_layer_runs_as_data(first: int) -> None:
    names = list(CATALOG)[first::4]
    flat, spec = pytree.tree_flatten([inputs(name) for name in names])
    model = Side(names, spec).eval()
    example = {str(number): tensor for number, tensor in enumerate(flat)}
    outputs = [str(number) for number in range(len(model(*flat)))]
    traced = trace_program(model, example, outputs)
    program = DenseProgram.from_json(traced.to_json(), traced.weights)
    for rows in (B, 1, 17):
        others = pytree.tree_leaves([inputs(name, rows) for name in names])
        answers = program({str(number): tensor for number, tensor in enumerate(others)})
        with torch.no_grad():
            expected = model(*others)
        for name, answer, own in zip(outputs, answers.values(), expected, strict=True):
            torch.testing.assert_close(
                answer, own, rtol=1e-6, atol=1e-6, msg=f"output {name} of {names} with {rows} rows"
            )
