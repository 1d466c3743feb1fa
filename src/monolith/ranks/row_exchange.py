"""Rows and gradients of a batch on their way between the ranks that use them and the ranks that own them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from monolith import _core
from monolith.errors import ConfigError, InvalidArgumentError, RanksDisagreeError
from monolith.process_bound import WorkerThreads
from monolith.ps.protocol.messages import DeclaredTable, Wire
from monolith.ps.protocol.precision import narrowed, widen
from monolith.ranks.mesh import Arrays, Channel, Kind, Mesh
from monolith.table.bags import (
    Bags,
    Gradient,
    LearningRates,
    PackedBags,
    PackedGradients,
    PackedLayout,
    PackedVectors,
    join_gradients,
)
from monolith.table.buckets import bucket_owners, bucket_ranges
from monolith.table.embedding_table import as_event_time, as_step
from monolith.table.store import LocalStore

__all__ = ["GradientPart", "LookupsAhead", "RowExchange"]

_MAX_AHEAD = 16
"""Lookups begun and not taken. Beyond this the oldest is dropped: its batch never came."""

_REMEMBERED = 8
"""Requests whose split is kept: the gradients of a batch come soon after its lookup."""


@dataclass(frozen=True, kw_only=True)
class GradientPart:
    """Gradients that are summed by themselves before they are added to those of other parts."""

    number: int
    """Owners add parts in the order of their numbers."""
    gradients: Sequence[Gradient]
    weight: float = 1.0
    """What they are multiplied by."""


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What messages have to say about the tables of a layout."""

    layout: PackedLayout
    numbers: np.ndarray
    """int64: that of each table among those of the store."""
    dims: np.ndarray
    counted: np.ndarray
    """uint8: whether an admission filter counts how often each id comes."""
    rates_at: np.ndarray
    """int64: where the learning rates of its tables are among those of all."""


