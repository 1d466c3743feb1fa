"""Dense parameters on servers, and the copies of them that a worker's model reads."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch import Tensor, nn

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.process_bound import WorkerThreads
from monolith.ps.client.dense_routes import DensePart, DenseRoutes
from monolith.ps.client.server_group import ServerGroup
from monolith.ps.protocol import messages
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.dense_optimizers import DenseOptimizer, group_optimizers
from monolith.state.optimizer_state import declared_settings
from monolith.state_bytes import pack_state
from monolith.table.store import Position

__all__ = ["CachedParameters", "ServerOptimizer", "ServerParameters"]

_log = logging.getLogger(__name__)


class ServerParameters:
    """Named float32 tensors on the servers of a store, each on one server, with its optimizer.

    The first worker that declares them sets the values. Later workers find them on the servers that hold them. All workers place
    new ones alike: the largest first, each on the server with the fewest bytes. When servers leave (`ServerStore.rebalance`),
    their parameters move to others, and calls follow them.

    Args:
        group: the servers.
        parameters: by name.
        optimizer: of all parameters, or of each by name.
        current: hyperparameters that a scheduler has moved away from those of `optimizer`, likewise.
        replace_other: start parameters again that another class of optimizer trains, instead of refusing.

    Example:
        >>> from monolith.ps import DenseOptimizer, ParameterServer, ServerParameters, ServerStore
        >>> sgd = DenseOptimizer.of(torch.optim.SGD, lr=1.0)
        >>> with ParameterServer() as server, ServerStore([server.address]) as store:
        ...     origin = ServerParameters(store, {"w": torch.tensor([5.0])}, sgd)
        ...     origin.apply({"w": torch.tensor([1.0])})
        ...     origin.read()
        {'w': tensor([4.])}
    """

    def __init__(
        self,
        group: ServerGroup,
        parameters: Mapping[str, Tensor],
        optimizer: DenseOptimizer | Mapping[str, DenseOptimizer],
        *,
        current: Mapping[str, DenseOptimizer] | None = None,
        replace_other: bool = False,
    ) -> None:
        self._group = group
        self._names = tuple(parameters)
        declared = dict.fromkeys(self._names, optimizer) if isinstance(optimizer, DenseOptimizer) else optimizer
        settings = {
            name: messages.DenseSettings(declared=declared[name], current=(current or declared)[name])
            for name in self._names
        }
        values = {name: _array(name, tensor) for name, tensor in parameters.items()}
        self._routes = DenseRoutes(group, {name: array.size for name, array in values.items()})

        def declare(part: DensePart) -> str:
            groups, group_of = _grouped(part.names, settings)
            return messages.DeclareDense(
                names=part.names,
                groups=groups,
                group_of=group_of,
                replace_other=replace_other,
                run=group.config.run,
            ).model_dump_json()

        answers = self._routes.ask(Call.DECLARE_DENSE, self._names, declare, values)
        self.created = any(json.loads(frame.text)["created"] for _, frame in answers)
        """Whether this worker created them."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order given."""
        return self._names

    def read(self) -> dict[str, Tensor]:
        """Return the values now, as new tensors."""
        answers = self._routes.ask(
            Call.READ_DENSE, self._names, lambda part: messages.ReadDense(names=part.names).model_dump_json()
        )
        found = {n: torch.from_numpy(a.copy()) for names, f in answers for n, a in zip(names, f.arrays, strict=True)}
        return {name: found[name] for name in self._names}

    def settings(self) -> dict[str, messages.DenseSettings]:
        """Return the optimizers and their hyperparameters now, as declared and as the last step had them."""
        answers = self._settings()
        return {name: one for names, answer in answers for name, one in zip(names, answer.settings, strict=True)}

    def have_changed(self) -> bool:
        """Whether any parameter has been trained, assigned or restored since it was first declared."""
        return any(any(answer.changed) for _, answer in self._settings())

    def _settings(self) -> list[tuple[tuple[str, ...], messages.DenseSettingsOf]]:
        answers = self._routes.ask(
            Call.READ_DENSE_SETTINGS,
            self._names,
            lambda part: messages.ReadDenseSettings(names=part.names).model_dump_json(),
        )
        return [(names, messages.DenseSettingsOf.from_json(frame.text)) for names, frame in answers]

    def apply(
        self,
        gradients: Mapping[str, Tensor],
        *,
        optimizers: Mapping[str, DenseOptimizer] | None = None,
        position: Position | None = None,
    ) -> None:
        """One step of the servers' optimizer for each parameter that has a gradient here.

        Args:
            gradients: by name.
            optimizers: the hyperparameters of this step, which stay until others come. None: those of the step before.
            position: the batch it is of.
        """
        push_of = self._group.push_by_round()

        def text(part: DensePart) -> str:
            names = tuple(name for name in part.names if name in gradients)
            groups, group_of = ((), ()) if optimizers is None else _grouped(names, optimizers)
            return messages.ApplyDense(
                push=push_of(part.round),
                position=position,
                names=names,
                groups=groups,
                group_of=group_of,
                unchanged=tuple(name for name in part.names if name not in gradients),
            ).model_dump_json()

        # Parameters without a gradient also count as having had the batch, so that a successor need not go back to it.
        self._send(Call.APPLY_DENSE, gradients, text, also=() if position is None else self._names)

    def load(self, states: Mapping[str, Mapping[str, object]]) -> None:
        """Replace parameters, optimizers and their state by those of a server's checkpoint, by name."""
        for name, state in states.items():
            # One at a time: a parameter with its optimizer state may fill a frame.
            packed, push_of = pack_state({name: dict(state)}), self._group.push_by_round()
            parts = [packed.structure, packed.tensor_bytes()]
            self._routes.ask(
                Call.LOAD_DENSE,
                [name],
                lambda part, push_of=push_of: messages.LoadDense(
                    push=push_of(part.round), names=part.names
                ).model_dump_json(),  # type: ignore[misc]
                packed=[np.frombuffer(data, dtype=np.uint8) for data in parts],
            )

    def assign(self, values: Mapping[str, Tensor]) -> None:
        """Set the values of some parameters. The state of the optimizers stays."""
        self._assign(values, add=False)

    def assign_add(self, values: Mapping[str, Tensor]) -> None:
        """Add to the values of some parameters."""
        self._assign(values, add=True)

    def _assign(self, values: Mapping[str, Tensor], *, add: bool) -> None:
        push_of = self._group.push_by_round()
        self._send(
            Call.ASSIGN_DENSE,
            values,
            lambda part: messages.AssignDense(push=push_of(part.round), names=part.names, add=add).model_dump_json(),
        )

    def _send(
        self,
        call: Call,
        tensors: Mapping[str, Tensor],
        text: Callable[[DensePart], str],
        *,
        also: tuple[str, ...] = (),
    ) -> None:
        """Send `tensors` to the servers that hold them. `also`: names whose servers are called in any case."""
        if unknown := set(tensors) - set(self._names):
            raise InvalidArgumentError(f"parameters: there is no {min(unknown)!r}; there are {', '.join(self._names)}")
        names = tuple(dict.fromkeys((*tensors, *also)))
        self._routes.ask(call, names, text, {name: _array(name, tensor) for name, tensor in tensors.items()})


