"""Multi-layer perceptrons, the logit correction after them, and auxiliary losses of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypedDict, Unpack, runtime_checkable

import torch
import torch.nn.functional as F
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.nn.checks import require_dims, require_positive, require_shape
from monolith.nn.layers.dense import Activation, BatchNorm, Dense, WeightInitializer, WeightNorm, make_activation

__all__ = ["HasAuxiliaryLoss", "LHUCTower", "LogitCorrection", "MLP", "MLPOptions", "auxiliary_loss", "correct_logits"]

_KERAS_EPS = 1e-3  # the original's MLP normalises with Keras, whose epsilon this is


class MLPOptions(TypedDict, total=False):
    """Options of `MLP`, and of all layers that contain one, with the defaults of `MLP`.

    Example:
        >>> options: MLPOptions = {"weight_norm": None, "batch_norm": True}
        >>> len(MLP(4, [8, 1], **options).layers)
        3
    """

    bias: bool
    initializer: WeightInitializer
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
        activations: one activation after all layers but the last (None is relu), or a list with one per layer.
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
        initializer: WeightInitializer = nn.init.xavier_uniform_,
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
    """An MLP whose every layer is scaled unit by unit by gates of a second input, usually the user.

    h_l = layer_l(h_{l-1}) * gate_l(u), each gate an MLP with relu inside and 2 * sigmoid at its end, so a gate lies in (0, 2).
    x [B, in_features], u [B, gate_features] -> [B, output_dims[-1]]. (LHUC: learning hidden unit contributions.)

    Args:
        in_features: size of x.
        output_dims: units of each layer.
        gate_features: size of u, or None if x gates itself.
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
        """[B, in_features], [B, gate_features] -> [B, output_dims[-1]]. Without u, x gates itself."""
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


def correct_logits(
    logits: torch.Tensor, sample_rate: torch.Tensor | float | None = None, *, sample_bias: bool = False
) -> torch.Tensor:
    """z' = z - ln(sample_rate), with sample_bias after z := ln(sigmoid(z)): logits [*], sample_rate [*] -> [*].

    Keeping each negative with probability r multiplies the odds in the data by 1 / r: ln(odds) rises by -ln(r). A model whose
    loss sees z - ln(r), for positives as for negatives, therefore learns the z of the data before sampling. sample_bias is for
    streams that have emitted every positive once as a negative, before it was clicked: the odds are then p instead of
    p / (1 - p). An example with a rate of 0 or less cannot have been sampled. It gives infinity or NaN, and so does the loss.

    Example:
        >>> correct_logits(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.1]))
        tensor([0.0000, 3.3026])
    """
    if sample_bias:
        logits = F.logsigmoid(logits)
    if sample_rate is None:
        return logits
    return logits - torch.log(torch.as_tensor(sample_rate, dtype=logits.dtype, device=logits.device))


class LogitCorrection(nn.Module):
    """act(z - ln(sample_rate)) in training, act(z) in evaluation: logits [*], sample_rate [*] -> [*].

    An exported model is in evaluation mode and thus serves z. For a loss that is corrected in evaluation too, call
    `correct_logits`, as `monolith.nn.get_sigmoid_loss_and_pred` does.

    Args:
        activation: after the correction, by default none.
        sample_bias: z := ln(sigmoid(z)) first, see `correct_logits`.

    Example:
        >>> correction = LogitCorrection()
        >>> correction(torch.tensor([0.0]), torch.tensor([0.5]))
        tensor([0.6931])
        >>> correction.eval()(torch.tensor([0.0]), torch.tensor([0.5]))
        tensor([0.])
    """

    def __init__(self, *, activation: Activation = None, sample_bias: bool = False) -> None:
        super().__init__()
        self.activation = make_activation(activation, 1)
        self.sample_bias = sample_bias

    def forward(self, logits: torch.Tensor, sample_rate: torch.Tensor | float | None = None) -> torch.Tensor:
        """[*], [*] -> [*]. Without a rate nothing was sampled away."""
        if self.training:
            logits = correct_logits(logits, sample_rate, sample_bias=self.sample_bias)
        y: torch.Tensor = self.activation(logits)
        return y


@runtime_checkable
class HasAuxiliaryLoss(Protocol):
    """A module with an auxiliary loss, which `auxiliary_loss` finds."""

    def auxiliary_loss(self) -> torch.Tensor:
        """Return the layer's auxiliary loss, a scalar."""


def auxiliary_loss(model: nn.Module) -> torch.Tensor:
    """Return the sum of the auxiliary losses of the modules of `model`, a scalar, 0 if there are none.

    Call it after the forward pass and add it to the loss: otherwise the auxiliary losses have no effect.

    Example:
        >>> from monolith.nn import IRazor
        >>> model = nn.Sequential(IRazor(2, [0, 4], feature_weight=[1.0, 3.0]), nn.Flatten(), nn.Linear(8, 1))
        >>> loss = model(torch.ones(5, 2, 4)).square().mean() + 0.01 * auxiliary_loss(model)
        >>> auxiliary_loss(model).item()
        8.0
    """
    total: torch.Tensor | None = None
    for module in model.modules():
        if isinstance(module, HasAuxiliaryLoss):
            loss = module.auxiliary_loss()
            total = loss if total is None else total + loss
    if total is None:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        return torch.zeros((), device=device)
    return total
