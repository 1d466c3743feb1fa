"""Dense gradients and buffers of all ranks, added so that every rank has the same bits."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from monolith.errors import MonolithError, RankLostError
from monolith.nn.collection import embedding_collections
from monolith.ranks.mesh import Arrays, Kind, Mesh
from monolith.transport.frames import BFLOAT16

__all__ = [
    "AllReduce",
    "DenseGradients",
    "DenseWire",
    "SharedBuffers",
    "StepPart",
    "dense_digest",
    "lost_in_torch",
]

DenseWire = Literal["float32", "float16", "bfloat16"]
"""How dense gradients are sent. They are added in float32 in any case."""

WHOLE_BYTES = 2**16
"""Gradients up to this size are sent whole to every rank, in one exchange instead of two."""


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """What one forward and backward pass of a step has given."""

    number: int
    """Its place in the order in which parts are added, of all ranks together."""
    facts: np.ndarray
    """float64 [n]: numbers that every rank is to know of it. As many in every part."""
    gradient: Tensor
    """[elements]: the gradients of all parameters, one after the other."""
    present: np.ndarray
    """bool [parameters]: which of them have a gradient."""


class DenseGradients:
    """Adds the gradients of a model's dense parameters over all ranks, in the order of their parts.

    All gradients travel in one buffer. Each rank adds one stretch of it and sends the sum to the others. Small buffers, and those
    of two ranks, go whole to every rank, which then adds them itself: the same bits with one exchange less. Sums do not depend on
    which rank has which part.

    Parameters inside `DistributedDataParallel` have been averaged by backward and are only scaled from the mean to the sum.

    Args:
        model: with the same parameters on every rank.
        mesh: the ranks.
        wire: how gradients are sent.
        group: adds a flat tensor over all ranks in place, such as `torch.distributed.all_reduce`. None exchanges over `mesh`.

    Example:
        >>> from monolith.testing.rank_threads import run_ranks
        >>> def rank(mesh):
        ...     layer = nn.Linear(1, 1, bias=False)
        ...     dense = DenseGradients(layer, mesh)
        ...     layer.weight.grad = torch.full((1, 1), 10.0 + mesh.rank)
        ...     dense.add([dense.take(mesh.rank, facts=np.array([mesh.rank]))], step=1)
        ...     return layer.weight.grad.item()
        >>> run_ranks(3, rank)
        [33.0, 33.0, 33.0]
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, *, wire: DenseWire = "float32", group: AllReduce | None = None
    ) -> None:
        self._mesh, self._wire, self._group = mesh, wire, group
        reduced = {id(p) for m in model.modules() if isinstance(m, DistributedDataParallel) for p in m.parameters()}
        trained = {id(p): p for p in model.parameters() if p.requires_grad}
        self.parameters = [parameter for key, parameter in trained.items() if key not in reduced]
        """Those that are added here."""
        self.reduced_by_torch = [parameter for key, parameter in trained.items() if key in reduced]
        """Those inside `DistributedDataParallel`."""
        wide = any(parameter.dtype == torch.float64 for parameter in self.parameters)
        device = torch.device("cpu") if group is None else group.device
        elements = sum(parameter.numel() for parameter in self.parameters)
        self._sums = torch.zeros(elements, dtype=torch.float64 if wide else torch.float32, device=device)
        sizes = [parameter.numel() for parameter in self.parameters]
        parts = torch.split(self._sums, sizes) if sizes else ()
        self._views = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]
        self._bounds = self._stretches(elements)

    def _stretches(self, elements: int) -> list[slice]:
        size = self._mesh.size
        if size <= 2 or elements * self._sums.element_size() * (size - 1) <= WHOLE_BYTES:
            return [slice(0, elements)] * size
        bounds = [elements * number // size for number in range(size + 1)]
        return [slice(first, end) for first, end in itertools.pairwise(bounds)]

    @property
    def _whole(self) -> bool:
        return bool(self._bounds[0].stop == len(self._sums))

    def take(self, number: int, *, facts: np.ndarray) -> StepPart:
        """Move the gradients that backward has left into a part of the step."""
        grads = [parameter.grad for parameter in self.parameters]
        present = np.array([grad is not None for grad in grads], dtype=bool)
        if grads:
            flat = torch.empty_like(self._sums)
            pairs = zip(grads, self.parameters, strict=True)
            torch.cat(
                [_flat(p if grad is None else grad, self._sums, zero=grad is None) for grad, p in pairs], out=flat
            )
        else:
            flat = self._sums
        for parameter in self.parameters:
            parameter.grad = None
        return StepPart(number=number, facts=facts.astype(np.float64), gradient=flat, present=present)

    def add(self, parts: Sequence[StepPart], *, step: int) -> np.ndarray:
        """Set the gradient of every parameter to the sum over the parts of all ranks. One that no part has stays None.

        All ranks call it together, those without a part too.

        Returns:
            float64 [parts of all ranks, n]: their facts, in the order of their numbers.
        """
        found = self._exchange(parts, step)
        order = np.argsort(np.concatenate([one.numbers for one in found]), kind="stable")
        if self._group is not None:
            own = [part.gradient for part in parts]
            self._sums.copy_(sum(own[1:], start=own[0])) if own else self._sums.zero_()
            self._group.all_reduce(self._sums)
        else:
            self._add_rows([row for one in found for row in one.rows], order, step)
        present = np.zeros(len(self.parameters), dtype=bool)
        for one in found:
            present |= one.present
        for parameter, view, there in zip(self.parameters, self._views, present.tolist(), strict=True):
            parameter.grad = view.to(device=parameter.device, dtype=parameter.dtype) if there else None
        for parameter in self.reduced_by_torch:
            if parameter.grad is not None:
                parameter.grad.mul_(self._mesh.size)
        return np.concatenate([one.facts for one in found])[order]

    def _exchange(self, parts: Sequence[StepPart], step: int) -> list[_Received]:
        numbers = np.array([part.number for part in parts], dtype=np.int64)
        facts = np.stack([part.facts for part in parts]) if parts else np.zeros((0, 0))
        present = np.any([part.present for part in parts], axis=0) if parts else np.zeros(len(self.parameters), bool)
        small = [numbers, facts, present.astype(np.uint8)]
        rows = [] if self._group is not None else [self._to_wire(part.gradient) for part in parts]
        out = [[*small, *(row[bounds] for row in rows)] for bounds in self._bounds]
        found = self._mesh.exchange(Kind.DENSE, out, step=step)
        width = max((arrays[1].shape[1] for arrays in found), default=0)
        return [_Received.of(arrays, width, self._wire, self._sums) for arrays in found]

    def _add_rows(self, rows: list[np.ndarray], order: np.ndarray, step: int) -> None:
        sums = self._sums.numpy()
        own = self._bounds[self._mesh.rank]
        _ordered_sum([rows[number] for number in order.tolist()], out=sums[own])
        if self._whole:
            return
        # What this rank keeps must be what the others get, also if sending rounds.
        wired = self._to_wire(self._sums[own])
        for bounds, arrays in zip(
            self._bounds, self._mesh.exchange(Kind.SUMS, [[wired]] * self._mesh.size, step=step), strict=True
        ):
            sums[bounds] = _from_wire(arrays[0], self._wire)

    def _to_wire(self, values: Tensor) -> np.ndarray:
        if self._wire == "float16":
            return values.half().numpy()
        if self._wire == "bfloat16":
            return values.bfloat16().view(torch.int16).numpy().view(BFLOAT16)
        return values.numpy()


class AllReduce:
    """Adds a tensor over all ranks with `torch.distributed`, which knows how to do it on its device."""

    def __init__(self, device: torch.device, group: torch.distributed.ProcessGroup | None = None) -> None:
        self.device, self._group = device, group

    def all_reduce(self, values: Tensor) -> None:
        """Replace `values` by the sum over all ranks, the same bits on each.

        Raises:
            RankLostError: torch has failed to do it, which does not say which rank was lost.
        """
        with lost_in_torch("dense gradients could not be added"):
            torch.distributed.all_reduce(values, group=self._group)


@contextmanager
def lost_in_torch(what: str) -> Iterator[None]:
    """Raise `RankLostError` for an error of `torch.distributed`, which has no type for the end of another rank."""
    try:
        yield
    except (MonolithError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise RankLostError(f"{what}; torch.distributed has lost a rank: {why}") from error


@dataclass(frozen=True)
class _Received:
    """What one rank has sent about its parts."""

    numbers: np.ndarray
    facts: np.ndarray
    present: np.ndarray
    rows: list[np.ndarray]

    @classmethod
    def of(cls, arrays: Arrays, width: int, wire: DenseWire, like: Tensor) -> _Received:
        numbers, facts, present, *rows = arrays
        # Copied: the next exchange takes the memory back.
        return cls(
            numbers.copy(),
            facts.reshape(len(numbers), width).copy(),
            present.astype(bool),
            [_from_wire(row, wire) for row in rows],
        )


def _from_wire(row: np.ndarray, wire: DenseWire) -> np.ndarray:
    if wire == "float16":
        return row.astype(np.float32)
    if wire == "bfloat16":
        return (row.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return row


def _flat(values: Tensor, like: Tensor, *, zero: bool) -> Tensor:
    if zero:
        return like.new_zeros(values.numel())
    return values.detach().reshape(-1).to(device=like.device, dtype=like.dtype)


def _ordered_sum(rows: list[np.ndarray], *, out: np.ndarray) -> None:
    if not rows:
        out[:] = 0
        return
    np.copyto(out, rows[0])
    for row in rows[1:]:
        np.add(out, row, out=out)


class SharedBuffers:
    """Keeps the buffers equal that forward changes, such as the running statistics of `BatchNorm`.

    After a step such a buffer is the mean of what the parts of all ranks have made of it, weighted by their rows. An integer,
    such as a count of batches, is the largest. Buffers inside `DistributedDataParallel` are left to torch.

    Example:
        >>> from monolith.testing.rank_threads import run_ranks
        >>> def rank(mesh):
        ...     norm = nn.BatchNorm1d(1, momentum=1.0)
        ...     buffers = SharedBuffers(norm, mesh)
        ...     buffers.begin()
        ...     _ = norm(torch.tensor([[0.0], [10.0 * mesh.rank]]))
        ...     buffers.share([buffers.take(mesh.rank)], weights=[0.5, 0.5], step=1)
        ...     return norm.running_mean.item()
        >>> run_ranks(2, rank)
        [2.5, 2.5]
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._mesh, self._model = mesh, model
        others = {id(b) for c in embedding_collections(model) for b in c.buffers()}
        others |= {id(b) for m in model.modules() if isinstance(m, DistributedDataParallel) for b in m.buffers()}
        self._names = [name for name, buffer in model.named_buffers() if id(buffer) not in others]
        self._before: list[Tensor] = []

    @property
    def any(self) -> bool:
        """Whether the model has buffers."""
        return bool(self._names)

    def begin(self, *, restore: bool = False) -> None:
        """A forward pass follows. With `restore`, it starts from the buffers that the first pass of the step started from."""
        buffers = self._buffers()
        if restore:
            for buffer, before in zip(buffers, self._before, strict=True):
                buffer.copy_(before)
        else:
            self._before = [buffer.clone() for buffer in buffers]

    def take(self, number: int) -> tuple[int, dict[int, Tensor]]:
        """Return what the pass has made of the buffers it changed, for part `number`."""
        # Compared by value: torch's own batch normalization changes buffers without counting up their version.
        pairs = zip(self._buffers(), self._before, strict=True)
        return number, {n: b.detach().clone() for n, (b, before) in enumerate(pairs) if not torch.equal(b, before)}

    def share(self, parts: Sequence[tuple[int, dict[int, Tensor]]], *, weights: Sequence[float], step: int) -> None:
        """Set all changed buffers to the mean over the parts of all ranks. All ranks call it together.

        `weights` are those of the parts of all ranks, in the order of their numbers.
        """
        changed = sorted({n for _, made in parts for n in made})
        buffers = self._buffers()
        out: list[np.ndarray] = [np.array([number for number, _ in parts], dtype=np.int64), np.array(changed, np.int64)]
        for n in changed:
            out.append(torch.stack([made.get(n, self._before[n]) for _, made in parts]).cpu().numpy())
        found = self._mesh.exchange(Kind.STATE, [out] * self._mesh.size, step=step)
        values: dict[int, dict[int, np.ndarray]] = {}
        numbers: list[int] = []
        for arrays in found:
            own = arrays[0].tolist()
            numbers += own
            for n, stacked in zip(arrays[1].tolist(), arrays[2:], strict=True):
                values.setdefault(n, {}).update(zip(own, np.array(stacked), strict=True))
        for n, made in values.items():
            before = self._before[n].cpu().numpy()
            rows = [made.get(number, before) for number in sorted(numbers)]
            buffers[n].copy_(torch.from_numpy(_joined(rows, weights)))

    def _buffers(self) -> list[Tensor]:
        # By name: a module may have put another tensor in the place of one.
        return [self._model.get_buffer(name) for name in self._names]


def _joined(rows: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    if not np.issubdtype(rows[0].dtype, np.floating):
        return np.asarray(np.maximum.reduce(rows))
    mean = np.zeros(rows[0].shape, dtype=np.float64)
    for weight, values in zip(weights, rows, strict=True):
        mean += weight * values.astype(np.float64)
    return np.asarray((mean / sum(weights)).astype(rows[0].dtype))


def dense_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a short hash of named tensors: equal for equal bits.

    Example:
        >>> dense_digest([("w", torch.zeros(1))]) == dense_digest([("w", torch.tensor([-0.0]))])
        False
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        values = tensor.detach().to("cpu").contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)} ".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes() if values.numel() else b"")
    return digest.hexdigest()
