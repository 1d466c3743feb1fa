"""`ServerStore`: tables spread over parameter servers, as one `Store`."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch

from monolith.errors import InvalidArgumentError
from monolith.features.declaration import declare_tables
from monolith.features.feature import Feature
from monolith.ps import messages
from monolith.ps.bag_split import (
    IdSplit,
    pooled_rows,
    single_gradients,
    split_by_owner,
    split_ids,
    summed_gradients,
)
from monolith.ps.frames import Frame
from monolith.ps.link import finish_all
from monolith.ps.messages import Call, DeclaredTable
from monolith.ps.precision import WIRE_DTYPES, narrow, widen
from monolith.ps.remote_store import float_rows, row_matrix
from monolith.ps.server_group import ClientConfig, ServerGroup, require_known
from monolith.table.arrays import Ids, Values, id_array
from monolith.table.buckets import bucket_owners, bucket_ranges
from monolith.table.config import TableConfig
from monolith.table.store import Bags, Gradient, join_gradients

__all__ = ["ServerStore", "tables_of"]

REMEMBERED = 32
"""Requests whose split is kept: the gradients of a batch come soon after its lookup."""

MAX_AHEAD = 16
"""Lookups begun and not taken; beyond, the oldest is forgotten: its batch never came."""

_INT64 = np.dtype("<i8")


def tables_of(features: Sequence[Feature], *, seed: int = 0) -> list[DeclaredTable]:
    """The tables that an `EmbeddingCollection` of `features` needs on its servers.

    Example:
        >>> [table.config.name for table in tables_of([Feature(name="user", dim=8)])]
        ['user']
    """
    declaration = declare_tables(features, seed=seed)
    return [DeclaredTable(config=table.config, admission=table.admission) for table in declaration.tables]


class ServerStore(ServerGroup):
    """A `Store` whose rows are spread over servers: each id belongs to a bucket, each bucket to a server.

    A request asks every server once, all at the same time, for the distinct ids it owns; pooling happens here. Gradients
    are summed by id here, and every server takes one step with the sums. Whatever the number of servers, rows and lookups are
    those of a `LocalStore`, bit for bit, with two exceptions: a narrow `wire` rounds, and rows of less than 32 bits that
    round at random round differently.

    A server applies its part of a call at most once. A call that fails may have been applied by some servers and not by
    others. Any thread may call. `ranges` says who owns which buckets; by default `bucket_ranges`.

    Example:
        >>> from monolith.nn import EmbeddingCollection
        >>> from monolith.ps import ParameterServer, ServerStore, tables_of
        >>> features = [Feature(name="user", dim=2), Feature(name="item", dim=3)]
        >>> with ParameterServer() as one, ParameterServer() as two:
        ...     with ServerStore([one.address, two.address], tables_of(features)) as store:
        ...         embeddings = EmbeddingCollection(features, store)
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
        config: ClientConfig | None = None,
    ) -> None:
        self.ranges = tuple(bucket_ranges(len(addresses)) if ranges is None else ranges)
        self._owners = bucket_owners(self.ranges, len(addresses))
        self._splits: OrderedDict[int, tuple[Bags, IdSplit]] = OrderedDict()
        self._lock = threading.Lock()
        self._ahead: deque[tuple[tuple[Bags, ...], Future[list[torch.Tensor]]]] = deque(maxlen=MAX_AHEAD)
        self._thread: ThreadPoolExecutor | None = None
        super().__init__(addresses, tables, config=config)

    def prefetch(self, requests: Sequence[Bags]) -> None:
        """Begin a lookup whose answer the next `lookup` with equal `requests` takes.

        It sees what was applied before this call, and nothing of what is applied later: a change made through this store
        waits for it, unless `ClientConfig.ordered` is off.
        """
        with self._lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="monolith-prefetch")
            self._ahead.append((tuple(requests), self._thread.submit(self._lookup, requests)))

    def lookup(self, requests: Sequence[Bags]) -> list[torch.Tensor]:
        """One float32 [bags, dim] per request; an empty bag is zeros. Never inserts."""
        begun = self._begun(requests)
        return self._lookup(requests) if begun is None else begun.result()

    def close(self) -> None:
        """Close all connections; the servers go on."""
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
        splits = [self._split(bags) for bags in requests]
        reads = tuple(messages.TableRead(table=bags.table, pooling="none") for bags in requests)
        text = messages.Lookup(tables=reads, wire=self.config.wire).model_dump_json()
        exchanges = []
        for number, link in enumerate(self.links):
            parts = [split.parts(split.ids)[number] for split in splits]
            exchange, views = link.begin(Call.LOOKUP, text, [(_INT64, part.shape) for part in parts])
            for view, part in zip(views, parts, strict=True):
                view[...] = part
            exchanges.append(exchange)
        answers = [frame.arrays for frame in finish_all(exchanges)]
        pooled = []
        for place, (bags, split) in enumerate(zip(requests, splits, strict=True)):
            rows = [widen(answer[place], bags.table) for answer in answers]
            joined = rows[0] if len(rows) == 1 else np.concatenate(rows)
            pooled.append(torch.from_numpy(pooled_rows(joined, split, bags)))
        return pooled

    def apply(self, gradients: Sequence[Gradient], *, step: int = 0, event_time: int = 0) -> None:
        """One optimizer step per table and id, with the sum of its gradients in all `gradients`."""
        self._keep_order()
        joined = join_gradients(gradients)
        require_known([gradient.bags.table for gradient in joined], self._declared)
        tables = tuple(
            messages.TableGradient(table=g.bags.table, pooling="none", learning_rates=g.learning_rates) for g in joined
        )
        apply = messages.Apply(push=self.next_push(), tables=tables, step=step, event_time=event_time)
        text, wire = apply.model_dump_json(), WIRE_DTYPES[self.config.wire]
        parts = [self._parts(gradient) for gradient in joined]
        exchanges = []
        # All servers see every step, those without an id of it too: event time and HashNet scales follow the steps.
        for number, link in enumerate(self.links):
            mine = [(ids[number], rows[number]) for ids, rows in parts]
            shapes = [shape for ids, rows in mine for shape in ((_INT64, ids.shape), (wire, rows.shape))]
            exchange, views = link.begin(Call.APPLY_GRADIENTS, text, shapes)
            for place, (ids, rows) in enumerate(mine):
                views[2 * place][...] = ids
                narrow(rows, views[2 * place + 1])
            exchanges.append(exchange)
        finish_all(exchanges)

    def assign(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Set the embeddings of `ids` to `values` [n, dim]."""
        self._write(Call.ASSIGN, table, ids, values, event_time)

    def assign_add(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Add `values` [n, dim] to the embeddings of `ids`."""
        self._write(Call.ASSIGN_ADD, table, ids, values, event_time)

    def reinitialize(self, table: str, ids: Ids, *, event_time: int = 0) -> torch.Tensor:
        """Reset value and state of `ids`; int32 [n]: 1 it had a row, 0 it is new."""
        wanted = id_array(ids)
        order, answers = self._each(Call.REINITIALIZE, table, wanted.reshape(-1), None, event_time)
        existed = np.empty(wanted.size, dtype=np.int32)
        existed[order] = np.concatenate([frame.arrays[0] for frame in answers])
        return torch.from_numpy(existed).reshape(wanted.shape)

    def _write(self, call: Call, table: str, ids: Ids, values: Values, event_time: int) -> None:
        wanted = id_array(ids).reshape(-1)
        self._each(call, table, wanted, row_matrix(values, len(wanted)), event_time)

    def _each(
        self, call: Call, table: str, ids: np.ndarray, values: np.ndarray | None, event_time: int
    ) -> tuple[np.ndarray, list[Frame]]:
        """Ask each server about its own of `ids`; the order in which they were asked, and the answers."""
        self._keep_order()
        order, sizes = split_by_owner(ids, self._owners, len(self.links))
        text = messages.TableWrite(push=self.next_push(), table=table, event_time=event_time).model_dump_json()
        exchanges, end = [], 0
        for link, size in zip(self.links, sizes, strict=True):
            places, end = order[end : end + size], end + size
            arrays = [ids[places]] if values is None else [ids[places], values[places]]
            exchange, views = link.begin(call, text, [(array.dtype, array.shape) for array in arrays])
            for view, array in zip(views, arrays, strict=True):
                view[...] = array
            exchanges.append(exchange)
        return order, finish_all(exchanges)

    def _keep_order(self) -> None:
        if self.config.ordered:
            with self._lock:
                begun = [future for _, future in self._ahead]
            wait(begun)

    def _parts(self, gradient: Gradient) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Ids and gradients for each server."""
        bags, values = gradient.bags, float_rows(gradient.values)
        if values.ndim != 2 or len(values) != len(bags.row_splits) - 1:
            raise InvalidArgumentError(
                f"gradients of table {bags.table!r}: expected [{len(bags.row_splits) - 1}, dim], got {list(values.shape)}"
            )
        split = self._split(bags)
        if self._declared[bags.table].admission is not None:
            return single_gradients(values, split, bags)
        return split.parts(split.ids), split.parts(summed_gradients(values, split, bags))

    def _split(self, bags: Bags) -> IdSplit:
        with self._lock:
            known = self._splits.get(id(bags))
        # Kept together with the bags themselves, so that no other object can have their address. Their ids are compared:
        # arrays can be written to, and a row for another id would be wrong without a word.
        if known is not None and known[0] is bags and known[1].is_of(bags.ids):
            return known[1]
        split = split_ids(bags.ids, self._owners, len(self.links))
        with self._lock:
            self._splits[id(bags)] = (bags, split)
            if len(self._splits) > REMEMBERED:
                self._splits.popitem(last=False)
        return split


def _are_equal(one: Sequence[Bags], other: Sequence[Bags]) -> bool:
    return len(one) == len(other) and all(
        a.table == b.table
        and a.pooling == b.pooling
        and np.array_equal(a.ids, b.ids)
        and np.array_equal(a.row_splits, b.row_splits)
        for a, b in zip(one, other, strict=True)
    )