class RowExchange:
    """Sends ids to their owners, answers those of others, and does the same for gradients.

    Every rank makes each call together with all others. A rank that has nothing to ask for gives no requests.
    """

    def __init__(
        self,
        mesh: Mesh,
        local: LocalStore,
        declared: Sequence[DeclaredTable],
        *,
        wire: Wire = "float32",
        step_by_rank: bool = False,
    ) -> None:
        self._mesh, self._local, self._wire, self._step_by_rank = mesh, local, wire, step_by_rank
        self._number_of = {table.config.name: number for number, table in enumerate(declared)}
        self._declared = tuple(declared)
        self._rate_starts = np.cumsum([0, *(len(table.config.segments) for table in declared)])
        self._owners = bucket_owners(bucket_ranges(mesh.size), mesh.size).astype(np.uint16)
        self._digests = {table.config.name: _digest(table) for table in declared}
        self.tables_hash = int.from_bytes(
            hashlib.sha256(json.dumps(sorted(self._digests.items())).encode()).digest()[:8], "little", signed=True
        )
        """The same on ranks that have declared the same tables."""
        self._nothing = np.array([self.tables_hash, 0], dtype=np.int64)
        self._requests: dict[int, _Request] = {}
        self._splits: OrderedDict[int, tuple[PackedBags, _core.OwnerSplit]] = OrderedDict()
        self._lock = threading.Lock()
        self._buffers: dict[tuple[Channel, Kind], np.ndarray] = {}

    def packed(self, requests: Sequence[Bags]) -> PackedBags:
        """Return `requests` as one request."""
        if isinstance(requests, PackedBags):
            return requests
        return PackedBags.of(requests, [self._declared[self._number(bags.table)].config.dim for bags in requests])

    def lookup(self, requests: Sequence[Bags], *, step: int, channel: Channel) -> Sequence[torch.Tensor]:
        """Return one float32 [bags, dim] per request."""
        ranks = range(self._mesh.size)
        bags = self.packed(requests) if len(requests) else None
        split = None if bags is None else self._split(bags)
        asked = [[self._nothing if split is None else split.message(rank)] for rank in ranks]
        received = self._mesh.exchange(Kind.IDS, asked, step=step, channel=channel)
        messages = [arrays[0] for arrays in received]
        self._check_tables([int(message[0]) for message in messages], step, channel)
        answers = [[narrowed(rows, self._wire)] for rows in self._rows(messages, channel)]
        back = self._mesh.exchange(Kind.ROWS, answers, step=step, channel=channel)
        if bags is None or split is None:
            return ()
        rows = [widen(arrays[0], "rows") for arrays in back]
        write = partial(split.pool, rows, bags.layout.modes, bags.offsets)
        return PackedVectors(bags.layout, bags.layout.fill(bags.counts, write))

    def apply(self, parts: Sequence[GradientPart], *, step: int, event_time: int, channel: Channel) -> None:
        """Make one optimizer step per table and id, with the sum of the gradients of all ranks.

        The event time is the newest of all ranks, as that of one process with the whole batch.
        """
        ranks, when = range(self._mesh.size), (as_step(step), as_event_time(event_time))
        packed = [(part, self._packed_gradients(part.gradients)) for part in parts]
        rates = self._rates([gradients for _, gradients in packed])
        head = np.array([self.tables_hash, when[1], *(part.number for part, _ in packed)], dtype=np.int64)
        out: list[list[np.ndarray]] = [[head, rates] for _ in ranks]
        for number, (part, gradients) in enumerate(packed):
            split = self._split(gradients.bags)
            starts = split.float_starts
            # The parts of one call need buffers of their own, the next call may use them again.
            fresh = number > 0
            summed = np.empty(starts[-1], np.float32) if fresh else self._buffer(channel, Kind.GRADIENTS, starts[-1])
            bags, layout = gradients.bags, gradients.bags.layout
            places = np.zeros((len(layout.tables), 4), dtype=np.int64)
            places[:, 0], places[:, 1], places[:, 3] = bags.counts, layout.array_of, layout.column_of
            grads = [array.numpy() for array in gradients.arrays if array is not None]
            split.sum(grads, layout.modes, bags.offsets, places, part.weight, summed)
            for rank in ranks:
                mine = summed[starts[rank] : starts[rank + 1]]
                out[rank] += [split.message(rank), narrowed(mine, self._wire)]
        received = self._mesh.exchange(Kind.GRADIENTS, out, step=step, channel=channel)
        heads = [arrays[0].tolist() for arrays in received]
        self._check_tables([one[0] for one in heads], step, channel)
        agreed = self._agreed_rates([arrays[1] for arrays in received])
        order = sorted(
            (number, rank, place) for rank, one in enumerate(heads) for place, number in enumerate(one[2:], start=1)
        )
        _core.apply_messages(
            self._cores(),
            [received[rank][2 * place] for _, rank, place in order],
            [widen(received[rank][2 * place + 1], "gradients") for _, rank, place in order],
            agreed,
            when[0],
            max(one[1] for one in heads),
            self._step_by_rank,
        )

    def _packed_gradients(self, gradients: Sequence[Gradient]) -> PackedGradients:
        """Return `gradients` as those of one request, without tables that have none."""
        if isinstance(gradients, PackedGradients) and all(array is not None for array in gradients.arrays):
            rows = [_as_rows(array, "a batch") for array in gradients.arrays if array is not None]
            return PackedGradients(gradients.bags, rows, learning_rates=gradients.learning_rates)
        joined = join_gradients(gradients)
        for gradient in joined:
            expected = [len(gradient.bags.offsets) - 1, self._declared[self._number(gradient.bags.table)].config.dim]
            if list(gradient.values.shape) != expected:
                raise InvalidArgumentError(
                    f"gradients of table {gradient.bags.table!r}: expected {expected}, got {list(gradient.values.shape)}"
                )
        rates = [
            one.learning_rates or self._declared[self._number(one.bags.table)].config.learning_rates for one in joined
        ]
        return PackedGradients(
            self.packed([one.bags for one in joined]),
            [_as_rows(one.values, f"table {one.bags.table!r}") for one in joined],
            learning_rates=LearningRates.of(rates),
        )

    def same_request(self, known: PackedBags, bags: PackedBags) -> None:
        """Use the split of `known` for `bags`, which are equal to it."""
        if known is not bags:
            with self._lock:
                found = self._splits.get(id(known))
            if found is not None and found[0] is known:
                self._remember(bags, found[1])

    def _rows(self, messages: Sequence[np.ndarray], channel: Channel) -> list[np.ndarray]:
        """Look up what each rank asks for."""
        cores, buffer = self._cores(), self._buffers.get((channel, Kind.ROWS), np.empty(0, np.float32))
        ends = _core.lookup_messages(cores, messages, buffer)
        if ends[-1] > len(buffer):
            buffer = self._buffer(channel, Kind.ROWS, ends[-1])
            ends = _core.lookup_messages(cores, messages, buffer)
        return [buffer[first:end] for first, end in zip([0, *ends[:-1]], ends, strict=True)]

    def _buffer(self, channel: Channel, kind: Kind, size: int) -> np.ndarray:
        """Return memory that the next call of this kind uses again: fresh memory costs more than to fill it."""
        known = self._buffers.get((channel, kind))
        if known is None or len(known) < size:
            known = self._buffers[(channel, kind)] = np.empty(size + size // 4, dtype=np.float32)
        return known[:size]

    def _cores(self) -> list[_core.Table]:
        return [table.core for table in self._local.tables.values()]

    def _split(self, bags: PackedBags) -> _core.OwnerSplit:
        with self._lock:
            known = self._splits.get(id(bags))
        # Kept together with the bags themselves, so that no other object can have their address. Bags are read-only.
        if known is not None and known[0] is bags:
            return known[1]
        request = self._request(bags.layout)
        split = _core.OwnerSplit(
            request.numbers,
            request.dims,
            request.counted,
            bags.ids,
            bags.offsets,
            bags.layout.places(bags.counts),
            self._owners,
            self._mesh.size,
            self.tables_hash,
        )
        self._remember(bags, split)
        return split

    def _remember(self, bags: PackedBags, split: _core.OwnerSplit) -> None:
        with self._lock:
            self._splits[id(bags)] = (bags, split)
            if len(self._splits) > _REMEMBERED:
                self._splits.popitem(last=False)

    def _request(self, layout: PackedLayout) -> _Request:
        known = self._requests.get(id(layout))
        if known is not None and known.layout is layout:
            return known
        numbers = [self._number(name) for name in layout.tables]
        starts = self._rate_starts
        request = _Request(
            layout=layout,
            numbers=np.array(numbers, dtype=np.int64),
            dims=np.array(layout.dims, dtype=np.int64),
            counted=np.array([self._declared[n].admission is not None for n in numbers], dtype=np.uint8),
            rates_at=np.concatenate([np.empty(0, np.int64), *(np.arange(starts[n], starts[n + 1]) for n in numbers)]),
        )
        if len(self._requests) >= _REMEMBERED:
            # A lookup ahead may have removed it in its thread.
            self._requests.pop(next(iter(self._requests)), None)
        self._requests[id(layout)] = request
        return request

    def _rates(self, parts: Sequence[PackedGradients]) -> np.ndarray:
        """Return the learning rates of all segments of all tables, float32. NaN where there are no gradients."""
        rates = np.full(self._rate_starts[-1], np.nan, dtype=np.float32)
        for gradients in parts:
            layout, at = gradients.bags.layout, self._request(gradients.bags.layout).rates_at
            if gradients.learning_rates is None:
                own = [rate for name in layout.tables for rate in self._local.tables[name].learning_rates]
                flat = np.array(own, dtype=np.float32)
            else:
                flat = gradients.learning_rates.flat
            if flat.shape != at.shape:
                raise InvalidArgumentError(
                    f"learning_rates: expected {len(at)}, one per segment of each table, got {len(flat)}"
                )
            before = rates[at]
            if not (np.isnan(before) | (before == flat)).all():
                raise InvalidArgumentError(
                    "learning_rates: expected one set in a step, got different ones of one table"
                )
            rates[at] = flat
        return rates

    def _agreed_rates(self, rates: Sequence[np.ndarray]) -> np.ndarray:
        """Return the learning rates of all segments. All ranks that have gradients of a table have the same ones."""
        first = rates[0].tobytes()
        if all(one.tobytes() == first for one in rates[1:]):
            return np.array(rates[0])
        agreed = np.array(rates[0])
        for rank, others in enumerate(rates):
            agreed = np.where(np.isnan(agreed), others, agreed)
            differing = np.flatnonzero(~(np.isnan(others) | (others == agreed)))
            if len(differing):
                at = differing[0]
                table = int(np.searchsorted(self._rate_starts, at, side="right")) - 1
                other = next(r for r, one in enumerate(rates) if one[at] == agreed[at])
                raise RanksDisagreeError(
                    f"learning rates of table {self._declared[table].config.name!r}: rank {other} has {agreed[at]}, rank "
                    f"{rank} has {others[at]}; give all ranks the same schedule and step"
                )
        return agreed

    def _check_tables(self, hashes: Sequence[int], step: int, channel: Channel) -> None:
        if all(one == self.tables_hash for one in hashes):
            return
        # All ranks have seen all hashes: all of them come here.
        own = np.frombuffer(json.dumps(self._digests).encode(), dtype=np.uint8)
        sent: list[Arrays] = self._mesh.exchange(Kind.STATE, [[own]] * self._mesh.size, step=step, channel=channel)
        declared = [json.loads(arrays[0].tobytes()) for arrays in sent]
        for name in sorted({name for one in declared for name in one}):
            versions = [one.get(name) for one in declared]
            if len(set(versions)) > 1:
                other = next(rank for rank, one in enumerate(versions) if one != versions[0])
                what = "only one of them has it" if None in (versions[0], versions[other]) else "their settings differ"
                raise RanksDisagreeError(
                    f"table {name!r}: ranks 0 and {other} have not declared the same: {what}; start all ranks with the same model"
                )

    def _number(self, table: str) -> int:
        try:
            return self._number_of[table]
        except KeyError:
            known = ", ".join(map(repr, self._number_of)) or "none"
            raise ConfigError(f"table: the ranks have not declared {table!r}; they have {known}") from None


class LookupsAhead:
    """Lookups of next batches, made by a thread on a channel of their own."""

    def __init__(self, exchange: RowExchange) -> None:
        self._exchange = exchange
        self._begun: deque[tuple[PackedBags | None, Future[Sequence[torch.Tensor]]]] = deque(maxlen=_MAX_AHEAD)
        self._lock = threading.Lock()
        self._thread: WorkerThreads | None = None

    def begin(self, requests: Sequence[Bags], *, step: int) -> None:
        """Look up `requests`, after those that were begun before."""
        if self._thread is None:
            self._thread = WorkerThreads(1, thread_name_prefix="monolith-rank-ahead")
        bags = self._exchange.packed(requests) if len(requests) else None
        asked: Sequence[Bags] = () if bags is None else bags
        future = self._thread.submit(self._exchange.lookup, asked, step=step, channel=Channel.AHEAD)
        with self._lock:
            self._begun.append((bags, future))

    def take(self, requests: Sequence[Bags]) -> Sequence[torch.Tensor] | None:
        """Return the answer to `requests`. None if they were not begun."""
        with self._lock:
            begun = list(self._begun)
        if all(bags is None for bags, _ in begun):
            return None
        wanted = self._exchange.packed(requests)
        for place, (bags, future) in enumerate(begun):
            if bags is not None and bags.equals(wanted):
                with self._lock:
                    # Those before it were begun for batches that never came.
                    self._begun = deque(begun[place + 1 :], maxlen=_MAX_AHEAD)
                vectors = future.result()
                self._exchange.same_request(bags, wanted)
                return vectors
        return None

    def wait(self) -> None:
        """Wait until all that were begun are answered, here and by this rank."""
        with self._lock:
            begun = [future for _, future in self._begun]
        wait(begun)

    def forget(self) -> None:
        """Drop the answers that were not taken."""
        self.wait()
        with self._lock:
            self._begun.clear()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _digest(table: DeclaredTable) -> str:
    return hashlib.sha256(table.model_dump_json().encode()).hexdigest()


def _as_rows(values: torch.Tensor, what: str) -> torch.Tensor:
    """Return gradients as the core takes them: float32 in main memory, no gaps within a row."""
    if values.dtype != torch.float32 or values.dim() != 2:
        raise InvalidArgumentError(
            f"gradients of {what}: expected float32 [bags, dim], got {values.dtype} {list(values.shape)}"
        )
    here = values.detach().cpu()
    return here if here.stride(1) == 1 else here.contiguous()
