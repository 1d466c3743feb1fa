"""The optimizers that a server has for dense parameters: a class from a fixed list, and checked values for its keywords.

A client names an optimizer and sends numbers. Nothing that it sends is looked up, imported or called.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, TypeAdapter, ValidationError, ValidationInfo, field_validator

from monolith.config import Config
from monolith.errors import ConfigError
from monolith.optim.optimizers import Adamom, RMSprop, Shampoo
from monolith.state.optimizer_state import optimizer_name, plain_setting

__all__ = ["DenseOptimizer", "group_optimizers", "make_optimizer", "state_numbers"]

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    optimizer_name(kind): kind
    for kind in (
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.Muon,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        Adamom,
        RMSprop,
        Shampoo,
    )
}
"""Not LBFGS, which computes the loss again and again, and not SparseAdam, which takes no dense gradients."""

_HOW = ("foreach", "fused", "capturable", "differentiable")
"""Keywords that affect speed but not results. Servers choose their own."""

_LARGEST = 3.4e38
_Number = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST, allow_inf_nan=False)]
_Least0 = Annotated[float, Field(ge=0, le=_LARGEST, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1)]
_Below1 = Annotated[float, Field(ge=0, lt=1)]
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Period = Annotated[int, Field(ge=1, lt=2**31)]
_TYPES: dict[str, Any] = {
    **dict.fromkeys(("lr", "dampening"), _Number),
    **dict.fromkeys(("momentum", "weight_decay", "lr_decay", "eps", "epsilon", "alpha", "lambd", "t0"), _Least0),
    **dict.fromkeys(("initial_accumulator_value", "momentum_decay", "damping_epsilon"), _Least0),
    **dict.fromkeys(("rho", "ada_decay", "mom_decay", "beta1", "beta2", "beta_1", "beta_2"), _Share),
    **dict.fromkeys(("nesterov", "maximize", "amsgrad", "centered", "decoupled_weight_decay", "use_v2"), bool),
    **dict.fromkeys(("warmup", "eigen_head", "eigen_tail"), _Count),
    **dict.fromkeys(("tau_1", "tau_2"), _Period),
    "betas": tuple[_Below1, _Below1],
    "etas": tuple[_Below1, Annotated[float, Field(gt=1, le=_LARGEST)]],
    "step_sizes": tuple[_Least0, _Least0],
    "beta2_decay": Annotated[float, Field(ge=-_LARGEST, le=0)],
    "d": Annotated[float, Field(ge=1, le=_LARGEST)],
    "ns_coefficients": tuple[_Number, _Number, _Number],
    "ns_steps": Annotated[int, Field(ge=1, lt=100)],
    "adjust_lr_fn": Literal["original", "match_rms_adamw"] | None,
    # Two whose keyword means something else there, or computes a root of it.
    "torch.optim.Adafactor.eps": tuple[_Least0 | None, _Least0],
    "torch.optim.ASGD.lr": _Least0,
}
"""The type and the bounds of each keyword."""


class DenseOptimizer(Config):
    """An optimizer of `torch.optim` or `monolith.optim` and its hyperparameters, for the servers of dense parameters.

    Example:
        >>> DenseOptimizer.of(torch.optim.Adagrad, lr=0.1).settings["initial_accumulator_value"]
        0
        >>> DenseOptimizer.of(torch.optim.Adam, betas=(0.9, 1.5))
        Traceback (most recent call last):
        monolith.errors.ConfigError: DenseOptimizer.settings: betas.1: Input should be less than 1; got {'betas': (0.9, 1.5)}
    """

    name: str
    """The class, as torch.optim.AdamW or monolith.optim.Shampoo."""
    settings: dict[str, Any] = Field(default={}, validate_default=True)
    """Its keyword arguments. Those that are left out have the defaults of the class."""

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in _CLASSES:
            raise ValueError(f"servers have no such optimizer; they have {', '.join(_CLASSES)}")
        return name

    @field_validator("settings")
    @classmethod
    def _are_valid(cls, settings: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        name = info.data.get("name")
        if name is None:
            return settings
        types, defaults = _keywords(name)
        if unknown := settings.keys() - types.keys():
            raise ValueError(f"{name} has no {min(unknown)!r} on servers; it has {', '.join(types)}")
        return defaults | {key: _valid(key, types[key], value) for key, value in settings.items()}

    @classmethod
    def of(cls, kind: type[torch.optim.Optimizer], **settings: Any) -> Self:  # noqa: ANN401 - checked by keyword
        """Return the optimizer that `kind(parameters, **settings)` would be."""
        return cls(name=optimizer_name(kind), settings=settings)

    def differences(self, other: DenseOptimizer) -> dict[str, tuple[Any, Any]]:
        """Return the hyperparameters in which `other`, of the same class, differs: this value and the other's."""
        return {
            key: (value, other.settings[key]) for key, value in self.settings.items() if value != other.settings[key]
        }

    def with_settings(self, **settings: Any) -> DenseOptimizer:  # noqa: ANN401 - checked by keyword
        """Return the same class with some other hyperparameters."""
        return DenseOptimizer(name=self.name, settings=self.settings | settings)


