"""`ShardedStore`: several stores that act as one. Every id belongs to a bucket, every bucket to a shard."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.table.arrays import Ids, Values, id_array
from monolith.table.bag_parts import as_sum, gather, pool, restrict, single_ids, unique_ids
from monolith.table.buckets import NUM_BUCKETS, bucket_of, bucket_owners, bucket_ranges
from monolith.table.call_threads import CallThreads
from monolith.table.config import TableConfig
from monolith.table.embedding_table import TableStats
from monolith.table.store import Bags, Gradient, Store, join_gradients
from monolith.table.store_folder import write_shards

__all__ = ["ShardedStore"]


class ShardedStore:
    """A `Store` whose rows are spread over `shards`, each of which has every table and the rows of its own buckets.

    Whatever the number of shards, a call has the same effect and the same answer. The shards are only asked through `Store`:
    they may be in this process or anywhere else. `ranges` says who owns which buckets; by default `bucket_ranges`.

    Example:
        >>> from monolith import EmbeddingTable
        >>> from monolith.table import Bags, LocalStore, ShardedStore
        >>> from monolith.testing import sgd_table_config
        >>> store = ShardedStore([LocalStore([EmbeddingTable(sgd_table_config(1, name="item"))]) for _ in range(2)])
        >>> store.assign("item", [1, 2, 3], torch.tensor([[1.0], [2.0], [3.0]]))
        >>> bags = Bags(table="item", ids=np.array([1, 2, 3]), offsets=np.array([0, 3]), pooling="mean")
        >>> store.lookup([bags])[0].tolist(), store.stats()["item"].rows
        ([[2.0]], 3)
    """

    def __init__(self, shards: Sequence[Store], *, ranges: Sequence[range] | None = None) -> None:
        self.shards = tuple(shards)
        self.ranges = tuple(bucket_ranges(len(shards)) if ranges is None else ranges)
        self._owners = bucket_owners(self.ranges, len(self.shards))
        self._configs = _common_configs(self.shards)
        self._threads = CallThreads()

    def is_initialised(self) -> bool:
        """Whether every shard holds a state that is to be kept; one that was started again does not."""
        return all(shard.is_initialised() for shard in self.shards)

    def mark_initialised(self) -> None:
        """Say that what the shards hold now is to be kept."""
        for shard in self.shards:
            shard.mark_initialised()

    def configs(self) -> dict[str, TableConfig]:
        """The configuration of every table."""
        return dict(self._configs)

    def lookup(self, requests: Sequence[Bags]) -> list[torch.Tensor]:
        """One float32 [bags, dim] per request; an empty bag is zeros. Never inserts."""
        unique = [unique_ids(self._known(request)) for request in requests]
        owners = [self._owners_of(ids) for ids, _ in unique]
        calls = []
        for number, shard in enumerate(self.shards):
            parts = [ids[owner == number] for (ids, _), owner in zip(unique, owners, strict=True)]
            wanted = [single_ids(request.table, part) for request, part in zip(requests, parts, strict=True)]
            calls.append(partial(shard.lookup, wanted))
        answers = self._threads.run(calls)
        pooled = []
        for place, (request, (_, inverse)) in enumerate(zip(requests, unique, strict=True)):
            rows = gather(owners[place], [answer[place].numpy() for answer in answers])
            pooled.append(pool(rows, inverse, request))
        return pooled

    def apply(self, gradients: Sequence[Gradient], *, step: int = 0, event_time: int = 0) -> None:
        """One optimizer step per table and id, with the sum of its gradients in all `gradients`."""
        joined = [as_sum(gradient) for gradient in join_gradients(gradients)]
        owners = [self._owners_of(self._known(gradient.bags).ids) for gradient in joined]
        calls = []
        for number, shard in enumerate(self.shards):
            # All shards see every step, those without an id of it too: event time and HashNet scales follow the steps.
            part = [restrict(gradient, owner == number) for gradient, owner in zip(joined, owners, strict=True)]
            calls.append(partial(shard.apply, part, step=step, event_time=event_time))
        self._threads.run(calls)

    def assign(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Set the embeddings of `ids` to `values` [n, dim]."""
        rows = self._matrix(table, ids, values)
        self._each(ids, lambda shard, mine, at: shard.assign(table, mine, rows[at], event_time=event_time))

    def assign_add(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Add `values` [n, dim] to the embeddings of `ids`."""
        rows = self._matrix(table, ids, values)
        self._each(ids, lambda shard, mine, at: shard.assign_add(table, mine, rows[at], event_time=event_time))

    def reinitialize(self, table: str, ids: Ids, *, event_time: int = 0) -> torch.Tensor:
        """Reset value and state of `ids`; int32 [n]: 1 it had a row, 0 it is new."""
        self._config(table)
        wanted = id_array(ids)
        existed = torch.zeros(wanted.size, dtype=torch.int32)

        def reset(shard: Store, mine: np.ndarray, at: np.ndarray) -> None:
            existed[torch.from_numpy(at)] = shard.reinitialize(table, mine, event_time=event_time).reshape(-1)

        self._each(wanted, reset)
        return existed.reshape(wanted.shape)

    def evict(self, *, now: int | Mapping[str, int] | None = None) -> dict[str, int]:
        """Remove expired rows of all tables at `now`, by default the newest event time of each table in any shard."""
        moment = {name: stats.max_event_time for name, stats in self.stats().items()} if now is None else now
        counts = self._threads.run([partial(shard.evict, now=moment) for shard in self.shards])
        return {name: sum(count[name] for count in counts) for name in self._configs}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write all shards into a new folder, from which a store with any number of shards can be restored."""
        write_shards(self.shards, self.ranges, folder)

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Replace the rows of all tables by those that any store saved; on an error nothing has changed."""
        self.prepare_restore(folder)()

    def prepare_restore(
        self, folder: str | os.PathLike[str], *, buckets: range = range(NUM_BUCKETS)
    ) -> Callable[[], None]:
        """Read and check the rows of `buckets` now; calling the answer puts them in place."""
        return self._prepare(self.shards, folder, buckets)

    def prepare_fresh(self, folder: str | os.PathLike[str]) -> Callable[[], None]:
        """Like `prepare_restore`, but shards that are initialised keep what they have: only what was lost comes back."""
        lost = [shard for shard in self.shards if not shard.is_initialised()]
        return self._prepare(lost, folder, range(NUM_BUCKETS))

    def stats(self) -> dict[str, TableStats]:
        """The size of every table, all shards together."""
        parts = self._threads.run([shard.stats for shard in self.shards])
        return {name: TableStats.total([part[name] for part in parts]) for name in self._configs}

    def __repr__(self) -> str:
        return f"ShardedStore({', '.join(map(repr, self.shards))})"

    def _prepare(self, shards: Sequence[Store], folder: str | os.PathLike[str], buckets: range) -> Callable[[], None]:
        prepared = []
        for shard, owned in zip(self.shards, self.ranges, strict=True):
            first, end = max(owned.start, buckets.start), min(owned.stop, buckets.stop)
            if shard in shards and first < end:
                prepared.append(shard.prepare_restore(folder, buckets=range(first, end)))

        def put_in_place() -> None:
            for put in prepared:
                put()

        return put_in_place

    def _known(self, bags: Bags) -> Bags:
        self._config(bags.table)
        return bags

    def _config(self, table: str) -> TableConfig:
        try:
            return self._configs[table]
        except KeyError:
            known = ", ".join(map(repr, self._configs)) or "none"
            raise InvalidArgumentError(f"table: the store has no {table!r}; it has {known}") from None

    def _owners_of(self, ids: np.ndarray) -> np.ndarray:
        owners: np.ndarray = self._owners[bucket_of(ids)]
        return owners

    def _matrix(self, table: str, ids: Ids, values: Values) -> torch.Tensor:
        count, dim = id_array(ids).size, self._config(table).dim
        rows = torch.as_tensor(values)
        if rows.ndim < 2 or rows.shape[-1] != dim or rows.numel() != count * dim:
            raise InvalidArgumentError(f"values: expected [{count}, {dim}], one row per id, got {list(rows.shape)}")
        return rows.reshape(count, dim)

    def _each(self, ids: Ids, call: Callable[[Store, np.ndarray, np.ndarray], None]) -> None:
        wanted = id_array(ids).reshape(-1)
        owners = self._owners_of(wanted)
        for number, shard in enumerate(self.shards):
            places = np.flatnonzero(owners == number)
            if places.size:
                call(shard, wanted[places], places)


def _common_configs(shards: Sequence[Store]) -> dict[str, TableConfig]:
    configs, *others = [shard.configs() for shard in shards]
    for number, other in enumerate(others, start=1):
        if _comparable(other) != _comparable(configs):
            raise ConfigError(f"shards[{number}]: expected the tables of the first shard, equally configured")
    return configs


def _comparable(configs: Mapping[str, TableConfig]) -> dict[str, TableConfig]:
    return {name: config.model_copy(update={"initial_capacity": 0}) for name, config in configs.items()}
