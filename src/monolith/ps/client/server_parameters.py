"""Dense parameters that live on servers, and copies of them that a worker's model reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import overload

import numpy as np
import torch
from torch import Tensor, nn

from monolith.errors import InvalidArgumentError
from monolith.ps import messages
from monolith.ps.client.dense_routes import DensePart, DenseRoutes
from monolith.ps.client.server_group import ServerGroup
from monolith.ps.dense_optimizers import DenseAdagrad, DenseAdam, DenseSgd
from monolith.transport.calls import Call

__all__ = ["CachedParameters", "ServerOptimizer", "ServerParameters"]


class ServerParameters:
    """Named float32 tensors on the servers of a store, each on one of them, with an optimizer beside it.

    The first worker that declares them gives the values; those that come later find them, on the servers that hold them. New
    ones are placed alike by all workers: the largest first, each on the server with the least so far. When servers leave
    (`ServerStore.rebalance`) theirs move to others, and calls follow them.

    Example:
        >>> from monolith.ps import DenseSgd, ParameterServer, ServerParameters, ServerStore
        >>> with ParameterServer() as server, ServerStore([server.address]) as store:
        ...     origin = ServerParameters(store, {"w": torch.tensor([5.0])}, DenseSgd(learning_rate=1.0))
        ...     origin.apply({"w": torch.tensor([1.0])})
        ...     origin.read()
        {'w': tensor([4.])}
    """

    def __init__(
        self, group: ServerGroup, parameters: Mapping[str, Tensor], optimizer: DenseSgd | DenseAdagrad | DenseAdam
    ) -> None:
        self._group = group
        self._names = tuple(parameters)
        values = {name: _array(name, tensor) for name, tensor in parameters.items()}
        self._routes = DenseRoutes(group, {name: array.size for name, array in values.items()})
        answers = self._routes.ask(
            Call.DECLARE_DENSE,
            self._names,
            lambda part: messages.DeclareDense(names=part.names, optimizer=optimizer).model_dump_json(),
            values,
        )
        self.created = any(json.loads(frame.text)["created"] for _, frame in answers)
        """Whether this worker was the first."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order given."""
        return self._names

    def read(self) -> dict[str, Tensor]:
        """The values now, as new tensors."""
        answers = self._routes.ask(
            Call.READ_DENSE, self._names, lambda part: messages.ReadDense(names=part.names).model_dump_json()
        )
        found = {n: torch.from_numpy(a.copy()) for names, f in answers for n, a in zip(names, f.arrays, strict=True)}
        return {name: found[name] for name in self._names}

    def apply(
        self,
        gradients: Mapping[str, Tensor],
        *,
        learning_rate: float | None = None,
        position: messages.Position | None = None,
    ) -> None:
        """One step of the servers' optimizer for each parameter that has a gradient here; `position`: the batch it is of."""
        push = self._numbered()

        def text(part: DensePart) -> str:
            apply = messages.ApplyDense(
                push=push(part),
                position=position,
                names=tuple(name for name in part.names if name in gradients),
                unchanged=tuple(name for name in part.names if name not in gradients),
                learning_rate=learning_rate,
            )
            return apply.model_dump_json()

        # Parameters without a gradient have had the batch, too: a successor of this worker need not go back to find one.
        self._send(Call.APPLY_DENSE, gradients, text, also=() if position is None else self._names)

    def assign(self, values: Mapping[str, Tensor]) -> None:
        """Set the values of some parameters; the optimizers' state stays."""
        self._assign(values, add=False)

    def assign_add(self, values: Mapping[str, Tensor]) -> None:
        """Add to the values of some parameters."""
        self._assign(values, add=True)

    def _assign(self, values: Mapping[str, Tensor], *, add: bool) -> None:
        push = self._numbered()
        self._send(
            Call.ASSIGN_DENSE,
            values,
            lambda part: messages.AssignDense(push=push(part), names=part.names, add=add).model_dump_json(),
        )

    def _numbered(self) -> Callable[[DensePart], messages.Push]:
        """The number of the change that a part is: one for all servers, and a new one for each further round."""
        made: dict[int, messages.Push] = {}

        def push(part: DensePart) -> messages.Push:
            if part.round not in made:
                made[part.round] = self._group.next_push()
            return made[part.round]

        return push

    def _send(
        self,
        call: Call,
        tensors: Mapping[str, Tensor],
        text: Callable[[DensePart], str],
        *,
        also: tuple[str, ...] = (),
    ) -> None:
        """Send `tensors` to the servers that hold them; `also`: names whose servers are asked in any case."""
        if unknown := set(tensors) - set(self._names):
            raise InvalidArgumentError(f"parameters: there is no {min(unknown)!r}; there are {', '.join(self._names)}")
        names = tuple(dict.fromkeys((*tensors, *also)))
        self._routes.ask(call, names, text, {name: _array(name, tensor) for name, tensor in tensors.items()})