def make_optimizer(config: DenseOptimizer, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of `parameters` that `config` describes. Raises `ConfigError` if its class refuses it."""
    try:
        return _CLASSES[config.name](parameters, **config.settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{config.name}: {error}") from None


def group_optimizers(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]] | None = None
) -> list[DenseOptimizer]:
    """Return the server's optimizer of each parameter group, with its current hyperparameters, or those of `groups`.

    Raises:
        ConfigError: servers do not have the optimizer, or do not support a part of it.

    Example:
        >>> adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
        >>> [(one.name, one.settings["lr"]) for one in group_optimizers(adam)]
        [('torch.optim.AdamW', 0.01)]
    """
    # By the exact class: a subclass computes something else.
    name = optimizer_name(type(optimizer))
    if name not in _CLASSES:
        raise ConfigError(
            f"optimizer: several workers share dense parameters on the servers, which have {', '.join(_CLASSES)}; got {name}"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ConfigError(f"optimizer: servers make the steps of this {name}, where its step hooks would not be called")
    keywords = _keywords(name)[0]
    return [
        DenseOptimizer(name=name, settings={key: plain_setting(group[key]) for key in keywords if key in group})
        for group in groups or optimizer.param_groups
    ]


def state_numbers(config: DenseOptimizer, shape: Sequence[int]) -> int:
    """Return how many numbers a parameter takes at most with the state of its optimizer.

    Example:
        >>> state_numbers(DenseOptimizer.of(torch.optim.SGD), [10, 2])
        100
    """
    size = 1
    for n in shape:
        size *= n
    if config.name != optimizer_name(Shampoo):
        return 5 * size
    pairs: int = config.settings["eigen_head"] + config.settings["eigen_tail"]
    return 4 * size + sum(2 * n * n + (n + 1) * min(n, pairs) for n in shape or (1,))


@cache
def _keywords(name: str) -> tuple[dict[str, TypeAdapter[Any]], dict[str, Any]]:
    """Return the type and the default of each keyword of a class that servers take."""
    _, *keywords = inspect.signature(_CLASSES[name]).parameters.values()
    kept = [keyword for keyword in keywords if keyword.name not in _HOW]
    types = {one.name: TypeAdapter(_TYPES.get(f"{name}.{one.name}", _TYPES[one.name])) for one in kept}
    return types, {one.name: one.default for one in kept}


def _valid(key: str, kind: TypeAdapter[Any], value: object) -> Any:  # noqa: ANN401 - by keyword
    try:
        # JSON has lists only.
        return kind.validate_python(tuple(value) if isinstance(value, list) else value, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join([key, *map(str, first['loc'])])}: {first['msg']}") from None
