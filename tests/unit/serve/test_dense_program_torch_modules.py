"""Danger: an ordinary module of torch.nn that trains and cannot be exported, because an operator it needs is not on the list."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from monolith.errors import InvalidArgumentError
from monolith.serve.export import trace_program
from monolith.serve.program import DenseProgram

ROWS = 7
ACTIVATIONS = (
    nn.CELU, nn.ELU, nn.GELU, nn.GLU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity,
    nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.Sigmoid, nn.SiLU, nn.Softplus,
    nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Dropout, nn.AlphaDropout, nn.Flatten,
)  # fmt: skip
BY_SHAPE: dict[tuple[int, ...], list[nn.Module]] = {
    (4,): [
        *(kind() for kind in ACTIVATIONS),
        *(nn.Softmax(1), nn.LogSoftmax(1), nn.Softmin(1), nn.Threshold(0.1, 1.0), nn.Unflatten(1, (2, 2))),
        *(nn.Linear(4, 3), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4)),
        *(
            nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True)),
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        ),
        *(nn.GRUCell(4, 5), nn.RNNCell(4, 5), nn.BatchNorm1d(4, affine=False, track_running_stats=False)),
    ],
    (4, 8): [
        *(nn.Conv1d(4, 3, 3, padding=1), nn.Conv1d(4, 3, 3, padding="same"), nn.BatchNorm1d(4), nn.InstanceNorm1d(4)),
        *(nn.MaxPool1d(2), nn.AvgPool1d(2), nn.AdaptiveAvgPool1d(1), nn.AdaptiveAvgPool1d(3), nn.AdaptiveMaxPool1d(2)),
        *(
            nn.ConstantPad1d(1, 2.0),
            nn.ZeroPad1d(1),
            nn.ReflectionPad1d(1),
            nn.ReplicationPad1d(1),
            nn.CircularPad1d(1),
        ),
        *(nn.LSTM(8, 5, batch_first=True), nn.GRU(8, 5, batch_first=True), nn.RNN(8, 5, batch_first=True)),
        nn.LSTM(8, 5, 2, batch_first=True, bidirectional=True),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    ],
    (4, 8, 8): [
        *(nn.Conv2d(4, 3, 3, stride=2), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2)),
        *(nn.AdaptiveMaxPool2d(2), nn.ReflectionPad2d(1), nn.PixelShuffle(2), nn.ChannelShuffle(2), nn.Softmax2d()),
    ],
}


class Together(nn.Module):
    """Modules side by side on one input: one trace instead of one per module."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(pytree.tree_leaves([part(x.clone()) for part in self.parts]))


@pytest.mark.parametrize("shape", list(BY_SHAPE), ids=str)
def test_usual_modules_are_exported_and_compute_the_same(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Together(BY_SHAPE[shape]).eval()
    outputs = [str(number) for number in range(len(model(torch.randn(ROWS, *shape))))]
    traced = trace_program(model, {"x": torch.randn(ROWS, *shape)}, outputs)
    program = DenseProgram.from_json(traced.to_json(), traced.weights)
    for rows in (2, 13):  # one row has no statistics of its own
        x = torch.randn(rows, *shape)
        with torch.no_grad():
            expected = model(x)
        for answer, own in zip(program({"x": x}).values(), expected, strict=True):
            torch.testing.assert_close(answer, own, rtol=1e-5, atol=1e-6)


def test_modules_with_several_inputs_are_exported() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bilinear, self.embedding = nn.Bilinear(4, 4, 3), nn.Embedding(10, 3)
            self.cosine, self.distance = nn.CosineSimilarity(), nn.PairwiseDistance()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor, y: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            seen, _ = self.attention(x[:, None], y[:, None], y[:, None])
            return self.bilinear(x, y), self.embedding(ids), self.cosine(x, y), self.distance(x, y), seen

    model = Pairs().eval()
    example = {"x": torch.randn(7, 4), "y": torch.randn(7, 4), "ids": torch.arange(7)}
    program = trace_program(model, example, list("abcde"))
    with torch.no_grad():
        for answer, own in zip(program(example).values(), model(**example), strict=True):
            torch.testing.assert_close(answer, own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("module", "shape"),
    [(nn.RReLU(), (4,)), (nn.Conv3d(2, 3, 2), (2, 4, 4, 4)), (nn.Upsample(scale_factor=2), (4, 3, 3))],
    ids=lambda value: type(value).__name__,
)
def test_modules_that_are_not_exported_are_named(module: nn.Module, shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"parts\.0 \({type(module).__name__}\) uses aten\."):
        trace_program(Together([module]).eval(), {"x": torch.randn(ROWS, *shape)}, ["y"])