class CachedParameters:
    """The parameters of `module`, trained on servers: reads use the module's copies, gradients go to the origin.

    `fetch` begins to read the origin, beside whatever the worker does; `assign` waits for it and puts the values into the
    module. Calling `fetch` before every step and `assign` after it, a step reads what was there before the step before; the
    hook `monolith.train.cached.FetchCachedVariablesHook` does so, after a first round that is waited for.

    Example:
        >>> from monolith.ps import CachedParameters, DenseSgd, ParameterServer, ServerStore
        >>> model = nn.Linear(1, 1, bias=False)
        >>> with ParameterServer() as server, ServerStore([server.address]) as store:
        ...     cached = CachedParameters(model, store, DenseSgd(learning_rate=1.0))
        ...     cached.origin.assign({"weight": torch.tensor([[7.0]])})
        ...     cached.fetch()
        ...     cached.assign()
        >>> model.weight.item()
        7.0
    """

    def __init__(self, module: nn.Module, group: ServerGroup, optimizer: DenseSgd | DenseAdagrad | DenseAdam) -> None:
        self._parameters = dict(module.named_parameters())
        self.origin = ServerParameters(group, self._parameters, optimizer)
        """The parameters on the servers."""
        self.position: messages.Position | None = None
        """The batch that the next `push` is of, if servers are told."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="monolith-fetch")
        self._fetched: Future[dict[str, Tensor]] | None = None
        self.fetch()
        self.assign()

    def fetch(self) -> None:
        """Begin to read the origin; the module keeps what it has."""
        self._fetched = self._thread.submit(self.origin.read)

    def assign(self) -> None:
        """Wait for what `fetch` began and put it into the module; an error of the fetch is raised here."""
        if self._fetched is None:
            return
        fetched, self._fetched = self._fetched, None
        values = fetched.result()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(values[name])

    def push(self) -> None:
        """Send what backward has left in the module to the origin.

        Waits for a fetch that is under way: it reads what was there before this step, whatever the timing.
        """
        if self._fetched is not None:
            wait([self._fetched])
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self.origin.apply(gradients, position=self.position)

    def parameters(self) -> list[nn.Parameter]:
        """The module's own parameters: the copies."""
        return list(self._parameters.values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The copies by the names that the parameters have on the servers."""
        return dict(self._parameters)


class ServerOptimizer(torch.optim.Optimizer):
    """The dense optimizer of a worker whose parameters are on servers: `step` sends the gradients there.

    Example:
        >>> from monolith.ps import CachedParameters, DenseSgd, ParameterServer, ServerOptimizer, ServerStore
        >>> model = nn.Linear(1, 1, bias=False)
        >>> with ParameterServer() as server, ServerStore([server.address]) as store:
        ...     cached = CachedParameters(model, store, DenseSgd(learning_rate=1.0))
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

    @property
    def origin(self) -> ServerParameters:
        """The parameters on the servers."""
        return self._cached.origin

    def values_in(self, module: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `values` of the servers by the names that the parameters have in `module`, all of them if one has several."""
        name_of = {id(parameter): name for name, parameter in self._cached.named_parameters().items()}
        named = {key: name_of.get(id(found), "") for key, found in module.named_parameters(remove_duplicate=False)}
        return {key: values[name] for key, name in named.items() if name in values}

    def set_position(self, position: messages.Position | None) -> None:
        """Say which batch the next step is of; a successor of this worker then counts it once."""
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
        return loss


def _array(name: str, tensor: Tensor) -> np.ndarray:
    if tensor.dtype != torch.float32:
        raise InvalidArgumentError(f"dense parameter {name!r}: expected float32, got {tensor.dtype}")
    return tensor.detach().cpu().contiguous().numpy()
