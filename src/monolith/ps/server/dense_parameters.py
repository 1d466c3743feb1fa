"""The dense parameters of a server: named tensors, each trained by an optimizer that lives beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import TypeAdapter

from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError
from monolith.ps.dense_optimizers import DenseAdagrad, DenseAdam, DenseOptimizer, DenseSgd, make_optimizer
from monolith.state_bytes import State

__all__ = ["DenseParameters"]

_OPTIMIZERS: TypeAdapter[DenseSgd | DenseAdagrad | DenseAdam] = TypeAdapter(DenseOptimizer)


@dataclass(kw_only=True)
class _Parameter:
    values: torch.Tensor
    config: DenseSgd | DenseAdagrad | DenseAdam
    optimizer: torch.optim.Optimizer
    declared: bool = True
    """Whether a worker trains it here. After a restore onto other servers each has all of them, and is then asked for some."""

    def step(self, gradient: torch.Tensor, learning_rate: float | None) -> None:
        (group,) = self.optimizer.param_groups
        group["lr"] = self.config.learning_rate if learning_rate is None else learning_rate
        self.values.grad = gradient
        self.optimizer.step()
        self.values.grad = None


class DenseParameters:
    """Float32 tensors by name. Each call sees, and leaves, all parameters it names at one moment.

    Example:
        >>> dense = DenseParameters()
        >>> dense.declare(["w"], [np.array([5.0], dtype=np.float32)], DenseSgd(learning_rate=1.0))
        True
        >>> dense.apply(["w"], [np.array([1.0], dtype=np.float32)])
        >>> dense.read(["w"])
        [array([4.], dtype=float32)]
    """

    def __init__(self, *, require_room: Callable[[int], None] = lambda more: None) -> None:
        self._parameters: dict[str, _Parameter] = {}
        self._require_room = require_room
        self._lock = threading.Lock()

    def declare(
        self, names: Sequence[str], values: Sequence[np.ndarray], optimizer: DenseSgd | DenseAdagrad | DenseAdam
    ) -> bool:
        """Make the parameters with `values`; False if they are there already, with what they have learned."""
        _require_values(names, values)
        with self._lock:
            there = [name for name in names if name in self._parameters]
            if there and len(there) < len(names):
                missing = next(name for name in names if name not in self._parameters)
                raise ConfigError(
                    f"dense parameter {missing!r}: not there, while {there[0]!r} is; another model is served"
                )
            for name, array in zip(there, values, strict=False):
                _require_same(name, self._parameters[name], array, optimizer)
            if not there:
                # Values and, at most, two numbers of optimizer state for each.
                self._require_room(3 * sum(array.nbytes for array in values))
                self._parameters |= {n: _parameter(v, optimizer) for n, v in zip(names, values, strict=True)}
            for name in there:
                self._parameters[name].declared = True
            return not there

    def read(self, names: Sequence[str]) -> list[np.ndarray]:
        """The values now, as copies."""
        with self._lock:
            return [self._parameter(name).values.detach().clone().numpy() for name in names]

    def apply(
        self,
        names: Sequence[str],
        gradients: Sequence[np.ndarray],
        learning_rate: float | None = None,
        *,
        only: Collection[str] | None = None,
    ) -> None:
        """One optimizer step for each of `names`, or only for those that are in `only`."""
        with self._lock:
            for name, (parameter, gradient) in zip(names, self._matched(names, gradients), strict=True):
                if only is None or name in only:
                    parameter.step(gradient, learning_rate)

    def assign(self, names: Sequence[str], values: Sequence[np.ndarray], *, add: bool = False) -> None:
        """Set the values, or add to them; the optimizers' state stays."""
        with self._lock, torch.no_grad():
            pairs = self._matched(names, values)
            for parameter, value in pairs:
                parameter.values.copy_(parameter.values + value if add else value)

    def state(self, names: Collection[str] | None = None) -> dict[str, State]:
        """Values, optimizers and their state by name, all or those of `names`; whoever packs it copies the tensors."""
        with self._lock:
            return {
                name: {
                    "values": parameter.values.detach(),
                    "config": parameter.config.model_dump_json(),
                    "optimizer": parameter.optimizer.state_dict()["state"],
                    "declared": parameter.declared,
                }
                for name, parameter in self._parameters.items()
                if names is None or name in names
            }

    def take_over(self, state: Mapping[str, State]) -> None:
        """Train here, from now on, what `state` of another server returned; on an error nothing has changed."""
        taken = {name: _loaded(name, saved) for name, saved in state.items()}
        with self._lock:
            if there := next((name for name in taken if name in self._declared()), None):
                raise InvalidArgumentError(f"dense parameter {there!r}: it is trained here already")
            self._require_room(3 * sum(parameter.values.nbytes for parameter in taken.values()))
            for parameter in taken.values():
                parameter.declared = True
            self._parameters |= taken

    def set_declared(self, names: Collection[str], *, declared: bool) -> None:
        """Whether workers train `names` here."""
        with self._lock:
            for name in names:
                self._parameter(name).declared = declared

    def drop(self, names: Collection[str]) -> None:
        """Forget `names`."""
        with self._lock:
            self._parameters = {name: one for name, one in self._parameters.items() if name not in names}

    def load_state(self, *states: Mapping[str, State], elsewhere: bool = False) -> None:
        """Hold what `state` of one or several servers returned, and nothing else; on an error nothing has changed.

        Of a parameter that several have, the one counts that was trained. `elsewhere`: they were trained on other servers; here
        are trained those that were before.
        """
        loaded: dict[str, _Parameter] = {}
        for state in states:
            for name, saved in state.items():
                parameter = _loaded(name, saved)
                if name not in loaded or not loaded[name].declared:
                    loaded[name] = parameter
        with self._lock:
            for name, parameter in loaded.items() if elsewhere else ():
                parameter.declared = name in self._parameters and self._parameters[name].declared
            self._parameters = loaded

    def declared(self) -> tuple[str, ...]:
        """The names of those that workers train here."""
        return tuple(self.sizes())

    def sizes(self) -> dict[str, int]:
        """The bytes of the values of those that workers train here."""
        with self._lock:
            return {name: self._parameters[name].values.nbytes for name in self._declared()}

    @property
    def nbytes(self) -> int:
        """Memory of the values."""
        return sum(parameter.values.nbytes for parameter in list(self._parameters.values()))

    def __len__(self) -> int:
        return len(self._parameters)

    def _declared(self) -> list[str]:
        return [name for name, parameter in self._parameters.items() if parameter.declared]

    def _matched(self, names: Sequence[str], arrays: Sequence[np.ndarray]) -> list[tuple[_Parameter, torch.Tensor]]:
        _require_values(names, arrays)
        pairs = []
        for name, array in zip(names, arrays, strict=True):
            parameter = self._parameter(name)
            if array.shape != tuple(parameter.values.shape):
                raise InvalidArgumentError(
                    f"dense parameter {name!r}: expected {list(parameter.values.shape)}, got {list(array.shape)}"
                )
            # A copy: the frame's memory is read-only, and torch wants to be able to write.
            pairs.append((parameter, torch.from_numpy(array.copy())))
        return pairs

    def _parameter(self, name: str) -> _Parameter:
        try:
            return self._parameters[name]
        except KeyError:
            raise InvalidArgumentError(f"dense parameter: the server has no {name!r}; declare it first") from None


