"""`ServerStore`: tables spread over parameter servers, as one `Store`."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import lru_cache

import numpy as np
import torch
from torch import nn

from monolith.errors import DeadlineExceededError, InvalidArgumentError, OwnershipChangedError
from monolith.features.batch import Batch
from monolith.features.declaration import declare_tables
from monolith.features.feature import Feature
from monolith.nn import embedding_collections
from monolith.process_bound import WorkerThreads
from monolith.ps.client.bucket_group import BucketGroup
from monolith.ps.client.routes import Route
from monolith.ps.client.scatter_gather import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    BagSplit,
    CutBags,
    DistinctIds,
    Indices,
    Part,
    are_long,
    run_parts,
    split_by_owner,
)
from monolith.ps.client.server_group import ClientConfig, require_known
from monolith.ps.protocol import messages
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.messages import DeclaredTable
from monolith.ps.protocol.precision import narrowed, widen
from monolith.table.arrays import Ids, Values, contiguous, id_array
from monolith.table.bags import Bags, Gradient, join_gradients
from monolith.table.buckets import NUM_BUCKETS, mask_of, ranges_of
from monolith.table.config import TableConfig
from monolith.table.entries import Entries
from monolith.table.store import Position
from monolith.transport.frames import Frame
from monolith.transport.link import Exchange, finish_each, jittered

__all__ = ["CHUNK_BYTES", "ReadAhead", "ServerStore", "joined_entries", "tables_of"]

REMEMBERED = 32
"""Requests whose split is kept: the gradients of a batch come soon after its lookup."""

CHUNK_BYTES = 2**26
"""Bytes of rows in one answer of `iter_rows`, about."""

MAX_AHEAD = 16
"""Prefetched lookups. Beyond this the oldest is dropped: its batch never came."""


def tables_of(features: Sequence[Feature], *, seed: int = 0) -> list[DeclaredTable]:
    """Return the tables that an `EmbeddingBagCollection` of `features` needs on its servers.

    Example:
        >>> [table.config.name for table in tables_of([Feature(name="user", dim=8)])]
        ['user']
    """
    declaration = declare_tables(features, seed=seed)
    return [DeclaredTable(config=table.config, admission=table.admission) for table in declaration.tables]


class ServerStore(BucketGroup):
    """A `Store` whose rows are on servers: each id belongs to a bucket, each bucket to a server.

    A lookup calls every server once, all in parallel, for the ids it owns. Short bags ask for each distinct id once and are
    pooled here. Long bags are summed by the servers (`ClientConfig.pool_on_servers`). Every server makes one step with the sum of
    an id's gradients. Whatever the number of servers, rows and lookups equal those of a `LocalStore` bit for bit, with three
    exceptions: a 16-bit `wire` rounds, rows of less than 32 bits that round at random round differently, and several servers that
    pool add in another order.

    A server applies its part of a call at most once. A call that fails may have been applied by some servers and not by others.
    Thread-safe.

    Args:
        addresses: the servers, host:port each.
        tables: declared on all of them.
        ranges: the buckets of each server, by default `bucket_ranges`. Servers that own some already keep those.
        replace_lost: let new servers own the buckets without an owner, after others were lost with their folders. Give the
            addresses of all remaining servers: buckets of a server that is left out would be owned twice.
        config: how to connect to them.
        find: returns the addresses of all servers, called when one does not answer: it may have been restarted elsewhere.

    Example:
        >>> from monolith.nn import EmbeddingBagCollection
        >>> from monolith.ps import ParameterServer, ServerStore, tables_of
        >>> features = [Feature(name="user", dim=2), Feature(name="item", dim=3)]
        >>> with ParameterServer() as one, ParameterServer() as two:
        ...     with ServerStore([one.address, two.address], tables_of(features)) as store:
        ...         embeddings = EmbeddingBagCollection(features, store)
        ...         output = embeddings({"user": torch.tensor([1, 2]), "item": torch.tensor([3, 4])})
        ...         output["item"].sum().backward()
        ...         embeddings.step()
        ...         store.stats()["item"].rows
        2
    """

    def __init__(
        self,
        addresses: Sequence[str],
        tables: Iterable[TableConfig | DeclaredTable] = (),
        *,
        ranges: Sequence[range] | None = None,
        replace_lost: bool = False,
        config: ClientConfig | None = None,
        find: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        self._splits: OrderedDict[int, tuple[Route, BagSplit]] = OrderedDict()
        self._lock = threading.Lock()
        self._ahead: deque[tuple[tuple[Bags, ...], Future[list[torch.Tensor]]]] = deque(maxlen=MAX_AHEAD)
        self._thread: WorkerThreads | None = None
        super().__init__(addresses, tables, ranges=ranges, replace_lost=replace_lost, config=config, find=find)

    def prefetch(self, requests: Sequence[Bags]) -> None:
        """Start a lookup whose result the next `lookup` with equal `requests` returns.

        It sees the changes applied before this call and none applied later: a change through this store waits for it, unless
        `ClientConfig.ordered` is off.
        """
        with self._lock:
            if self._thread is None:
                self._thread = WorkerThreads(1, thread_name_prefix="monolith-prefetch")
            self._ahead.append((tuple(requests), self._thread.submit(self._lookup, requests)))

    def lookup(self, requests: Sequence[Bags]) -> list[torch.Tensor]:
        """Return one float32 [bags, dim] per request. An empty bag is zeros. Never inserts."""
        begun = self._begun(requests)
        return self._lookup(requests) if begun is None else begun.result()

    def close(self) -> None:
        """Close all connections. The servers keep running."""
        if self._thread is not None:
            self._thread.shutdown()
        super().close()

    def _begun(self, requests: Sequence[Bags]) -> Future[list[torch.Tensor]] | None:
        with self._lock:
            for place, (asked, future) in enumerate(self._ahead):
                if _are_equal(asked, requests):
                    # Those before it were begun for batches that never came.
                    self._ahead = deque(list(self._ahead)[place + 1 :], maxlen=MAX_AHEAD)
                    return future
        return None

    def _lookup(self, requests: Sequence[Bags]) -> list[torch.Tensor]:
        route = self._routes.current
        splits = [self._split(bags, route) for bags in requests]
        reads = tuple((split.bags.table, split.pooling) for split in splits)

        def begin(part: Part) -> Exchange:
            text = _lookup_text(reads, self.config.wire, part.version)
            asked = [split.asked(some) for split, some in zip(splits, part.indices, strict=True)]
            return part.link.begin(Call.LOOKUP, text, [array for arrays in asked for array in arrays])

        answers = self._run(route, splits, begin)
        return [
            split.pooled([(indices[at], widen(frame.arrays[at], split.bags.table)) for indices, frame in answers])
            for at, split in enumerate(splits)
        ]

    def lookup_entry(self, table: str, ids: Ids) -> Entries:
        """Return the whole rows of `ids`: stored weights, optimizer state and times."""
        require_known([table], self._declared)
        wanted = id_array(ids).reshape(-1)
        route = self._routes.current
        order, sizes = split_by_owner(wanted, route.owners, route.groups)
        sorted_ids = wanted[order]

        def begin(part: Part) -> Exchange:
            text = messages.ReadEntries(table=table, map=part.version).model_dump_json()
            return part.link.begin(Call.READ_ENTRIES, text, [sorted_ids[part.indices[0]]])

        answers = run_parts(self._routes, route, [sorted_ids], [sizes], begin, timeout=self.config.timeout)
        return joined_entries(wanted, [(order[indices[0]], frame) for indices, frame in answers])

    def iter_rows(self, table: str, *, chunk: int = 65536) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield all rows of a table, about `chunk` at a time: ids int64 [n] and stored weights float32 [n, dim].

        Asks for some buckets after the other, each of one owner. A chunk has at least the rows of one bucket, 1/4096 of all.
        """
        require_known([table], self._declared)
        fitting = max(1, min(chunk, CHUNK_BYTES // (8 + 4 * self._declared[table].config.dim)))
        step = max(1, min(NUM_BUCKETS, NUM_BUCKETS * fitting // max(self.stats()[table].rows, 1)))
        for first in range(0, NUM_BUCKETS, step):
            for frame in self._rows_of(table, first, min(first + step, NUM_BUCKETS)):
                ids, values = (torch.from_numpy(array.copy()) for array in frame.arrays)
                if len(ids):
                    yield ids, values

    def _rows_of(self, table: str, first: int, end: int) -> list[Frame]:
        """Ask the owners of the buckets [first, end) for their rows, again if some of them have moved."""
        deadline, pause = time.monotonic() + self.config.timeout, FIRST_PAUSE
        inside = mask_of([(first, end)])
        while True:
            route = self._routes.current
            owned = [inside & (route.owners == number) for number in range(len(route.links))]
            outcomes: list[Frame | Exception] = []
            if sum(map(np.count_nonzero, owned)) == end - first:
                asked = [
                    (link, messages.ReadRows(table=table, ranges=ranges_of(mine), map=version))
                    for link, version, mine in zip(route.links, route.versions, owned, strict=True)
                    if mine.any()
                ]
                outcomes = finish_each([link.begin(Call.READ_ROWS, read.model_dump_json()) for link, read in asked])
            frames = [one for one in outcomes if isinstance(one, Frame)]
            if frames and len(frames) == len(outcomes):
                return frames
            for one in outcomes:
                if isinstance(one, Exception) and not isinstance(one, OwnershipChangedError):
                    raise one
            if time.monotonic() >= deadline:
                raise DeadlineExceededError(f"buckets were in transit between servers for {self.config.timeout:g} s")
            time.sleep(jittered(pause))
            pause = min(2 * pause, LONGEST_PAUSE)
            self._routes.after(route)

    def apply(
        self,
        gradients: Sequence[Gradient],
        *,
        step: int = 0,
        event_time: int = 0,
        position: Position | None = None,
    ) -> None:
        """Make one optimizer step per table and id, with the sum of its gradients in all `gradients`.

        `position` is the batch of this worker that they belong to, which a successor that resumes from there counts once.
        """
        self._keep_order()
        joined = join_gradients(gradients)
        require_known([gradient.bags.table for gradient in joined], self._declared)
        route = self._routes.current
        splits = [self._push_split(gradient, route) for gradient in joined]
        tables = tuple(
            _table_gradient(g.bags.table, split.pooling, g.learning_rates)
            for g, split in zip(joined, splits, strict=True)
        )
        parts_of = [split.pushed(_float_rows(g.values)) for g, split in zip(joined, splits, strict=True)]
        push_of = self.push_by_round()

        # All servers see every step, those without an id of it too: event time and HashNet scales follow the steps.
        def begin(part: Part) -> Exchange:
            apply = messages.Apply(
                push=push_of(part.round),
                position=position,
                tables=tables,
                step=step,
                event_time=event_time,
                map=part.version,
            )
            pushed = [part_of(some) for part_of, some in zip(parts_of, part.indices, strict=True)]
            arrays = [array for *whole, rows in pushed for array in (*whole, narrowed(rows, self.config.wire))]
            return part.link.begin(Call.APPLY_GRADIENTS, apply.model_dump_json(), arrays)

        self._run(route, splits, begin)

    def assign(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Set the embeddings of `ids` to `values` [n, dim]."""
        self._write(Call.ASSIGN, table, ids, values, event_time)

    def assign_add(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Add `values` [n, dim] to the embeddings of `ids`."""
        self._write(Call.ASSIGN_ADD, table, ids, values, event_time)

    def reinitialize(self, table: str, ids: Ids, *, event_time: int = 0) -> torch.Tensor:
        """Reset value and state of `ids`. Returns int32 [n]: 1 if it had a row, 0 if it is new."""
        wanted = id_array(ids)
        order, answers = self._each(Call.REINITIALIZE, table, wanted.reshape(-1), None, event_time)
        existed = np.empty(wanted.size, dtype=np.int32)
        for indices, frame in answers:
            existed[order[indices[0]]] = frame.arrays[0]
        return torch.from_numpy(existed).reshape(wanted.shape)

    def erase(self, table: str, ids: Ids) -> int:
        """Remove the rows of `ids`. Returns how many there were, on all servers together."""
        require_known([table], self._declared)
        _, answers = self._each(Call.ERASE, table, id_array(ids).reshape(-1), None, 0)
        return sum(int(json.loads(frame.text)["erased"]) for _, frame in answers)

    def _write(self, call: Call, table: str, ids: Ids, values: Values, event_time: int) -> None:
        wanted = id_array(ids).reshape(-1)
        self._each(call, table, wanted, _row_matrix(values, len(wanted)), event_time)

    def _each(
        self, call: Call, table: str, ids: np.ndarray, values: np.ndarray | None, event_time: int
    ) -> tuple[np.ndarray, list[tuple[Indices, Frame]]]:
        """Call each server with its own part of `ids`. Returns the order of the ids in the calls, and the answers."""
        self._keep_order()
        route = self._routes.current
        order, sizes = split_by_owner(ids, route.owners, route.groups)
        ids, push_of = ids[order], self.push_by_round()

        def begin(part: Part) -> Exchange:
            write = messages.TableWrite(push=push_of(part.round), table=table, event_time=event_time, map=part.version)
            (at,) = part.indices
            arrays = [ids[at]] if values is None else [ids[at], values[order[at]]]
            return part.link.begin(call, write.model_dump_json(), arrays)

        return order, run_parts(self._routes, route, [ids], [sizes], begin, timeout=self.config.timeout)

    def _run(
        self, route: Route, splits: Sequence[BagSplit], begin: Callable[[Part], Exchange]
    ) -> list[tuple[Indices, Frame]]:
        ids, sizes = [split.ids for split in splits], [split.sizes for split in splits]
        return run_parts(self._routes, route, ids, sizes, begin, timeout=self.config.timeout)

    def _keep_order(self) -> None:
        if self.config.ordered:
            with self._lock:
                begun = [future for _, future in self._ahead]
            wait(begun)

    def _push_split(self, gradient: Gradient, route: Route) -> BagSplit:
        bags, shape = gradient.bags, list(gradient.values.shape)
        if len(shape) != 2 or shape[0] != len(bags.offsets) - 1:
            raise InvalidArgumentError(
                f"gradients of table {bags.table!r}: expected [{len(bags.offsets) - 1}, dim], got {shape}"
            )
        if self._declared[bags.table].admission is not None:
            # An admission filter counts how often an id comes: sums by id would hide it.
            return CutBags.of(bags, route.owners, route.groups)
        return self._split(bags, route)

    def _split(self, bags: Bags, route: Route) -> BagSplit:
        with self._lock:
            known = self._splits.get(id(bags))
        # Kept together with the bags themselves, so that no other object can have their address. Bags are read-only.
        if known is not None and known[0] is route and known[1].bags is bags:
            return known[1]
        pool_there = self.config.pool_on_servers and are_long(bags, len(route.links))
        split = (CutBags if pool_there else DistinctIds).of(bags, route.owners, route.groups)
        with self._lock:
            self._splits[id(bags)] = (route, split)
            if len(self._splits) > REMEMBERED:
                self._splits.popitem(last=False)
        return split


def _float_rows(values: torch.Tensor) -> np.ndarray:
    """Return gradients as a float32 array."""
    if values.dtype != torch.float32:
        raise InvalidArgumentError(f"gradients: expected float32, got {values.dtype}; convert with .float()")
    return values.detach().cpu().contiguous().numpy()


def _row_matrix(values: Values, count: int) -> np.ndarray:
    """Return `values` as float32 [count, dim]."""
    array = contiguous(values, "values")
    if array.dtype != np.float32:
        raise InvalidArgumentError(f"values: expected float32, got {array.dtype}; convert with .float()")
    if array.ndim < 2 or array.size != count * array.shape[-1]:
        raise InvalidArgumentError(f"values: expected [{count}, dim], one row per id, got {list(array.shape)}")
    return array.reshape(count, array.shape[-1])


def joined_entries(ids: np.ndarray, answers: Sequence[tuple[np.ndarray, Frame]]) -> Entries:
    """Return the rows that servers have sent, in the order of `ids`. Each answer comes with the positions of its ids."""
    names = json.loads(answers[0][1].text)["slots"]
    arrays = [np.zeros((len(ids), *array.shape[1:]), array.dtype) for array in answers[0][1].arrays]
    for positions, frame in answers:
        for whole, part in zip(arrays, frame.arrays, strict=True):
            whole[positions] = part
    found, values, times, *slots = (torch.from_numpy(array) for array in arrays)
    return Entries(
        ids=torch.from_numpy(ids.copy()),
        found=found.bool(),
        values=values,
        slots=dict(zip(names, slots, strict=True)),
        times=times,
    )


# The text of a batch rarely differs from the one before: only its arrays do.
@lru_cache(maxsize=256)
def _lookup_text(reads: tuple[tuple[str, messages.Pooling], ...], wire: messages.Wire, version: int) -> str:
    tables = tuple(messages.TableRead(table=table, pooling=pooling) for table, pooling in reads)
    return messages.Lookup(tables=tables, wire=wire, map=version).model_dump_json()


@lru_cache(maxsize=256)
def _table_gradient(
    table: str, pooling: messages.Pooling, learning_rates: tuple[float, ...] | None
) -> messages.TableGradient:
    return messages.TableGradient(table=table, pooling=pooling, learning_rates=learning_rates)


def _are_equal(one: Sequence[Bags], other: Sequence[Bags]) -> bool:
    return len(one) == len(other) and all(
        a is b
        or (
            a.table == b.table
            and a.pooling == b.pooling
            and np.array_equal(a.ids, b.ids)
            and np.array_equal(a.offsets, b.offsets)
        )
        for a, b in zip(one, other, strict=True)
    )


class ReadAhead:
    """Iterates over `source`, and requests the rows of the next batch before it yields the current one.

    So the rows of a batch lack exactly the update of the batch before it, whatever the timing, and runs are reproducible unless
    `ClientConfig.ordered` is off. To be iterated by the thread that trains. A `Trainer` needs `embedding_prefetch_capacity=0`.
    Its state is that of a source with a `state_dict` after the last batch that was yielded.

    Example:
        >>> import torch
        >>> from monolith.features import Feature
        >>> from monolith.nn import EmbeddingBagCollection
        >>> from monolith.ps import ParameterServer, ReadAhead, ServerStore, tables_of
        >>> features = [Feature(name="user", dim=2)]
        >>> with ParameterServer() as server, ServerStore([server.address], tables_of(features)) as store:
        ...     embeddings = EmbeddingBagCollection(features, store)
        ...     batches = [{"user": torch.tensor([number])} for number in range(3)]
        ...     [list(embeddings(batch)["user"].shape) for batch in ReadAhead(batches, embeddings)]
        [[1, 2], [1, 2], [1, 2]]
    """

    def __init__(self, source: Iterable[Batch], model: nn.Module) -> None:
        self._source = source
        self._collections = embedding_collections(model)
        self._place: object = None

    def __iter__(self) -> Iterator[Batch]:
        self._place = self._told_place()
        batches = iter(self._source)
        current = next(batches, None)
        if current is not None:
            self._prefetch(current)
        while current is not None:
            self._place = self._told_place()
            following = next(batches, None)
            if following is not None:
                self._prefetch(following)
            yield current
            current = following

    def state_dict(self) -> object:
        """Return the state after the last batch that was yielded."""
        return self._place

    def load_state_dict(self, state: object) -> None:
        """Continue from a state that `state_dict` returned."""
        self._source.load_state_dict(state)  # type: ignore[attr-defined]

    def _told_place(self) -> object:
        tell = getattr(self._source, "state_dict", None)
        return None if tell is None else tell()

    def _prefetch(self, batch: Batch) -> None:
        for collection in self._collections:
            if collection.store.remote:
                collection.store.prefetch(collection.plan.bags(batch).packed)
