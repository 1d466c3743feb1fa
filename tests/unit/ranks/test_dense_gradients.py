"""Danger: dense gradients that differ between ranks, lose some of their parts, or exist where no rank has one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from monolith.errors import RankLostError
from monolith.ranks import dense
from monolith.ranks.dense import DenseGradients, SharedBuffers, dense_digest
from monolith.ranks.mesh import LoneMesh, Mesh
from monolith.testing.rank_threads import run_ranks


def model(sizes: tuple[int, ...]) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])


def gradient(part: int, parameter: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * part + parameter))


SIZES = (7, 1, 50_000, 3)


def added(ranks: int, parts: int, *, wire: dense.DenseWire = "float32") -> list[list[torch.Tensor]]:
    """The sums on every rank of `parts` parts, of which rank r has every one with number % ranks == r."""

    def rank(mesh: Mesh) -> list[torch.Tensor]:
        own = model(SIZES)
        gradients = DenseGradients(own, mesh, wire=wire)
        made = []
        for part in range(mesh.rank, parts, ranks):
            for number, parameter in enumerate(own):
                parameter.grad = gradient(part, number, parameter.numel())
            made.append(gradients.take(part, facts=np.array([part, 10 * part])))
        facts = gradients.add(made, step=3)
        assert facts.tolist() == [[part, 10.0 * part] for part in range(parts)]
        return [parameter.grad.clone() for parameter in own]  # type: ignore[union-attr]

    return run_ranks(ranks, rank)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("parts", [1, 4, 6])
def test_the_bits_of_a_sum_are_the_same_for_all_ranks_and_numbers_of_ranks(ranks: int, parts: int) -> None:
    expected = []
    for number, size in enumerate(SIZES):
        total = gradient(0, number, size)
        for part in range(1, parts):
            total = total + gradient(part, number, size)
        expected.append(total)
    for sums in added(ranks, parts):
        assert all(torch.equal(one, other) for one, other in zip(sums, expected, strict=True))


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_half_precision_on_the_wire_rounds_alike_on_all_ranks(wire: dense.DenseWire, ranks: int) -> None:
    exact, rounded = added(ranks, ranks)[0], added(ranks, ranks, wire=wire)
    assert all(torch.equal(one, other) for sums in rounded for one, other in zip(sums, rounded[0], strict=True))
    tolerance = 2e-2 if wire == "float16" else 1e-1
    for one, other in zip(rounded[0], exact, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        assert len(one) < 10 or not torch.equal(one, other)


def test_a_parameter_has_a_gradient_if_some_rank_has_one() -> None:
    def rank(mesh: Mesh) -> list[float | None]:
        own = model((1, 1, 1))
        gradients = DenseGradients(own, mesh)
        own[0].grad = torch.tensor([1.0])
        if mesh.rank:
            own[1].grad = torch.tensor([5.0])
        gradients.add([gradients.take(mesh.rank, facts=np.zeros(1))] if mesh.rank < 2 else [], step=1)
        return [None if parameter.grad is None else parameter.grad.item() for parameter in own]

    assert run_ranks(3, rank) == [[2.0, 5.0, None]] * 3


def test_parameters_of_other_types_keep_them() -> None:
    def rank(mesh: Mesh) -> object:
        own = nn.ParameterList([torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.bfloat16)])
        for parameter in own:
            parameter.grad = torch.full((2,), 0.1, dtype=parameter.dtype)
        gradients = DenseGradients(own, mesh)
        gradients.add([gradients.take(mesh.rank, facts=np.zeros(1))], step=1)
        return [(parameter.grad.dtype, parameter.grad[0].item()) for parameter in own]  # type: ignore[union-attr]

    double, half = run_ranks(2, rank)[1]  # type: ignore[misc]
    assert double == (torch.float64, 0.2)
    assert half == (torch.bfloat16, pytest.approx(0.2, rel=1e-2))


def test_running_statistics_are_the_mean_by_rows_and_constants_stay() -> None:
    def rank(mesh: Mesh) -> object:
        norm = nn.BatchNorm1d(1, momentum=1.0)
        norm.register_buffer("constant", torch.tensor([1 / 3]))
        buffers = SharedBuffers(norm, mesh)
        buffers.begin()
        made = []
        if mesh.rank < 2:
            norm(torch.tensor([[0.0], [10.0 * mesh.rank]]))
            made = [buffers.take(mesh.rank)]
        buffers.share(made, weights=[0.25, 0.75], step=1)
        return norm.running_mean.item(), norm.num_batches_tracked.item(), norm.constant.item()  # type: ignore[union-attr]

    assert run_ranks(3, rank) == [(3.75, 1, torch.tensor(1 / 3).item())] * 3


def test_a_digest_sees_names_shapes_types_and_bits() -> None:
    one = torch.tensor([1.0, 2.0])
    others = [("v", one), ("w", one.view(2, 1)), ("w", one.double()), ("w", torch.tensor([1.0, 2.0000002]))]
    assert dense_digest([("w", one)]) == dense_digest([("w", one.clone())])
    assert len({dense_digest([pair]) for pair in [("w", one), *others]}) == 5


def test_a_rank_that_torch_has_lost_is_a_loss_that_the_others_recover_from(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(values: torch.Tensor, group: object = None) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer\nException raised from ...")

    monkeypatch.setattr(torch.distributed, "all_reduce", broken)
    group = dense.AllReduce(torch.device("cpu"))
    with pytest.raises(RankLostError, match=r"could not be added.* Connection closed by peer$") as lost:
        DenseGradients(model((3,)), LoneMesh(), group=group).add([], step=3)
    assert lost.value.rank == -1
