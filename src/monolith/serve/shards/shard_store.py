"""`ShardStore`: the tables of an export whose rows are on shards, as a read-only `Store`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType, TracebackType
from typing import NoReturn, Self, Unpack

import numpy as np
import torch

from monolith.cluster.discovery.service_discovery import ServiceDiscovery
from monolith.errors import ConfigError, InvalidArgumentError, UnavailableError
from monolith.ps.client.scatter_gather import BagSplit, CutBags, DistinctIds, Indices, are_long, split_by_owner
from monolith.ps.client.server_store import CHUNK_BYTES, joined_entries
from monolith.ps.protocol.messages import Pooling, TableRead, Wire
from monolith.ps.protocol.precision import widen
from monolith.ps.server.served_tables import ServedTables
from monolith.serve.shards.addresses import (
    FindShards,
    ShardAddresses,
    discovered_shards,
    is_discovery,
    open_discovery,
    parse_shards,
)
from monolith.serve.shards.lookup_scope import current_report
from monolith.serve.shards.messages import ShardCall, ShardLookup, ShardRead
from monolith.serve.shards.shard_group import ShardGroup, ShardRequest
from monolith.serve.shards.shard_map import ShardMap
from monolith.serve.shards.shard_replica import ShardClientConfig
from monolith.table.arrays import Ids, Values, id_array
from monolith.table.bags import Bags, Gradient, PackedBags, PackedVectors
from monolith.table.buckets import NUM_BUCKETS, ranges_of
from monolith.table.config import TableConfig
from monolith.table.embedding_table import EmbeddingTable, TableStats
from monolith.table.entries import Entries
from monolith.table.store import Position, RestoreChoices, StoreSave
from monolith.transport.frames import Frame

__all__ = ["ShardStore", "ShardStores", "open_shard_stores"]


@dataclass(frozen=True)
class _Part:
    """The part of a lookup for one shard."""

    group: int
    """Index of the shard in the map. The number of shards for buckets that no shard has."""
    indices: Indices
    arrays: list[np.ndarray]
    ids: int


class ShardStore:
    """The tables of one collection of an export. Their rows are on shards, and can only be read. Thread-safe.

    A lookup asks every shard that has some of the ids once, all in parallel, within `ShardClientConfig.timeout`. Rows and
    predictions equal those of one process bit for bit, unless a 16-bit `wire` rounds or shards pool long bags.

    Args:
        group: the shards.
        path: where the collection was in the model. None: the only one that there is.

    Example:
        >>> from monolith.serve.shards.shard_store import open_shard_stores
        >>> stores = open_shard_stores("10.0.0.1:7200,10.0.0.2:7200")  # doctest: +SKIP
        >>> collection = EmbeddingBagCollection(spec.features, stores["embeddings"], seed=spec.seed)  # doctest: +SKIP
    """

    remote = True
    collective: frozenset[str] = frozenset()
    tables: Mapping[str, EmbeddingTable] = MappingProxyType({})

    def __init__(self, group: ShardGroup, path: str | None = None) -> None:
        self.group, self.config = group, group.config
        served = group.described.collections
        paths = [collection.path for collection in served]
        if path is None and len(served) == 1:
            path = paths[0]
        if path not in paths:
            raise ConfigError(f"path: expected one of {', '.join(map(repr, paths)) or 'no collections'}, got {path!r}")
        self.path = path
        self._collection = paths.index(path)
        self._export = group.described.export
        # Tables without rows: they know what an id that was never seen reads as.
        self._unseen = ServedTables()
        self._unseen.declare(served[self._collection].tables)
        self._configs = {table.name: table.config for table in self._unseen.all()}

    def configs(self) -> dict[str, TableConfig]:
        """Return the configuration of every table."""
        return dict(self._configs)

    def stats(self) -> dict[str, TableStats]:
        """Return the size of every table, all shards together. Of each shard one replica is counted."""
        answers = [json.loads(frame.text)["tables"] for frame in self._ask_all(ShardCall.STATS)]
        return {
            name: TableStats.total([TableStats(**answer[name]) for answer in answers]) if answers else stats
            for name, stats in self._unseen.stats().items()
        }

    def lookup(self, requests: Sequence[Bags]) -> Sequence[torch.Tensor]:
        """Return one float32 [bags, dim] per request. An empty bag is zeros.

        Raises:
            UnavailableError: no replica of a shard answered in time, and partial answers were not asked for.
        """
        shards = self.group.map
        splits = [self._split(bags, shards) for bags in requests]
        parts = _parts(splits, shards)
        reads = tuple((split.bags.table, split.pooling) for split in splits)
        text = _lookup_text(reads, self.config.wire, self._export, self._collection)
        asked = [part for part in parts if part.group < len(shards.shards)]
        outcomes = self.group.ask(
            [
                ShardRequest(shard=shards.shards[part.group], call=ShardCall.LOOKUP, text=text, arrays=part.arrays)
                for part in asked
            ]
        )
        found = {part.group: outcome for part, outcome in zip(asked, outcomes, strict=True)}
        answers = [(part.indices, self._rows(part, found.get(part.group), text, shards)) for part in parts]
        vectors = [
            split.pooled([(indices[at], widen(rows[at], split.bags.table)) for indices, rows in answers])
            for at, split in enumerate(splits)
        ]
        if isinstance(requests, PackedBags):
            return PackedVectors(requests.layout, requests.layout.pack(vectors))
        return vectors

    def _rows(
        self, part: _Part, outcome: Frame | UnavailableError | None, text: str, shards: ShardMap
    ) -> Sequence[np.ndarray]:
        """Return the rows of a part, those of unseen ids if its shard did not answer and that was asked for."""
        if isinstance(outcome, Frame):
            return outcome.arrays
        if part.ids:
            buckets = shards.missing if outcome is None else shards.shards[part.group].ranges
            self._count_missing(part.ids, buckets, outcome)
        reads = self._unseen.reads(_cached_lookup(text), part.arrays)
        rows = [np.empty(read.shape, dtype=np.float32) for read in reads]
        self._unseen.lookup(reads, rows)
        return rows

    def _count_missing(self, ids: int, buckets: Sequence[tuple[int, int]], outcome: UnavailableError | None) -> None:
        if self.config.partial == "refuse":
            raise outcome or UnavailableError(
                f"the shard of buckets {', '.join(f'{first}..{end - 1}' for first, end in buckets)}: no replica is known: "
                f"{'; '.join(f'{one.address}: {one.problem}' for one in self.group.status() if one.problem)}"
            )
        self.group.count_missing(ids)
        report = current_report()
        if report is not None:
            report.missing_ids += ids
            report.missing_buckets.update(buckets)

    def _split(self, bags: Bags, shards: ShardMap) -> BagSplit:
        self._require(bags.table)
        count = len(shards.shards)
        pool_there = self.config.pool_on_shards and are_long(bags, max(1, count))
        return (CutBags if pool_there else DistinctIds).of(bags, shards.owners, shards.groups)

    def lookup_entry(self, table: str, ids: Ids) -> Entries:
        """Return the whole rows of `ids`: stored weights and times."""
        self._require(table)
        wanted, shards = id_array(ids).reshape(-1), self._whole_map()
        order, sizes = split_by_owner(wanted, shards.owners, len(shards.shards))
        parts = np.split(order, np.cumsum(sizes)[:-1])
        text = self._read(table)
        frames = self._answered(
            [
                ShardRequest(shard=shard, call=ShardCall.READ_ENTRIES, text=text, arrays=[wanted[part]])
                for shard, part in zip(shards.shards, parts, strict=True)
            ]
        )
        return joined_entries(wanted, list(zip(parts, frames, strict=True)))

    def slot_counts(self, table: str) -> dict[int, int]:
        """Count the rows of each slot of a table whose ids have slots."""
        self._require(table)
        counts: dict[int, int] = {}
        for frame in self._ask_all(ShardCall.COUNT_SLOTS, table):
            for slot, count in json.loads(frame.text)["slots"].items():
                counts[int(slot)] = counts.get(int(slot), 0) + count
        return dict(sorted(counts.items()))

    def iter_rows(self, table: str, *, chunk: int = 65536) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield all rows of a table, about `chunk` at a time: ids int64 [n] and stored weights float32 [n, dim]."""
        self._require(table)
        fitting = max(1, min(chunk, CHUNK_BYTES // (8 + 4 * self._configs[table].dim)))
        step = max(1, min(NUM_BUCKETS, NUM_BUCKETS * fitting // max(self.stats()[table].rows, 1)))
        for first in range(0, NUM_BUCKETS, step):
            shards = self._whole_map()
            for number in np.unique(shards.owners[first : first + step]).tolist():
                inside = np.zeros(NUM_BUCKETS, dtype=np.bool_)
                inside[first : first + step] = shards.owners[first : first + step] == number
                text = self._read(table, ranges_of(inside))
                request = ShardRequest(shard=shards.shards[number], call=ShardCall.READ_ROWS, text=text)
                for frame in self._answered([request]):
                    ids, values = (torch.from_numpy(array.copy()) for array in frame.arrays)
                    if len(ids):
                        yield ids, values

    def prefetch(self, requests: Sequence[Bags]) -> None:
        """Do nothing: a prediction looks up its rows once."""

    def is_initialised(self) -> bool:
        """Return True: an export is complete."""
        return True

    def lost(self, checkpoint: str, *, trained: bool) -> list[str]:
        """Return nothing: shards train nothing."""
        return []

    def moved_on(self, checkpoint: str) -> list[str]:
        """Return nothing: shards train nothing."""
        return []

    def progress(self) -> None:
        """Return None: nobody trains on shards."""

    def close(self) -> None:
        """Do nothing: the group is closed by whoever opened it."""

    def apply(
        self, gradients: Sequence[Gradient], *, step: int = 0, event_time: int = 0, position: Position | None = None
    ) -> None:
        """Raise `InvalidArgumentError`: rows on shards cannot be changed."""
        _read_only("apply")

    def assign(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Raise `InvalidArgumentError`."""
        _read_only("assign")

    def assign_add(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Raise `InvalidArgumentError`."""
        _read_only("assign_add")

    def reinitialize(self, table: str, ids: Ids, *, event_time: int = 0) -> torch.Tensor:
        """Raise `InvalidArgumentError`."""
        _read_only("reinitialize")

    def erase(self, table: str, ids: Ids) -> int:
        """Raise `InvalidArgumentError`."""
        _read_only("erase")

    def evict(self, *, now: int | Mapping[str, int] | None = None) -> dict[str, int]:
        """Raise `InvalidArgumentError`."""
        _read_only("evict")

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Raise `InvalidArgumentError`."""
        _read_only("save")

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Raise `InvalidArgumentError`."""
        _read_only("restore")

    def prepare_restore(self, folder: str | os.PathLike[str], *, only_fresh: bool = False) -> Callable[[], None]:
        """Raise `InvalidArgumentError`."""
        _read_only("prepare_restore")

    def begin_save(self, path: str, *, step: int) -> StoreSave:
        """Raise `InvalidArgumentError`."""
        _read_only("begin_save")

    def open_log(self, model_dir: str) -> None:
        """Raise `InvalidArgumentError`."""
        _read_only("open_log")

    def begin_cut(self, *, step: int) -> StoreSave | None:
        """Raise `InvalidArgumentError`."""
        _read_only("begin_cut")

    def begin_restore(
        self, path: str | None, *, only_fresh: bool, rows_only: bool = False, **choices: Unpack[RestoreChoices]
    ) -> Callable[[], None]:
        """Raise `InvalidArgumentError`."""
        _read_only("begin_restore")

    def mark_initialised(self) -> None:
        """Raise `InvalidArgumentError`."""
        _read_only("mark_initialised")

    def __repr__(self) -> str:
        shards = self.group.map.shards
        return f"ShardStore({self.path!r}, shards={len(shards)}, replicas={sum(len(one.replicas) for one in shards)})"

    def _require(self, table: str) -> None:
        if table not in self._configs:
            known = ", ".join(map(repr, self._configs)) or "none"
            raise InvalidArgumentError(f"table: the shards have no {table!r}; they have {known}")

    def _read(self, table: str = "", ranges: tuple[tuple[int, int], ...] = ()) -> str:
        read = ShardRead(export=self._export, collection=self._collection, table=table, ranges=ranges)
        return read.model_dump_json()

    def _whole_map(self) -> ShardMap:
        """Return the map. Calls that are not lookups have no partial answers."""
        shards = self.group.map
        if shards.missing:
            raise UnavailableError(f"shards: no replica serves the buckets {list(shards.missing)}")
        return shards

    def _ask_all(self, call: ShardCall, table: str = "") -> list[Frame]:
        text = self._read(table)
        return self._answered([ShardRequest(shard=shard, call=call, text=text) for shard in self._whole_map().shards])

    def _answered(self, requests: Sequence[ShardRequest]) -> list[Frame]:
        frames: list[Frame] = []
        for outcome in self.group.ask(requests):
            if isinstance(outcome, Exception):
                raise outcome
            frames.append(outcome)
        return frames


def _parts(splits: Sequence[BagSplit], shards: ShardMap) -> list[_Part]:
    """Return a part for each shard that has an id of some table. Without ids it is one part that no shard is asked for."""
    starts = [np.cumsum([0, *split.sizes]).tolist() for split in splits]
    parts = []
    for number in range(shards.groups):
        ids = sum(split.sizes[number] for split in splits)
        if ids:
            indices: Indices = tuple(slice(start[number], start[number + 1]) for start in starts)
            parts.append(_Part(number, indices, _asked(splits, indices), ids))
    if not parts:
        indices = tuple(slice(0, 0) for _ in splits)
        parts.append(_Part(len(shards.shards), indices, _asked(splits, indices), 0))
    return parts


def _asked(splits: Sequence[BagSplit], indices: Indices) -> list[np.ndarray]:
    return [array for split, some in zip(splits, indices, strict=True) for array in split.asked(some)]


def _read_only(method: str) -> NoReturn:
    raise InvalidArgumentError(f"{method}: rows on embedding shards are read-only; train and export, or follow the run")


# The text of a batch rarely differs from the one before: only its arrays do.
@lru_cache(maxsize=256)
def _lookup_text(reads: tuple[tuple[str, Pooling], ...], wire: Wire, export: str, collection: int) -> str:
    tables = tuple(TableRead(table=table, pooling=pooling) for table, pooling in reads)
    return ShardLookup(tables=tables, wire=wire, export=export, collection=collection).model_dump_json()


_cached_lookup = lru_cache(maxsize=256)(ShardLookup.from_json)


class ShardStores(Mapping[str, ShardStore]):
    """The stores of all collections of an export, by their path in the model. Made by `open_shard_stores`."""

    def __init__(self, group: ShardGroup, discovery: ServiceDiscovery | None = None) -> None:
        self.group, self._discovery = group, discovery
        self._stores = {one.path: ShardStore(group, one.path) for one in group.described.collections}

    @property
    def version(self) -> int:
        """Version of the export that the shards serve."""
        return self.group.described.version

    @property
    def export(self) -> str:
        """Identity of the export that the shards serve: the checksum of its manifest."""
        return self.group.described.export

    def __getitem__(self, path: str) -> ShardStore:
        return self._stores[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stores)

    def __len__(self) -> int:
        return len(self._stores)

    def close(self) -> None:
        """Close all connections. The shards keep running."""
        self.group.close()
        if self._discovery is not None:
            self._discovery.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_shard_stores(
    shards: str | ShardAddresses | FindShards, *, export: str | None = None, config: ShardClientConfig | None = None
) -> ShardStores:
    """Connect to the shards of an export, and wait until every bucket has one.

    Args:
        shards: addresses, as `a:7200,b:7200;c:7200` or as `parse_shards` returns them, a service discovery as `open_discovery`
            takes it, such as `zk=clicks`, or a function that finds them, such as `discovered_shards(discovery)`.
        export: the identity of the export that they must serve, `ExportManifest.checksum`. None: any, but all the same.
        config: how to ask them.

    Raises:
        ConfigError: shards serve different exports, or some buckets belong to none or to two of them.
        UnavailableError: some shards did not answer in time.
    """
    with ExitStack() as opened:
        discovery: ServiceDiscovery | None = None
        if isinstance(shards, str):
            if is_discovery(shards):
                discovery = opened.enter_context(open_discovery(shards))
            shards = parse_shards(shards) if discovery is None else discovered_shards(discovery)
        find, addresses = (shards, ()) if callable(shards) else (None, shards)
        group = opened.enter_context(ShardGroup(addresses, find=find, config=config, export=export))
        stores = ShardStores(group, discovery)
        opened.pop_all()
        return stores
