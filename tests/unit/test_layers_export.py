"""Danger: a layer that trains and cannot be served: `torch.export` refuses it, or freezes the batch size it was traced with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from layer_catalog import CATALOG, B, build, inputs, tensors


class Side(nn.Module):
    """Many layers side by side: one export instead of one per layer."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.layers = nn.ModuleList(build(name) for name in names)

    def forward(self, batches: list[tuple[Any, ...]]) -> list[Any]:
        return [layer(*batch) for layer, batch in zip(self.layers, batches, strict=True)]


def dynamic(tree: Any) -> Any:  # noqa: ANN401 - the structure of the inputs
    if isinstance(tree, torch.Tensor):
        return {0: torch.export.Dim("batch", min=1)}
    return type(tree)(dynamic(branch) for branch in tree)


@pytest.mark.parametrize("first", range(4))
def test_every_layer_exports_with_a_dynamic_batch(first: int) -> None:
    names = list(CATALOG)[first::4]
    model = Side(names).eval()
    batches = [inputs(name) for name in names]
    program = torch.export.export(model, (batches,), dynamic_shapes=(dynamic(batches),)).module()
    for rows in (B, 1, 17):
        others = [inputs(name, rows) for name in names]
        for name, exported, own in zip(names, program(others), model(others), strict=True):
            for left, right in zip(tensors(exported), tensors(own), strict=True):
                torch.testing.assert_close(
                    left, right, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
                )
