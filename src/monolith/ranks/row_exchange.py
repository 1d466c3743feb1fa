"""Rows and gradients of a batch on their way between the ranks that use them and the ranks that own them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from monolith.errors import ConfigError, InvalidArgumentError, ProtocolError, RanksDisagreeError
from monolith.ps.client.scatter_gather import DistinctIds
from monolith.ps.protocol.messages import DeclaredTable, Wire
from monolith.ps.protocol.precision import narrowed, widen
from monolith.ranks.mesh import Arrays, Channel, Kind, Mesh
from monolith.table.bags import Bags, Gradient, join_gradients
from monolith.table.buckets import bucket_owners, bucket_ranges
from monolith.table.embedding_table import TableUpdate, apply_updates
from monolith.table.store import LocalStore

__all__ = ["GradientPart", "RowExchange"]

_NO_IDS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class GradientPart:
    """Gradients that are summed by themselves before they are added to those of other parts."""

    number: int
    """Owners add parts in the order of their numbers."""
    gradients: Sequence[Gradient]
    weight: float = 1.0
    """What they are multiplied by."""


@dataclass(frozen=True, kw_only=True)
class _Received:
    """A `GradientPart` as its owner gets it."""

    number: int
    rank: int
    tables: list[tuple[int, np.ndarray, np.ndarray]]
    """Number of the table, ids, and the gradient of each."""


class RowExchange:
    """Sends ids to their owners, answers those of others, and does the same for gradients.

    Every rank makes each call together with all others. A rank that has nothing to ask for gives no requests.
    """

    def __init__(self, mesh: Mesh, local: LocalStore, declared: Sequence[DeclaredTable], *, wire: Wire) -> None:
        self._mesh, self._local, self._wire = mesh, local, wire
        self._tables = list(local.tables.values())
        self._number_of = {table.name: number for number, table in enumerate(self._tables)}
        self._filtered = frozenset(table.config.name for table in declared if table.admission is not None)
        self._owners = bucket_owners(bucket_ranges(mesh.size), mesh.size)
        self._digests = {table.config.name: _digest(table) for table in declared}
        self.tables_hash = int.from_bytes(
            hashlib.sha256(json.dumps(sorted(self._digests.items())).encode()).digest()[:8], "little", signed=True
        )
        """The same on ranks that have declared the same tables."""

    def lookup(self, requests: Sequence[Bags], *, step: int, channel: Channel) -> list[torch.Tensor]:
        """Return one float32 [bags, dim] per request."""
        splits = [self._split(bags) for bags in requests]
        asked = [self._asked(requests, splits, rank) for rank in range(self._mesh.size)]
        received = self._mesh.exchange(Kind.IDS, asked, step=step, channel=channel)
        self._check_tables([arrays[0] for arrays in received], step, channel)
        answers = [[narrowed(self._rows(arrays), self._wire)] for arrays in received]
        rows = self._mesh.exchange(Kind.ROWS, answers, step=step, channel=channel)
        flat = [widen(arrays[0], "rows") for arrays in rows]
        pooled, at = [], [0] * self._mesh.size
        for bags, split in zip(requests, splits, strict=True):
            dim = self._tables[self._number(bags)].dim
            parts = []
            for rank, size in enumerate(split.sizes):
                parts.append(flat[rank][at[rank] : at[rank] + size * dim].reshape(size, dim))
                at[rank] += size * dim
            pooled.append(split.pooled([(slice(0, len(split.ids)), np.concatenate(parts))]))
        return pooled

    def apply(
        self, parts: Sequence[GradientPart], *, step: int, event_time: int, channel: Channel = Channel.MAIN
    ) -> None:
        """Make one optimizer step per table and id, with the sum of the gradients of all ranks.

        The event time is the newest of all ranks, as that of one process with the whole batch.
        """
        joined = [(part, join_gradients(part.gradients)) for part in parts]
        rates = self._rates([gradient for _, gradients in joined for gradient in gradients])
        split = [
            (part, [(g, s := self._split(g.bags), _summed(g, s, part.weight)) for g in gradients])
            for part, gradients in joined
        ]
        out: list[list[np.ndarray]] = []
        for rank in range(self._mesh.size):
            header, ids, grads = [self.tables_hash, event_time], [_NO_IDS], [np.empty(0, dtype=np.float32)]
            for part, tables in split:
                header += [part.number, len(tables)]
                for gradient, split_ids, summed in tables:
                    mine, values = self._pushed(gradient, split_ids, summed, rank)
                    header += [self._number(gradient.bags), len(mine)]
                    ids.append(mine)
                    grads.append(values.reshape(-1))
            wired = narrowed(np.concatenate(grads), self._wire)
            out.append([np.array(header, dtype=np.int64), rates, np.concatenate(ids), wired])
        received = self._mesh.exchange(Kind.GRADIENTS, out, step=step, channel=channel)
        self._check_tables([arrays[0] for arrays in received], step, channel)
        newest = max(int(arrays[0][1]) for arrays in received)
        agreed = self._agreed_rates([arrays[1] for arrays in received])
        self._step(self._parts_of(received), agreed, step=step, event_time=newest)

    def _step(self, parts: list[_Received], rates: list[np.ndarray], *, step: int, event_time: int) -> None:
        updates: list[TableUpdate] = []
        for number, table in enumerate(self._tables):
            mine = [(ids, grads) for part in parts for of, ids, grads in part.tables if of == number]
            if mine:
                updates.append(
                    table.pooled_update(
                        np.concatenate([ids for ids, _ in mine]),
                        None,
                        np.concatenate([grads for _, grads in mine]),
                        mode="sum",
                        learning_rates=rates[number].tolist(),
                    )
                )
        if updates:
            apply_updates(updates, step=step, event_time=event_time)

    def _parts_of(self, received: Sequence[Arrays]) -> list[_Received]:
        parts: list[_Received] = []
        for rank, (header, _, ids, grads) in enumerate(received):
            numbers, flat, at, id_at, float_at = header.tolist(), widen(grads, "gradients"), 2, 0, 0
            while at < len(numbers):
                part = _Received(number=numbers[at], rank=rank, tables=[])
                count, at = numbers[at + 1], at + 2
                for table, size in zip(
                    numbers[at : at + 2 * count : 2], numbers[at + 1 : at + 2 * count : 2], strict=True
                ):
                    dim = self._tables[table].dim
                    rows = flat[float_at : float_at + size * dim].reshape(size, dim)
                    part.tables.append((table, ids[id_at : id_at + size], rows))
                    id_at, float_at = id_at + size, float_at + size * dim
                at += 2 * count
                parts.append(part)
        return sorted(parts, key=lambda part: (part.number, part.rank))

    def _asked(self, requests: Sequence[Bags], splits: Sequence[DistinctIds], rank: int) -> list[np.ndarray]:
        header, ids = [self.tables_hash], [_NO_IDS]
        for bags, split in zip(requests, splits, strict=True):
            mine = _of_rank(split, rank)
            header += [self._number(bags), len(mine)]
            ids.append(mine)
        return [np.array(header, dtype=np.int64), np.concatenate(ids)]

    def _rows(self, arrays: Arrays) -> np.ndarray:
        """Look up what a rank asks for: its ids of one table after the other."""
        header, ids = arrays
        tables, sizes = header[1::2].tolist(), header[2::2].tolist()
        if len(tables) != len(sizes) or sum(sizes) != len(ids) or not set(tables) <= set(range(len(self._tables))):
            raise ProtocolError("a rank asks for ids of tables that were not declared, or for others than it announced")
        rows, at = [np.empty(0, dtype=np.float32)], 0
        for number, size in zip(tables, sizes, strict=True):
            rows.append(self._tables[number].lookup(np.array(ids[at : at + size])).numpy().reshape(-1))
            at += size
        return np.concatenate(rows)

    def _pushed(
        self, gradient: Gradient, split: DistinctIds, summed: np.ndarray, rank: int
    ) -> tuple[np.ndarray, np.ndarray]:
        first = sum(split.sizes[:rank])
        ids, values = split.ids[first : first + split.sizes[rank]], summed[first : first + split.sizes[rank]]
        if gradient.bags.table not in self._filtered:
            return ids, values
        # An admission filter counts how often an id comes: the other occurrences follow with zeros.
        counts = np.bincount(split.inverse, minlength=len(split.ids))[first : first + split.sizes[rank]]
        again = np.repeat(ids, np.maximum(counts - 1, 0))
        return np.concatenate([ids, again]), np.concatenate([values, np.zeros((len(again), values.shape[1]), "<f4")])

    def _rates(self, gradients: Sequence[Gradient]) -> np.ndarray:
        """Return the learning rates of all segments of all tables, float32. NaN where there are no gradients."""
        given: dict[str, tuple[float, ...]] = {}
        for gradient in gradients:
            name = gradient.bags.table
            own = gradient.learning_rates or self._tables[self._number(gradient.bags)].config.learning_rates
            if given.setdefault(name, own) != own:
                raise InvalidArgumentError(
                    f"gradients of table {name!r}: expected one set of learning rates in a step, got {given[name]} and {own}"
                )
        segments = [(table.name, len(table.config.segments)) for table in self._tables]
        flat = [rate for name, count in segments for rate in given.get(name, (np.nan,) * count)]
        with np.errstate(over="ignore"):
            return np.array(flat, dtype=np.float32)

    def _agreed_rates(self, rates: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the learning rates of each table. All ranks that have gradients of a table have the same ones."""
        agreed = np.array(rates[0])
        for rank, others in enumerate(rates):
            agreed = np.where(np.isnan(agreed), others, agreed)
            differing = ~(np.isnan(others) | (others == agreed))
            if differing.any():
                counts = [len(table.config.segments) for table in self._tables]
                table = int(np.searchsorted(np.cumsum(counts), np.argmax(differing), side="right"))
                first = next(
                    r for r, one in enumerate(rates) if one[np.argmax(differing)] == agreed[np.argmax(differing)]
                )
                raise RanksDisagreeError(
                    f"learning rates of table {self._tables[table].name!r}: rank {first} has {agreed[differing][0]}, rank "
                    f"{rank} has {others[differing][0]}; give all ranks the same schedule and step"
                )
        ends = np.cumsum([len(table.config.segments) for table in self._tables])
        return np.split(agreed, ends[:-1])

    def _check_tables(self, headers: Sequence[np.ndarray], step: int, channel: Channel) -> None:
        if all(int(header[0]) == self.tables_hash for header in headers):
            return
        # All ranks have seen all hashes: all of them come here.
        own = np.frombuffer(json.dumps(self._digests).encode(), dtype=np.uint8)
        sent = self._mesh.exchange(Kind.STATE, [[own]] * self._mesh.size, step=step, channel=channel)
        declared = [json.loads(arrays[0].tobytes()) for arrays in sent]
        for name in sorted({name for one in declared for name in one}):
            versions = [one.get(name) for one in declared]
            if len(set(versions)) > 1:
                other = next(rank for rank, one in enumerate(versions) if one != versions[0])
                what = "only one of them has it" if None in (versions[0], versions[other]) else "their settings differ"
                raise RanksDisagreeError(
                    f"table {name!r}: ranks 0 and {other} have not declared the same: {what}; start all ranks with the same model"
                )

    def _split(self, bags: Bags) -> DistinctIds:
        self._number(bags)
        return DistinctIds.of(bags, self._owners, self._mesh.size)

    def _number(self, bags: Bags) -> int:
        try:
            return self._number_of[bags.table]
        except KeyError:
            known = ", ".join(map(repr, self._number_of)) or "none"
            raise ConfigError(f"table: the store has no {bags.table!r}; it has {known}") from None


def _of_rank(split: DistinctIds, rank: int) -> np.ndarray:
    first = sum(split.sizes[:rank])
    return split.ids[first : first + split.sizes[rank]]


def _summed(gradient: Gradient, split: DistinctIds, weight: float) -> np.ndarray:
    """Return the sum of the gradients of each distinct id, float32 [ids, dim]."""
    values, bags = gradient.values, gradient.bags
    if values.dtype != torch.float32 or values.dim() != 2 or len(values) != len(bags.offsets) - 1:
        raise InvalidArgumentError(
            f"gradients of table {bags.table!r}: expected float32 [{len(bags.offsets) - 1}, dim], got {values.dtype} "
            f"{list(values.shape)}"
        )
    pushed = split.pushed(values.detach().cpu().contiguous().numpy())
    summed: np.ndarray = pushed(slice(0, len(split.ids)))[1]
    return summed if weight == 1.0 else summed * np.float32(weight)


def _digest(table: DeclaredTable) -> str:
    return hashlib.sha256(table.model_dump_json().encode()).hexdigest()
