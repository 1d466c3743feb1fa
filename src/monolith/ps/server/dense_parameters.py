"""The dense parameters of a server: named tensors, each with its optimizer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from monolith.errors import CheckpointMismatchError, ConfigError, CorruptFileError, InvalidArgumentError
from monolith.ps.protocol.dense_optimizers import DenseOptimizer, make_optimizer, state_numbers
from monolith.ps.protocol.messages import DenseSettings, DenseSettingsOf
from monolith.state.optimizer_state import complete_slots, other_optimizer
from monolith.state_bytes import State

__all__ = ["DenseParameters"]

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Parameter:
    values: torch.Tensor
    settings: DenseSettings
    optimizer: torch.optim.Optimizer
    changed: bool = False
    """Whether it was trained, assigned or restored since a worker declared it."""
    declared: bool = True
    """Whether a worker trains it here. After a restore onto other servers each holds all of them, and is then asked for some."""
    run: str = ""
    """The launch of the worker that has declared its settings. "" if that did not say."""

    def step(self, gradient: torch.Tensor) -> None:
        self.changed = True
        self.values.grad = gradient
        self.optimizer.step()
        self.values.grad = None

    def use(self, current: DenseOptimizer) -> None:
        """Use these hyperparameters for the next steps."""
        if current == self.settings.current:
            return
        self.settings = self.settings.model_copy(update={"current": current})
        (group,) = self.optimizer.param_groups
        group.update(current.settings)
        if slots := self.optimizer.state.get(self.values):
            self.optimizer.state[self.values] = complete_slots(slots, group)

    def declare(self, name: str, settings: DenseSettings, run: str = "") -> None:
        """Use the hyperparameters whose declaration has changed. The others keep the values that a scheduler has set."""
        changes = self.settings.declared.differences(settings.declared)
        self.run = run if run or changes else self.run
        self.settings = self.settings.model_copy(update={"declared": settings.declared})
        self.use(self.settings.current.with_settings(**{key: settings.current.settings[key] for key in changes}))
        for key, (was, now) in changes.items():
            _log.warning("dense parameter %r: %s was declared as %r, a worker now declares %r", name, key, was, now)


class DenseParameters:
    """Float32 tensors by name. Each call is atomic over all parameters that it names."""

    def __init__(self, *, require_memory: Callable[[int], None] = lambda more: None) -> None:
        self._parameters: dict[str, _Parameter] = {}
        self._require_memory = require_memory
        self._lock = threading.Lock()

    def declare(
        self,
        names: Sequence[str],
        values: Sequence[np.ndarray],
        settings: Sequence[DenseSettings],
        *,
        replace_other: bool = False,
        run: str = "",
    ) -> bool:
        """Create the parameters with `values`, unless they exist.

        Existing parameters keep their values, and use the hyperparameters whose declaration has changed.

        Args:
            names: each once.
            values: initial values of new parameters.
            settings: of each parameter.
            replace_other: start a parameter again that another class of optimizer trains, instead of refusing.
            run: the launch of the job that the worker belongs to, "" if it does not say.

        Returns:
            Whether they were created.

        Raises:
            ConfigError: another worker of the same launch has declared other settings.
            CheckpointMismatchError: another class of optimizer trains a parameter.
        """
        _require_values(names, values)
        given = {name: (array, one) for name, array, one in zip(names, values, settings, strict=True)}
        with self._lock:
            there = [name for name in names if name in self._parameters]
            if there and len(there) < len(names):
                missing = next(name for name in names if name not in self._parameters)
                raise ConfigError(
                    f"dense parameter {missing!r}: not there, while {there[0]!r} is; another model is served"
                )
            for name in there if run else ():
                self._require_other_run(name, given[name][1], run)
            other = [name for name in there if self._is_other(name, *given[name])]
            if other and not replace_other:
                raise _mismatch(other[0], self._parameters[other[0]].settings, given[other[0]][1])
            fresh = [name for name in names if name not in there or name in other]
            self._require_memory(4 * sum(state_numbers(given[n][1].current, given[n][0].shape) for n in fresh))
            made = {name: _parameter(*given[name]) for name in fresh}
            for parameter in made.values():
                parameter.run = run
            for name in there:
                if name not in other:
                    self._parameters[name].declare(name, given[name][1], run)
                self._parameters[name].declared = True
            self._parameters |= made
            return not there

    def settings(self, names: Sequence[str]) -> DenseSettingsOf:
        """Return the optimizers with their hyperparameters, and whether the parameters have changed since the declaration."""
        with self._lock:
            parameters = [self._parameter(name) for name in names]
            return DenseSettingsOf(
                settings=tuple(one.settings for one in parameters), changed=tuple(one.changed for one in parameters)
            )

    def read(self, names: Sequence[str]) -> list[np.ndarray]:
        """Return the values now, as copies."""
        with self._lock:
            return [self._parameter(name).values.detach().clone().numpy() for name in names]

    def apply(
        self,
        names: Sequence[str],
        gradients: Sequence[np.ndarray],
        optimizers: Sequence[DenseOptimizer] | None = None,
        *,
        only: Collection[str] | None = None,
    ) -> None:
        """Make one optimizer step for each of `names`, or only for those in `only`.

        `optimizers` have the hyperparameters of this and the following steps. None: those of the step before.
        """
        with self._lock:
            pairs = dict(zip(names, self._matched(names, gradients), strict=True))
            current = {} if optimizers is None else dict(zip(names, optimizers, strict=True))
            for name, optimizer in current.items():
                held = pairs[name][0].settings.current.name
                if optimizer.name != held:
                    raise InvalidArgumentError(
                        f"dense parameter {name!r}: it is trained with {held}, the gradient is for {optimizer.name}"
                    )
            for name, (parameter, gradient) in pairs.items():
                if only is None or name in only:
                    parameter.use(current.get(name, parameter.settings.current))
                    parameter.step(gradient)

    def assign(self, names: Sequence[str], values: Sequence[np.ndarray], *, add: bool = False) -> None:
        """Set the values, or add to them. The state of the optimizers stays."""
        with self._lock, torch.no_grad():
            pairs = self._matched(names, values)
            for parameter, value in pairs:
                parameter.values.copy_(parameter.values + value if add else value)
                parameter.changed = True

    def state(self, names: Collection[str] | None = None) -> dict[str, State]:
        """Return values, optimizers and their state by name, of all parameters or of `names`. The tensors are not copied."""
        with self._lock:
            return {
                name: {
                    "values": parameter.values.detach(),
                    "settings": parameter.settings.model_dump_json(),
                    "optimizer": parameter.optimizer.state_dict()["state"],
                    "changed": parameter.changed,
                    "declared": parameter.declared,
                }
                for name, parameter in self._parameters.items()
                if names is None or name in names
            }

    def take_over(self, state: Mapping[str, State]) -> None:
        """Train what `state` of another server returned here from now on. On an error nothing has changed."""
        taken = {name: _loaded(name, saved) for name, saved in state.items()}
        with self._lock:
            if there := next((name for name in taken if name in self._declared()), None):
                raise InvalidArgumentError(f"dense parameter {there!r}: it is trained here already")
            self._require_memory(_nbytes(taken.values()))
            for parameter in taken.values():
                parameter.declared = True
            self._parameters |= taken

    def replace(self, state: Mapping[str, State]) -> None:
        """Continue with the parameters in `state` of another server or a checkpoint. On an error nothing has changed."""
        try:
            loaded = {name: _loaded(name, saved) for name, saved in state.items()}
        except CorruptFileError as error:
            raise InvalidArgumentError(str(error)) from None
        with self._lock:
            for name, parameter in loaded.items():
                mine = self._parameter(name)
                if mine.values.shape != parameter.values.shape:
                    raise InvalidArgumentError(
                        f"dense parameter {name!r}: expected {list(mine.values.shape)}, got {list(parameter.values.shape)}"
                    )
                parameter.declared, parameter.changed = mine.declared, True
            self._require_memory(_nbytes(loaded.values()))
            self._parameters |= loaded

    def set_declared(self, names: Collection[str], *, declared: bool) -> None:
        """Whether workers train `names` here."""
        with self._lock:
            for name in names:
                self._parameter(name).declared = declared

    def drop(self, names: Collection[str]) -> None:
        """Remove `names`."""
        with self._lock:
            self._parameters = {name: one for name, one in self._parameters.items() if name not in names}

    def load_state(self, *states: Mapping[str, State]) -> None:
        """Replace all parameters by what `state` returned. On an error nothing has changed."""
        self.prepare_state(*states)()

    def prepare_state(self, *states: Mapping[str, State], elsewhere: bool = False) -> Callable[[], None]:
        """Read what `state` of one or several servers returned. Returns a function that replaces all parameters by it.

        If several states have a parameter, the one that was trained counts.

        Args:
            states: of the servers.
            elsewhere: they were trained on other servers. Parameters that were trained here before stay so, with the
                hyperparameters that are declared here.

        Raises:
            CheckpointMismatchError: a parameter is declared here with another class of optimizer.
        """
        loaded: dict[str, _Parameter] = {}
        for state in states:
            for name, saved in state.items():
                parameter = _loaded(name, saved)
                if name not in loaded or not loaded[name].declared:
                    loaded[name] = parameter
        with self._lock:
            for name in loaded.keys() & self._parameters.keys() if elsewhere else ():
                here = self._parameters[name].settings
                if here.declared.name != loaded[name].settings.declared.name:
                    raise _mismatch(name, loaded[name].settings, here)

        def put_in_place() -> None:
            with self._lock:
                for name, parameter in loaded.items() if elsewhere else ():
                    here = self._parameters.get(name)
                    parameter.declared = here is not None and here.declared
                    if here is not None:
                        parameter.declare(name, here.settings)
                self._parameters = loaded

        return put_in_place

    def declared(self) -> tuple[str, ...]:
        """Return the names of those that workers train here."""
        return tuple(self.sizes())

    def sizes(self) -> dict[str, int]:
        """Return the bytes of the values of those that workers train here."""
        with self._lock:
            return {name: self._parameters[name].values.nbytes for name in self._declared()}

    @property
    def nbytes(self) -> int:
        """Memory of the values."""
        return _nbytes(list(self._parameters.values()))

    def __len__(self) -> int:
        return len(self._parameters)

    def _require_other_run(self, name: str, settings: DenseSettings, run: str) -> None:
        """Raise if other settings come from a worker of the same launch: neither of the two is the newer one."""
        held = self._parameters[name]
        if held.run != run or held.settings.declared == settings.declared:
            return
        was, now = held.settings.declared, settings.declared
        if was.name != now.name:
            differ = f"{was.name} and {now.name}"
        else:
            differ = ", ".join(f"{key} = {one!r} and {other!r}" for key, (one, other) in was.differences(now).items())
        raise ConfigError(
            f"dense parameter {name!r}: two workers of the launch {run!r} declare different settings of its optimizer: {differ}; "
            "run the same code with the same configuration in all workers. To change a setting, start the job again, under "
            "another RunnerConfig.uuid if its servers stay"
        )

    def _is_other(self, name: str, values: np.ndarray, settings: DenseSettings) -> bool:
        """Whether another class of optimizer trains a parameter. `ConfigError` if it has another shape."""
        held = self._parameters[name]
        if tuple(held.values.shape) != values.shape:
            raise ConfigError(
                f"dense parameter {name!r}: another worker has declared it as {list(held.values.shape)}, not {list(values.shape)}"
            )
        return held.settings.declared.name != settings.declared.name

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
            # A copy: the memory of a frame is read-only, and torch needs writable memory.
            pairs.append((parameter, torch.from_numpy(array.copy())))
        return pairs

    def _parameter(self, name: str) -> _Parameter:
        try:
            return self._parameters[name]
        except KeyError:
            raise InvalidArgumentError(f"dense parameter: the server has no {name!r}; declare it first") from None


def _parameter(values: np.ndarray, settings: DenseSettings) -> _Parameter:
    tensor = torch.from_numpy(values.copy()).requires_grad_()
    optimizer = make_optimizer(settings.declared, [tensor])
    # Not by its constructor, which may refuse values that a scheduler has set.
    optimizer.param_groups[0].update(settings.current.settings)
    return _Parameter(values=tensor, settings=settings, optimizer=optimizer)


def _nbytes(parameters: Iterable[_Parameter]) -> int:
    return 4 * sum(state_numbers(one.settings.current, one.values.shape) for one in parameters)


def _loaded(name: str, saved: State) -> _Parameter:
    try:
        assert isinstance(saved, dict)
        values = saved["values"]
        if values.dtype != torch.float32:
            raise ValueError(f"expected float32, got {values.dtype}")
        parameter = _parameter(values.numpy(), DenseSettings.from_json(saved["settings"]))
        _require_slots(saved["optimizer"])
        groups = parameter.optimizer.state_dict()["param_groups"]
        parameter.optimizer.load_state_dict({"state": saved["optimizer"], "param_groups": groups})
        parameter.declared, parameter.changed = bool(saved["declared"]), bool(saved["changed"])
    except (AssertionError, AttributeError, ConfigError, KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(f"dense parameter {name!r}: its saved state cannot be read: {error!r}") from None
    return parameter


def _require_slots(state: object) -> None:
    """Refuse a state that is not one of tensors and numbers for the only parameter."""
    if not isinstance(state, dict) or not all(isinstance(slots, dict) for slots in state.values()) or set(state) - {0}:
        raise ValueError("expected the slots of one parameter")
    for slot in (slot for slots in state.values() for slot in slots.values()):
        if slot is not None and not isinstance(slot, torch.Tensor | int | float):
            raise ValueError(f"expected slots of tensors and numbers, got {type(slot).__name__}")


def _mismatch(name: str, held: DenseSettings, wanted: DenseSettings) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"dense parameter {name!r}: {other_optimizer(held.declared.name, wanted.declared.name)}. All workers of a run need the "
        "same optimizer"
    )


def _require_values(names: Sequence[str], arrays: Sequence[np.ndarray]) -> None:
    if len(arrays) != len(names):
        raise InvalidArgumentError(f"arrays: expected {len(names)}, one per name, got {len(arrays)}")
    if len(set(names)) != len(names):
        raise InvalidArgumentError(f"names: expected each once, got {', '.join(names)}")
    for name, array in zip(names, arrays, strict=True):
        if array.dtype != np.float32:
            raise InvalidArgumentError(f"dense parameter {name!r}: expected float32, got {array.dtype}")
