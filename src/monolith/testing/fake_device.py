"""A device of torch that computes on the processor: for tests of what a program keeps on the host and what on an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["FakeDevice"]

_SWEEP = 10_000


@dataclass
class FakeDevice:
    """Registers a device of torch, once in a process and for good, which becomes `torch.accelerator.current_accelerator()`.

    Its tensors cannot be read from the host, and an operator that mixes them with tensors of the host raises, except for
    tensors of no dimension, as on a GPU. The device counts what passes between it and the host. Run it in a process of its
    own: other tests must not find an accelerator.

    Example:
        >>> device = FakeDevice()
        >>> device.register()                                # doctest: +SKIP
        >>> torch.ones(2, device="fake").sum().item()        # doctest: +SKIP
        2.0
        >>> device.reads                                     # doctest: +SKIP
        1
    """

    name: str = "fake"
    to_device: int = 0
    """Tensors copied from the host."""
    to_host: int = 0
    """Tensors copied to the host."""
    reads: int = 0
    """Single numbers read on the host, for each of which the host waits."""
    operators: set[str] = field(default_factory=set)
    """What was computed."""
    _values: dict[int, tuple[StorageWeakRef, torch.Tensor]] = field(default_factory=dict, repr=False)
    _copies: dict[int, tuple[StorageWeakRef, torch.Tensor]] = field(default_factory=dict, repr=False)
    _roots: dict[int, tuple[StorageWeakRef, torch.Tensor]] = field(default_factory=dict, repr=False)
    _library: torch.library.Library | None = field(default=None, repr=False)

    def register(self) -> None:
        """Make the device known to torch."""
        _setup_privateuseone_for_python_backend(self.name)
        self._library = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
        self._library.fallback(self._call, "PrivateUse1")  # type: ignore[no-untyped-call]
        copy_of_host: Any = torch.Tensor.__deepcopy__

        def deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:  # noqa: ANN401 - a tensor
            # Torch would copy the memory, which is not where the values are.
            if not self._has(tensor):
                return copy_of_host(tensor, memo)
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]

        torch.Tensor.__deepcopy__ = deepcopy  # type: ignore[method-assign]

    def _call(self, operator: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any operator of torch
        name = operator.name()
        self.operators.add(name)
        if name == "aten::_copy_from":
            return self._copy(args[0], args[1])
        if name == "aten::as_strided":
            return self._view(args[0], lambda base: _strided(base, *args[1:]))
        if name == "aten::view":
            return self._view(args[0], lambda base: base.view(args[1]))
        self.reads += name == "aten::_local_scalar_dense"
        self._require_own_memory(operator, args, kwargs)
        given: dict[int, torch.Tensor] = {}

        def on_host(value: object) -> object:
            if isinstance(value, torch.device):
                return torch.device("cpu") if value.type == self.name else value
            if not isinstance(value, torch.Tensor):
                return value
            if not self._has(value):
                if value.ndim:
                    raise RuntimeError(f"{name}: expected all tensors on {self.name}, got one on {value.device}")
                return value
            inside = self._value(value)
            given[id(inside)] = value
            return inside

        # A number in the place of a tensor arrives here as a number.
        places = zip(args, operator._schema.arguments, strict=False)
        args = tuple(torch.tensor(v) if _is_number(v) and str(a.type) == "Tensor" else v for v, a in places)
        host_args, host_kwargs = pytree.tree_map(on_host, (args, kwargs))
        result = operator(*host_args, **host_kwargs)
        for tensor in given.values():
            inside = self._value(tensor)
            if inside.shape != tensor.shape:  # an output was resized
                tensor.data = self._tensor(inside)

        def on_device(value: object) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            return given[id(value)] if id(value) in given else self._tensor(value)

        return pytree.tree_map(on_device, result)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.to_device += not self._has(source)
        self.to_host += not self._has(target)
        if self._has(target):
            self._require_own("aten::_copy_from", target)
        inside = self._value(target) if self._has(target) else target
        inside.copy_(self._value(source) if self._has(source) else source)
        return target

    def _view(self, tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        value = self._value(tensor)
        base = value.contiguous()
        view = make(base)
        root = self._roots[id(value)][0] if id(value) in self._roots else _reference(tensor)
        (self._roots if base is value else self._copies)[id(view)] = (root, view)
        return self._tensor(view)

    def _require_own_memory(self, operator: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401 - any operator of torch
        """Raise for an operator that writes into a view which is a copy here, while what it is a view of still exists."""
        schema = operator._schema.arguments
        named = {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
        for argument in schema:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for value in pytree.tree_leaves(named.get(argument.name)) if written else ():
                if isinstance(value, torch.Tensor) and self._has(value):
                    self._require_own(operator.name(), value)

    def _require_own(self, name: str, tensor: torch.Tensor) -> None:
        copied = self._copies.get(id(self._value(tensor)))
        if copied is not None and _exists(copied[0]):
            raise NotImplementedError(f"{name}: {self.name} cannot write into a view of a view with gaps")

    def _has(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.name

    # Torch makes further tensors of one memory in C++, so values belong to the memory and not to tensors. For torch they all have
    # the strides of contiguous tensors, so a view of a value with gaps is one of a copy.
    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        tensor: torch.Tensor = torch._C._acc.create_empty_tensor(value.shape, value.dtype)
        self._values[tensor.untyped_storage()._cdata] = (_reference(tensor), value)
        if len(self._values) % _SWEEP == 0:
            for pairs in (self._values, self._roots, self._copies):
                for key in [key for key, pair in pairs.items() if not _exists(pair[0])]:
                    del pairs[key]
        return tensor

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._values[tensor.untyped_storage()._cdata][1]


def _strided(base: torch.Tensor, size: list[int], stride: list[int], offset: int | None = None) -> torch.Tensor:
    return base.as_strided(size, stride, base.storage_offset() + (offset or 0))


def _reference(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _exists(memory: StorageWeakRef) -> bool:
    return not memory.expired()  # type: ignore[no-untyped-call]


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float)