class CachedParameters:
    """The parameters of `module`, trained on servers. Reads use the module's copies, gradients are sent to the servers.

    `fetch` starts to read the servers in the background. `assign` waits for it and puts the values into the module. With `fetch`
    before every step and `assign` after it, a step uses the values from before the previous step. The hook
    `monolith.train.hooks.FetchCachedVariablesHook` does so, after a first round that is waited for.

    Args:
        module: its parameters are placed on servers.
        group: the servers.
        optimizer: over parameters of the module, in any number of groups. Servers make its steps, and get the hyperparameters of
            its groups with each push. A parameter that it does not have is not trained.
        declared: the hyperparameters of its groups as the code declares them. None: as they are.
        replace_other: start parameters again that another class of optimizer trains, instead of refusing.

    Example:
        >>> from monolith.ps import CachedParameters, ParameterServer, ServerStore
        >>> model = nn.Linear(1, 1, bias=False)
        >>> with ParameterServer() as server, ServerStore([server.address]) as store:
        ...     cached = CachedParameters(model, store, torch.optim.SGD(model.parameters(), lr=1.0))
        ...     cached.origin.assign({"weight": torch.tensor([[7.0]])})
        ...     cached.fetch()
        ...     cached.assign()
        >>> model.weight.item()
        7.0
    """

    def __init__(
        self,
        module: nn.Module,
        group: ServerGroup,
        optimizer: torch.optim.Optimizer,
        *,
        declared: Sequence[Mapping[str, Any]] | None = None,
        replace_other: bool = False,
    ) -> None:
        self._parameters = dict(module.named_parameters())
        self.optimizer = optimizer
        """The optimizer of the code, whose groups have the hyperparameters."""
        held = {id(parameter) for parameter in self._parameters.values()}
        if missing := sum(id(p) not in held for one in optimizer.param_groups for p in one["params"]):
            raise ConfigError(
                f"optimizer: {missing} of its parameters are not in the {type(module).__name__} that is placed on servers, so "
                "nothing would train them; make them part of it"
            )
        now = group_optimizers(optimizer)
        self._declared = first = group_optimizers(optimizer, declared or declared_settings(optimizer))
        # Parameters that nothing trains are on servers too, so that all workers have the same.
        self._group_of = dict.fromkeys(self._parameters, 0) | self._trained()
        self.origin = ServerParameters(
            group,
            self._parameters,
            {name: first[number] for name, number in self._group_of.items()},
            current={name: now[number] for name, number in self._group_of.items()},
            replace_other=replace_other,
        )
        """The parameters on the servers."""
        self.position: Position | None = None
        """The batch of the next `push`, if positions are recorded."""
        self._thread = WorkerThreads(1, thread_name_prefix="monolith-fetch")
        self._fetched: Future[dict[str, Tensor]] | None = None
        self.fetch()
        self.assign()

    def fetch(self) -> None:
        """Start to read the servers. The module keeps its values."""
        self._fetched = self._thread.submit(self.origin.read)

    def assign(self) -> None:
        """Wait for `fetch` and put the values into the module. Raises the errors of the fetch."""
        if self._fetched is None:
            return
        fetched, self._fetched = self._fetched, None
        values = fetched.result()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(values[name])

    def push(self) -> None:
        """Send the gradients of the module to the servers.

        Waits for a running fetch, which reads the values from before this step, whatever the timing.
        """
        if self._fetched is not None:
            wait([self._fetched])
        now, trained = group_optimizers(self.optimizer), self._trained()
        gradients = {n: p.grad for n, p in self._parameters.items() if p.grad is not None and n in trained}
        self.origin.apply(gradients, optimizers={n: now[trained[n]] for n in gradients}, position=self.position)

    def adopt_settings(self) -> None:
        """Continue with the hyperparameters that the servers have: those of the last step of any worker."""
        held, trained = self.origin.settings(), self._trained()
        for number, group in enumerate(self.optimizer.param_groups):
            here = group_optimizers(self.optimizer)[number]
            of_group = [held[name] for name, at in trained.items() if at == number]
            for key, mine in here.settings.items() if of_group else ():
                there = _latest(key, of_group)
                if there == mine:
                    continue
                _log.info(
                    "optimizer group %d: %s continues at %r, not %r: the servers have it so", number, key, there, mine
                )
                group[key] = there

    def install(self, slots: Mapping[int, Mapping[str, Any]]) -> None:
        """Continue on the servers from the module's values and from optimizer slots by the `id` of each parameter."""
        now = group_optimizers(self.optimizer)
        self.origin.load(
            {
                name: {
                    "values": parameter.detach(),
                    "settings": messages.DenseSettings(
                        declared=self._declared[self._group_of[name]], current=now[self._group_of[name]]
                    ).model_dump_json(),
                    "optimizer": {0: dict(slots[id(parameter)])} if id(parameter) in slots else {},
                    "changed": True,
                    "declared": True,
                }
                for name, parameter in self._parameters.items()
            }
        )

    def parameters(self) -> list[nn.Parameter]:
        """Return the module's own parameters: the copies."""
        return list(self._parameters.values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the copies by the names that the parameters have on the servers."""
        return dict(self._parameters)

    def _trained(self) -> dict[str, int]:
        """Return the number of the optimizer's group for each parameter that it has."""
        number_of = {id(p): number for number, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        return {name: number_of[id(p)] for name, p in self._parameters.items() if id(p) in number_of}


class ServerOptimizer(torch.optim.Optimizer):
    """The dense optimizer of a worker whose parameters are on servers: `step` sends the gradients there.

    Its groups are those of the optimizer that the parameters were cached with: a scheduler of either acts on both.

    Example:
        >>> from monolith.ps import CachedParameters, ParameterServer, ServerOptimizer, ServerStore
        >>> model = nn.Linear(1, 1, bias=False)
        >>> with ParameterServer() as server, ServerStore([server.address]) as store:
        ...     cached = CachedParameters(model, store, torch.optim.SGD(model.parameters(), lr=1.0))
        ...     before = model.weight.item()
        ...     model(torch.ones(1, 1)).sum().backward()
        ...     ServerOptimizer(cached).step()
        ...     after = cached.origin.read()["weight"].item()
        >>> model.weight.item() == before, round(before - after, 6)
        (True, 1.0)
    """

    def __init__(self, cached: CachedParameters) -> None:
        super().__init__(cached.parameters(), {})
        self._cached = cached
        self.defaults, self.param_groups = cached.optimizer.defaults, cached.optimizer.param_groups

    @property
    def origin(self) -> ServerParameters:
        """The parameters on the servers."""
        return self._cached.origin

    @property
    def local(self) -> torch.optim.Optimizer:
        """The optimizer of the code, whose steps the servers make."""
        return self._cached.optimizer

    def adopt_settings(self) -> None:
        """Continue with the hyperparameters that the servers have: those of the last step of any worker."""
        self._cached.adopt_settings()

    def install(self, slots: Mapping[int, Mapping[str, Any]]) -> None:
        """Continue on the servers from the model's values and from optimizer slots by the `id` of each parameter."""
        self._cached.install(slots)

    def values_in(self, module: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `values` of the servers by the names that the parameters have in `module`, all of them if one has several."""
        name_of = {id(parameter): name for name, parameter in self._cached.named_parameters().items()}
        named = {key: name_of.get(id(found), "") for key, found in module.named_parameters(remove_duplicate=False)}
        return {key: values[name] for key, name in named.items() if name in values}

    def set_position(self, position: Position | None) -> None:
        """Set the batch of the next step, which a successor of this worker then counts once."""
        self._cached.position = position

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Send the gradients to the servers, which make one step of their optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._cached.push()
        # Torch's schedulers check this to see that the optimizer steps before them.
        self.local._opt_called = True  # type: ignore[attr-defined]
        return loss


def _latest(key: str, held: Sequence[messages.DenseSettings]) -> Any:  # noqa: ANN401 - a hyperparameter
    """Return one value for a hyperparameter that may differ between parameters.

    They differ if a worker died between two servers, and for those that have had no gradient since a scheduler changed the
    others.
    """
    values = [one.current.settings[key] for one in held]
    moved = [value for value, one in zip(values, held, strict=True) if value != one.declared.settings[key]]
    found = max(moved or values, key=(moved or values).count)
    if distinct := [value for value in dict.fromkeys(values) if value != found]:
        _log.warning(
            "optimizer: servers have %s at %r, and for some parameters of its group at %s: the first is used for all",
            key,
            found,
            " and ".join(map(repr, distinct)),
        )
    return found


_T = TypeVar("_T")


def _grouped(names: Sequence[str], of: Mapping[str, _T]) -> tuple[tuple[_T, ...], tuple[int, ...]]:
    """Return the distinct values of `names`, and for each name the number of its own."""
    distinct = {id(of[name]): of[name] for name in names}
    number_of = {key: number for number, key in enumerate(distinct)}
    return tuple(distinct.values()), tuple(number_of[id(of[name])] for name in names)


def _array(name: str, tensor: Tensor) -> np.ndarray:
    if tensor.dtype != torch.float32:
        raise InvalidArgumentError(f"dense parameter {name!r}: expected float32, got {tensor.dtype}")
    return tensor.detach().cpu().contiguous().numpy()