def _parameter(values: np.ndarray, config: DenseSgd | DenseAdagrad | DenseAdam) -> _Parameter:
    tensor = torch.from_numpy(values.copy()).requires_grad_()
    return _Parameter(values=tensor, config=config, optimizer=make_optimizer(config, [tensor]))


def _loaded(name: str, saved: State) -> _Parameter:
    try:
        assert isinstance(saved, dict)
        config = _OPTIMIZERS.validate_json(saved["config"])
        parameter = _parameter(saved["values"].numpy(), config)
        groups = parameter.optimizer.state_dict()["param_groups"]
        parameter.optimizer.load_state_dict({"state": saved["optimizer"], "param_groups": groups})
        parameter.declared = bool(saved["declared"])
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(f"dense parameter {name!r}: its saved state cannot be read: {error!r}") from None
    return parameter


def _require_values(names: Sequence[str], arrays: Sequence[np.ndarray]) -> None:
    if len(arrays) != len(names):
        raise InvalidArgumentError(f"arrays: expected {len(names)}, one per name, got {len(arrays)}")
    if len(set(names)) != len(names):
        raise InvalidArgumentError(f"names: expected each once, got {', '.join(names)}")
    for name, array in zip(names, arrays, strict=True):
        if array.dtype != np.float32:
            raise InvalidArgumentError(f"dense parameter {name!r}: expected float32, got {array.dtype}")


def _require_same(
    name: str, parameter: _Parameter, values: np.ndarray, config: DenseSgd | DenseAdagrad | DenseAdam
) -> None:
    if tuple(parameter.values.shape) != values.shape:
        raise ConfigError(
            f"dense parameter {name!r}: another worker has declared it as {list(parameter.values.shape)}, "
            f"not {list(values.shape)}"
        )
    if parameter.config != config:
        raise ConfigError(
            f"dense parameter {name!r}: another worker has declared it with {parameter.config!r}, not {config!r}"
        )
