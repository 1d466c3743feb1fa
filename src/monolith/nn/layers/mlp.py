"""Multi-layer perceptrons, alone (`MLP`) and with every layer gated by a second input (`LHUCTower`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.nn.checks import require_dims, require_positive, require_shape
from monolith.nn.layers.activations import Activation, make_activation
from monolith.nn.layers.dense import Dense, Initializer, WeightNorm
from monolith.nn.layers.norms import BatchNorm

__all__ = ["LHUCTower", "MLP", "MLPOptions"]

_KERAS_EPS = 1e-3  # the original's MLP normalises with Keras, whose epsilon this is


class MLPOptions(TypedDict, total=False):
    """What `MLP` and all layers that contain one can be told about it, with the defaults of `MLP`.

    Example:
        >>> options: MLPOptions = {"weight_norm": None, "batch_norm": True}
        >>> len(MLP(4, [8, 1], **options).layers)
        3
    """

    bias: bool
    initializer: Initializer
    weight_norm: WeightNorm | None
    batch_norm: bool
    batch_norm_momentum: float
    batch_renorm: bool


class MLP(nn.Module):
    """[batch norm] -> (dense -> [batch norm, but not after the last] -> activation) for each of `output_dims`.

    x [*, in_features] -> [*, output_dims[-1]].

    Args:
        in_features: size of the last dimension of x.
        output_dims: units of each layer.
        activations: None, relu after all layers but the last; one activation, it after all but the last; a list, one per layer.
        bias: whether the dense layers add a bias.
        initializer: fills each weight [out, in] in place.
        weight_norm: see `Dense`. Learnable by default: the initial function is that of a plain MLP, but length and direction
            of a unit's weights are trained apart.
        batch_norm: normalise the input and every layer but the last.
        batch_norm_momentum: share of the new batch in the running statistics.
        batch_renorm: see `BatchNorm`.

    Example:
        >>> mlp = MLP(8, [16, 1])
        >>> mlp(torch.zeros(4, 8)).shape
        torch.Size([4, 1])
    """

    def __init__(
        self,
        in_features: int,
        output_dims: Sequence[int],
        *,
        activations: Activation | Sequence[Activation] = None,
        bias: bool = True,
        initializer: Initializer = nn.init.xavier_uniform_,
        weight_norm: WeightNorm | None = "learnable",
        batch_norm: bool = False,
        batch_norm_momentum: float = 0.01,
        batch_renorm: bool = False,
    ) -> None:
        super().__init__()
        require_positive("MLP.in_features", in_features)
        require_dims("MLP.output_dims", output_dims)

        def norm(width: int) -> list[nn.Module]:
            made = BatchNorm(width, eps=_KERAS_EPS, momentum=batch_norm_momentum, renorm=batch_renorm)
            return [made] if batch_norm else []

        blocks: list[nn.Module] = norm(in_features)
        width = in_features
        for index, (dim, activation) in enumerate(zip(output_dims, _per_layer(activations, output_dims), strict=True)):
            dense = Dense(width, dim, bias=bias, initializer=initializer, weight_norm=weight_norm)
            inner = norm(dim) if index < len(output_dims) - 1 else []
            blocks.append(nn.Sequential(dense, *inner, make_activation(activation, dim)))
            width = dim
        self.layers = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[*, in_features] -> [*, output_dims[-1]]."""
        y: torch.Tensor = self.layers(x)
        return y


class LHUCTower(nn.Module):
    """An MLP whose every layer is scaled unit by unit by what a second input, usually the user, asks for.

    h_l = layer_l(h_{l-1}) * gate_l(u), each gate an MLP with relu inside and 2 * sigmoid at its end, so a gate lies in (0, 2).
    x [B, in_features], u [B, gate_features] -> [B, output_dims[-1]]. (LHUC: learning hidden unit contributions.)

    Args:
        in_features: size of x.
        output_dims: units of each layer.
        gate_features: size of u; None if x gates itself.
        lhuc_output_dims: hidden units of the gates: None for none, a list of ints for every gate alike, a list of lists
            for each gate its own, each then ending with the units of the layer it gates.
        activations: as in `MLP`.
        lhuc_options: options of the gates where they differ from those of the tower.
        options: of the tower, see `MLP`.

    Example:
        >>> tower = LHUCTower(8, [16, 1], gate_features=3, lhuc_output_dims=[4])
        >>> tower(torch.zeros(2, 8), torch.zeros(2, 3)).shape
        torch.Size([2, 1])
    """

    def __init__(
        self,
        in_features: int,
        output_dims: Sequence[int],
        *,
        gate_features: int | None = None,
        lhuc_output_dims: Sequence[int] | Sequence[Sequence[int]] | None = None,
        activations: Activation | Sequence[Activation] = None,
        lhuc_options: MLPOptions | None = None,
        **options: Unpack[MLPOptions],
    ) -> None:
        super().__init__()
        self.gate_features = in_features if gate_features is None else gate_features
        tower = list(MLP(in_features, output_dims, activations=activations, **options).layers)
        self.input_norm = tower[0] if options.get("batch_norm") else nn.Identity()
        self.layers = nn.ModuleList(tower[-len(output_dims) :])
        gate_options: MLPOptions = {**options, **(lhuc_options or {})}
        self.gates = nn.ModuleList(
            MLP(self.gate_features, dims, activations=["relu"] * (len(dims) - 1) + ["sigmoid2"], **gate_options)
            for dims in _gate_dims(lhuc_output_dims, output_dims)
        )

    def forward(self, x: torch.Tensor, u: torch.Tensor | None = None) -> torch.Tensor:
        """[B, in_features], [B, gate_features] -> [B, output_dims[-1]]; without u, x gates itself."""
        gate_input = x if u is None else u
        require_shape("LHUCTower.u", gate_input, "*", self.gate_features)
        hidden: torch.Tensor = self.input_norm(x)
        for layer, gate in zip(self.layers, self.gates, strict=True):
            hidden = layer(hidden) * gate(gate_input)
        return hidden


def _per_layer(activations: Activation | Sequence[Activation], dims: Sequence[int]) -> Sequence[Activation]:
    if activations is None or isinstance(activations, str) or not isinstance(activations, Sequence):
        return [activations or "relu"] * (len(dims) - 1) + [None]
    if len(activations) != len(dims):
        raise InvalidArgumentError(
            f"activations: expected one per layer, {len(dims)}, got {len(activations)}: {activations!r}"
        )
    return activations


def _gate_dims(
    hidden: Sequence[int] | Sequence[Sequence[int]] | None, output_dims: Sequence[int]
) -> list[Sequence[int]]:
    if not hidden:
        return [[dim] for dim in output_dims]
    where = "LHUCTower.lhuc_output_dims"
    gates = [gate for gate in hidden if not isinstance(gate, int)]
    if not gates:
        shared = [size for size in hidden if isinstance(size, int)]
        return [[*shared, dim] for dim in output_dims]
    if len(gates) != len(output_dims) or len(gates) != len(hidden):
        raise InvalidArgumentError(
            f"{where}: expected a list of ints for each of {len(output_dims)} layers, got {hidden!r}"
        )
    for index, (gate, dim) in enumerate(zip(gates, output_dims, strict=True)):
        require_dims(f"{where}[{index}]", gate, last=dim)
    return gates
