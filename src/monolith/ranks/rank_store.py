"""`RankStore`: tables spread over the ranks of a run, as one `Store`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, Unpack

import numpy as np
import torch
from pydantic import JsonValue

from monolith.errors import ConfigError, InvalidArgumentError
from monolith.ps.protocol.messages import DeclaredTable, Wire
from monolith.ranks.agreement import Agreement, RankAnswer, RankCalls
from monolith.ranks.mesh import Arrays, Channel, Kind
from monolith.ranks.rank_state import RankState
from monolith.ranks.row_exchange import GradientPart, LookupsAhead, RowExchange
from monolith.table.admission import AdmissionFilter
from monolith.table.arrays import Ids, Values, contiguous, id_array
from monolith.table.bags import Bags, Gradient, PackedBags
from monolith.table.buckets import NUM_BUCKETS, bucket_of, bucket_owners, bucket_ranges
from monolith.table.config import TableConfig
from monolith.table.embedding_table import EmbeddingTable, TableStats
from monolith.table.entries import Entries
from monolith.table.store import (
    LocalStore,
    Position,
    RestoreChoices,
    StoreSave,
)

__all__ = ["RankStore"]

_LOOKUP = "lookup"
_Argument: TypeAlias = Any  # JSON that this class has written itself
_CHUNK_BYTES = 2**26
"""Bytes of rows in one answer of `iter_rows`, about."""


class RankStore:
    """A `Store` whose rows are spread over the ranks of a run: each id belongs to a bucket, each bucket to a rank.

    Within a step all ranks call `lookup` and `apply`, as often and in the same order. A lookup asks every owner once for the
    distinct ids of all tables and pools here. `apply` sends each owner the summed gradient of every id, multiplied by `weight`.
    The owner adds those of all ranks, in the order of ranks, and makes one optimizer step. A rank without data calls
    `follow_lookups` in place of its forward pass, and `apply([])`.

    Between two steps any rank may call anything but `apply` and `prefetch` alone: the others answer from `Agreement.next_step`
    or `Agreement.serve`. Within an action all ranks call.

    Args:
        agreement: of this rank.
        tables: the same on all ranks.
        wire: the precision of rows and gradients between ranks. 16 bits round.
        step_by_rank: make an optimizer step with the gradient of each rank, in the order of ranks, as the original does in an
            order that it leaves open. By default an id makes one step with the sum.

    Example:
        >>> from monolith.features import Feature
        >>> from monolith.nn import EmbeddingBagCollection
        >>> from monolith.ps import tables_of
        >>> from monolith.testing.rank_threads import run_ranks
        >>> features = [Feature(name="user", dim=2)]
        >>> def rank(mesh):
        ...     agreement = Agreement(mesh)
        ...     store = RankStore(agreement, tables_of(features))
        ...     embeddings = EmbeddingBagCollection(features, store)
        ...     store.weight = 1 / agreement.next_step(rows=1).total_rows
        ...     embeddings({"user": torch.tensor([mesh.rank])})["user"].sum().backward()
        ...     embeddings.step()
        ...     agreement.step_ended()
        ...     rows = store.stats()["user"].rows if mesh.rank == 0 else None
        ...     agreement.next_step(rows=0)
        ...     return rows
        >>> run_ranks(2, rank)
        [2, None]
    """

    remote = True

    def __init__(
        self,
        agreement: Agreement,
        tables: Iterable[TableConfig | DeclaredTable],
        *,
        wire: Wire = "float32",
        step_by_rank: bool = False,
    ) -> None:
        declared = [table if isinstance(table, DeclaredTable) else DeclaredTable(config=table) for table in tables]
        self.agreement = agreement
        self.declared = tuple(sorted(declared, key=lambda table: table.config.name))
        """All tables, by name."""
        self.buckets = bucket_ranges(agreement.mesh.size)[agreement.mesh.rank]
        """Those whose rows this rank owns."""
        self.local = LocalStore(
            EmbeddingTable(
                table.config, admission=None if table.admission is None else AdmissionFilter(table.admission)
            )
            for table in self.declared
        )
        """The rows that this rank owns."""
        self.weight = 1.0
        """What `apply` multiplies gradients by: the rows of this rank / those of all, if the loss is a mean over rows.

        With a delayed push it is that of another batch: multiply the gradients themselves."""
        self.delayed_push = False
        """Whether another thread than that of training calls `apply`. It has a channel of its own then."""
        self._owners = bucket_owners(bucket_ranges(agreement.mesh.size), agreement.mesh.size)
        self._exchange = RowExchange(agreement.mesh, self.local, self.declared, wire=wire, step_by_rank=step_by_rank)
        self._ahead = LookupsAhead(self._exchange)
        self.state = RankState(agreement, self.local)
        """Saves and restores the rows of all ranks."""
        self._requested: Sequence[Bags] = ()
        self._found: Sequence[torch.Tensor] = ()
        agreement.actions[_LOOKUP] = self._answer_lookup
        self._calls = RankCalls(
            "tables",
            agreement,
            {
                "stats": lambda _, __: RankAnswer({n: _plain(s) for n, s in self.local.stats().items()}),
                "evict": lambda now, _: RankAnswer(dict(self.local.evict(now=now))),
                "assign": self._assign_here,
                "assign_add": self._assign_here,
                "reinitialize": self._reinitialize_here,
                "erase": lambda table, arrays: RankAnswer(self.local.erase(table, arrays[0])),
                "rows": self._rows_here,
                "entries": self._entries_here,
                "slot_counts": lambda table, _: RankAnswer(list(self.local.slot_counts(table).items())),
                "is_initialised": lambda _, __: RankAnswer(self.local.is_initialised()),
                "mark_initialised": self._mark_here,
            },
        )

    @property
    def collective(self) -> frozenset[str]:
        """Methods that all ranks must call together now: all within an action, `lookup`, `prefetch` and `apply` within a step."""
        always = frozenset({"apply", "prefetch"})
        if self.agreement.mode == "action":
            changes = ("evict", "erase", "assign", "assign_add", "reinitialize")
            return always | {"lookup", *changes, "stats", "iter_rows", "lookup_entry", "slot_counts"}
        return always | {"lookup"} if self.agreement.mode == "step" else always

    @property
    def tables(self) -> Mapping[str, EmbeddingTable]:
        """Nothing: ranks log and save their own rows, which are in `local`."""
        return {}

    @property
    def tables_hash(self) -> int:
        """A number that is the same on ranks that have declared the same tables."""
        return self._exchange.tables_hash

    def configs(self) -> dict[str, TableConfig]:
        """Return the configuration of every table."""
        return {table.config.name: table.config for table in self.declared}

    def lookup(self, requests: Sequence[Bags]) -> Sequence[torch.Tensor]:
        """Return one float32 [bags, dim] per request. An empty bag is zeros. Never inserts.

        Within a step all ranks call it, or `follow_lookups`. Between two steps one rank calls it alone.
        """
        self._require(requests.layout.tables if isinstance(requests, PackedBags) else [bags.table for bags in requests])
        alone = self.agreement.mesh.size == 1
        if alone or self.agreement.mode == "step":
            begun = self._ahead.take(requests)
            if begun is not None:
                return begun
        if alone:
            return self.local.lookup(requests)
        if self.agreement.mode != "idle":
            return self._exchange.lookup(requests, step=self.agreement.step, channel=Channel.MAIN)
        self._requested = requests
        try:
            self.agreement.run(_LOOKUP, self.agreement.mesh.rank)
            return self._found
        finally:
            self._requested, self._found = (), ()

    def follow_lookups(self) -> None:
        """Answer the lookups of the other ranks in this step, for a rank without data. Returns when they do something else."""
        mesh = self.agreement.mesh
        while mesh.size > 1 and mesh.next_kind() == Kind.IDS:
            self._exchange.lookup((), step=self.agreement.step, channel=Channel.MAIN)

    def prefetch(self, requests: Sequence[Bags]) -> None:
        """Begin a lookup in the background, whose answer the next `lookup` with equal `requests` takes in a step.

        It sees the gradients applied before this call and none applied later: `apply` waits for it. Other changes, which one rank
        makes between two steps, it may see or not. All ranks call it as often. A rank without a next batch gives no requests,
        and answers the others.
        """
        self._require(requests.layout.tables if isinstance(requests, PackedBags) else [bags.table for bags in requests])
        self._ahead.begin(requests, step=self.agreement.step)

    def forget_prefetched(self) -> None:
        """Drop the lookups that were begun and not taken, as after a restore, when their rows are no longer true."""
        self._ahead.forget()

    def apply(
        self, gradients: Sequence[Gradient], *, step: int = 0, event_time: int = 0, position: Position | None = None
    ) -> None:
        """Make one optimizer step per table and id, with the sum of its gradients in the `gradients` of all ranks.

        Gradients are multiplied by `weight`. The newest `event_time` of all ranks counts. All ranks call it with the same `step`.
        Nobody records the `position`: the run does.
        """
        if self.agreement.mesh.size == 1 and self.weight == 1.0:
            self._ahead.wait()
            self.local.apply(gradients, step=step, event_time=event_time)
            return
        part = GradientPart(number=self.agreement.mesh.rank, gradients=gradients, weight=self.weight)
        self.apply_parts([part] if len(gradients) else [], step=step, event_time=event_time)

    def apply_parts(self, parts: Sequence[GradientPart], *, step: int = 0, event_time: int = 0) -> None:
        """Make one optimizer step per table and id, with the sum of its gradients in the parts of all ranks.

        Gradients of a part are summed by themselves, the sums are added in the order of the parts' numbers. So the bits of the
        rows do not depend on which rank had which part. The weights of the parts are used, not `weight`.
        """
        if self.agreement.mode == "idle" and self.agreement.mesh.size > 1:
            raise InvalidArgumentError(
                "apply: was called between two steps; all ranks call it together, within a step or Agreement.acting()"
            )
        self._ahead.wait()
        channel = Channel.PUSH if self.delayed_push else Channel.MAIN
        self._exchange.apply(parts, step=step, event_time=event_time, channel=channel)

    def iter_rows(self, table: str, *, chunk: int = 65536) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield all rows of a table, about `chunk` at a time: ids int64 [n] and stored weights float32 [n, dim].

        Asks for some buckets after the other. A chunk has at least the rows of one bucket, 1/4096 of all.
        """
        self._require([table])
        if chunk < 1:
            raise InvalidArgumentError(f"chunk: expected at least 1, got {chunk}")
        fitting = max(1, min(chunk, _CHUNK_BYTES // (8 + 4 * self.local.tables[table].dim)))
        step = max(1, min(NUM_BUCKETS, NUM_BUCKETS * fitting // max(self.stats()[table].rows, 1)))
        for first in range(0, NUM_BUCKETS, step):
            asked: JsonValue = [table, first, min(first + step, NUM_BUCKETS)]
            for answer in self._calls.ask("rows", asked):
                ids, values = map(torch.from_numpy, answer.arrays)
                if len(ids):
                    yield ids, values

    def slot_counts(self, table: str) -> dict[int, int]:
        """Count the rows of each slot of a table whose ids have slots, all ranks together."""
        self._require([table])
        counts: Counter[int] = Counter()
        for answer in self._calls.ask("slot_counts", table):
            counts.update(dict(answer.value))
        return dict(sorted(counts.items()))

    def lookup_entry(self, table: str, ids: Ids) -> Entries:
        """Return the whole rows of `ids`, with optimizer state, as `EmbeddingTable.lookup_entry` does."""
        self._require([table])
        wanted = id_array(ids).reshape(-1)
        order, parts = self._by_owner(wanted)
        own = self.local.tables[table].lookup_entry([])
        names = ("found", "values", "times", *own.slots)
        columns: dict[str, list[np.ndarray]] = {name: [] for name in names}
        for answer in self._calls.ask("entries", table, [[wanted[part]] for part in parts]):
            for name, array in zip(names, answer.arrays, strict=True):
                columns[name].append(array)
        restored: dict[str, torch.Tensor] = {}
        for name, arrays in columns.items():
            joined = np.concatenate(arrays)
            restored[name] = torch.from_numpy(np.empty_like(joined))
            restored[name].numpy()[order] = joined
        slots = {name: restored[name] for name in own.slots}
        return Entries(
            ids=torch.from_numpy(wanted.copy()),
            found=restored["found"].bool(),
            values=restored["values"],
            slots=slots,
            times=restored["times"],
        )

    def assign(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Set the embeddings of `ids` to `values` [n, dim]."""
        self._write("assign", table, ids, values, event_time)

    def assign_add(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Add `values` [n, dim] to the embeddings of `ids`."""
        self._write("assign_add", table, ids, values, event_time)

    def reinitialize(self, table: str, ids: Ids, *, event_time: int = 0) -> torch.Tensor:
        """Reset value and optimizer state of `ids`. Returns int32 [n]: 1 if the id had a row, 0 if it is new."""
        self._require([table])
        wanted = id_array(ids)
        order, parts = self._by_owner(wanted.reshape(-1))
        arrays = [[wanted.reshape(-1)[part]] for part in parts]
        existed = np.empty(wanted.size, dtype=np.int32)
        answers = self._calls.ask("reinitialize", [table, event_time], arrays)
        existed[order] = np.concatenate([answer.arrays[0] for answer in answers])
        return torch.from_numpy(existed).reshape(wanted.shape)

    def erase(self, table: str, ids: Ids) -> int:
        """Remove the rows of `ids`. Returns how many there were, on all ranks together."""
        self._require([table])
        wanted = id_array(ids).reshape(-1)
        _, parts = self._by_owner(wanted)
        return sum(answer.value for answer in self._calls.ask("erase", table, [[wanted[part]] for part in parts]))

    def stats(self) -> dict[str, TableStats]:
        """Return the size of every table, over all ranks."""
        answers = [answer.value for answer in self._calls.ask("stats")]
        return {name: TableStats.total([TableStats(**one[name]) for one in answers]) for name in self.configs()}

    def evict(self, *, now: int | Mapping[str, int] | None = None) -> dict[str, int]:
        """Remove expired rows of all tables at event time `now`, by default the newest of each table on any rank.

        Returns how many were removed, by table.
        """
        if now is None:
            moments = {name: one.max_event_time for name, one in self.stats().items()}
        else:
            moments = dict(now) if isinstance(now, Mapping) else dict.fromkeys(self.configs(), now)
        counts = [answer.value for answer in self._calls.ask("evict", dict(moments))]
        return {name: sum(count[name] for count in counts) for name in moments}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Let all ranks write their rows, each next to `folder`, which becomes the checkpoint that names them."""
        self.state.save(os.fspath(folder))

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Let all ranks restore a checkpoint of any number of ranks or servers. On an error nothing has changed."""
        self.prepare_restore(folder)()

    def prepare_restore(self, folder: str | os.PathLike[str], *, only_fresh: bool = False) -> Callable[[], None]:
        """Let all ranks read the buckets they own. Returns a function that puts them in place on all ranks."""
        return self.begin_restore(os.fspath(folder), only_fresh=only_fresh)

    def begin_save(self, path: str, *, step: int) -> StoreSave:
        """Let all ranks begin their parts of the checkpoint `path`, with the rows that they have now."""
        return self.state.begin_save(path, step=step)

    def open_log(self, model_dir: str) -> None:
        """Let every rank log its rows in `<model_dir>/ps/<rank>` from now on."""
        self.state.open_log(model_dir)

    def begin_cut(self, *, step: int) -> StoreSave | None:
        """Let all ranks commit the rows that they have now to their logs. None while one of them still writes."""
        return self.state.begin_cut(step=step)

    def begin_restore(
        self, path: str | None, *, only_fresh: bool, rows_only: bool = False, **choices: Unpack[RestoreChoices]
    ) -> Callable[[], None]:
        """Let all ranks read the buckets they own from `path`. Returns a function that puts them in place on all ranks."""
        if path is None:
            raise InvalidArgumentError("path: expected a checkpoint; ranks hold no rows when they form a run")
        if only_fresh and self.is_initialised():
            return lambda: None
        return self.state.begin_restore(path, **choices)

    def is_initialised(self) -> bool:
        """Whether all ranks have a state that is to be kept."""
        return all(answer.value for answer in self._calls.ask("is_initialised"))

    def mark_initialised(self) -> None:
        """Declare on all ranks that the present state is to be kept."""
        self._calls.ask("mark_initialised")

    def lost(self, checkpoint: str, *, trained: bool) -> list[str]:
        """Return nothing: when a rank is lost, all ranks restore the last state that they have in common."""
        return []

    def moved_on(self, checkpoint: str) -> list[str]:
        """Return nothing: rows of ranks live as long as the run that they form."""
        return []

    def progress(self) -> None:
        """Return None: the run records how far its data has been trained."""

    def close(self) -> None:
        """Wait for what this rank writes, and release its folder and threads. The mesh stays open."""
        self._ahead.close()
        self.state.close()

    def __repr__(self) -> str:
        mesh = self.agreement.mesh
        return f"RankStore(rank {mesh.rank} of {mesh.size}: {', '.join(map(repr, self.configs()))})"

    def _answer_lookup(self, asking: JsonValue) -> None:
        mine = asking == self.agreement.mesh.rank
        found = self._exchange.lookup(self._requested if mine else (), step=self.agreement.step, channel=Channel.MAIN)
        if mine:
            self._found = found

    def _write(self, call: str, table: str, ids: Ids, values: Values, event_time: int) -> None:
        self._require([table])
        wanted, rows = id_array(ids).reshape(-1), contiguous(values, "values")
        dim = self.local.tables[table].dim
        if rows.dtype != np.float32 or rows.size != len(wanted) * dim:
            raise InvalidArgumentError(
                f"values: expected float32 [{len(wanted)}, {dim}], one row per id, got {rows.dtype} {list(rows.shape)}"
            )
        rows = rows.reshape(len(wanted), dim)
        _, parts = self._by_owner(wanted)
        self._calls.ask(call, [call, table, event_time], [[wanted[part], rows[part]] for part in parts])

    def _assign_here(self, argument: _Argument, arrays: Arrays) -> RankAnswer:
        call, table, event_time = argument
        write = self.local.assign if call == "assign" else self.local.assign_add
        write(table, arrays[0], arrays[1], event_time=event_time)
        return RankAnswer()

    def _reinitialize_here(self, argument: _Argument, arrays: Arrays) -> RankAnswer:
        table, event_time = argument
        return RankAnswer(None, [self.local.reinitialize(table, arrays[0], event_time=event_time).numpy()])

    def _rows_here(self, argument: _Argument, arrays: Arrays) -> RankAnswer:
        name, first, end = argument
        table = self.local.tables[name]
        first, end = max(first, self.buckets.start), min(end, self.buckets.stop)
        raw = table.rows_of_buckets(range(first, max(first, end)))
        return RankAnswer(None, [raw.ids, table.decode(raw.ids, raw.times, raw.rows).values.numpy()])

    def _entries_here(self, table: str, arrays: Arrays) -> RankAnswer:
        entries = self.local.tables[table].lookup_entry(arrays[0])
        # Messages have no bool.
        columns = [entries.found.to(torch.uint8), entries.values, entries.times, *entries.slots.values()]
        return RankAnswer(None, [column.numpy() for column in columns])

    def _mark_here(self, argument: _Argument, arrays: Arrays) -> RankAnswer:
        self.local.mark_initialised()
        return RankAnswer()

    def _by_owner(self, ids: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the indices of `ids` in the order of their owners, and those of each owner."""
        owners = self._owners[bucket_of(ids)]
        parts = [np.flatnonzero(owners == rank) for rank in range(self.agreement.mesh.size)]
        return np.concatenate(parts), parts

    def _require(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.local.tables:
                known = ", ".join(map(repr, self.local.tables)) or "none"
                raise ConfigError(f"table: the ranks have not declared {name!r}; they have {known}")


def _plain(stats: TableStats) -> dict[str, JsonValue]:
    return {
        name: getattr(stats, name)
        for name in ("rows", "bytes", "row_bytes", "index_slots", "growths", "max_event_time")
    }
