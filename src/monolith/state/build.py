"""Building the tables of a saved state beside those of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from monolith.state.convert import convert_rows
from monolith.state.fit import TableFit, filters_fit
from monolith.state.manifest import ShardEntry, TableEntry
from monolith.state.sharding import saved_shard, shard_buckets
from monolith.state.table_source import TableSource
from monolith.table import AdmissionFilter, EmbeddingTable, TableConfig, TableState

__all__ = ["build_tables"]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A shard of a table of the model, and what will take its place."""

    table: EmbeddingTable
    fresh: EmbeddingTable
    filled: EmbeddingTable
    """What gets the saved rows: `fresh` itself, or a table of the old layout."""
    fit: TableFit
    buckets: range


def build_tables(
    saved: TableSource,
    groups: Mapping[str, Sequence[EmbeddingTable]],
    fits: Mapping[str, TableFit],
    buckets: range | None,
) -> list[tuple[EmbeddingTable, EmbeddingTable]]:
    """Every table that is to be exchanged, with a new one that has its rows."""
    filters = _Filters(saved)
    parts = [
        _part(table, fits[name], owned, saved, filters)
        for name, tables in groups.items()
        if fits[name].fate != "kept"
        for table, owned in zip(tables, shard_buckets(len(tables), buckets), strict=True)
    ]
    for together in _rounds(parts):
        tables_by_name = {str(part.fit.saved_as): part.filled for part in together}
        saved.fill(tables_by_name, together[0].buckets)
    for part in parts:
        _complete(part, saved)
    return [(part.table, part.fresh) for part in parts]


def _part(table: EmbeddingTable, fit: TableFit, buckets: range, saved: TableSource, filters: _Filters) -> _Part:
    if fit.saved_as is None:
        fresh = EmbeddingTable(table.config, admission=filters.restored(table.admission, None, buckets))
        return _Part(table=table, fresh=fresh, filled=fresh, fit=fit, buckets=buckets)
    entry, rows = saved.tables[fit.saved_as], saved.rows_in(fit.saved_as, buckets)
    admission = filters.restored(table.admission, entry, buckets)
    fresh = EmbeddingTable(_with_room(table.config, rows), admission=admission)
    filled = EmbeddingTable(_with_room(entry.config, rows)) if fit.fate == "converted" else fresh
    return _Part(table=table, fresh=fresh, filled=filled, fit=fit, buckets=buckets)


def _with_room(config: TableConfig, rows: int) -> TableConfig:
    """So that it need not grow while it is filled."""
    return config.model_copy(update={"initial_capacity": max(config.initial_capacity, rows)})


def _rounds(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Parts that can be filled in one pass: of the same buckets, and no two from the same saved table."""
    rounds: list[list[_Part]] = []
    for part in parts:
        if part.fit.saved_as is None:
            continue
        for group in rounds:
            names = {other.fit.saved_as for other in group}
            if group[0].buckets == part.buckets and part.fit.saved_as not in names:
                group.append(part)
                break
        else:
            rounds.append([part])
    return rounds


def _complete(part: _Part, saved: TableSource) -> None:
    if part.filled is not part.fresh:
        convert_rows(part.filled, part.fresh, part.fit.segments)
    shards = () if part.fit.saved_as is None else saved.tables[part.fit.saved_as].shards
    if not shards:
        return
    state = _state(shards, part.buckets)
    scales = state.hashnet_scales
    if part.fit.segments:
        initial = part.fresh.state().hashnet_scales
        scales = tuple(initial[new] if old is None else scales[old] for new, old in enumerate(part.fit.segments))
    part.fresh.set_state(TableState(max_event_time=state.max_event_time, updates=state.updates, hashnet_scales=scales))


def _state(shards: Sequence[ShardEntry], buckets: range) -> ShardEntry:
    """That of the shard which had these ids, or the newest of all if several had."""
    found = saved_shard(shards, buckets)
    if found is not None:
        return found
    newest = max(shards, key=lambda entry: entry.updates)
    return newest.model_copy(update={"max_event_time": max(entry.max_event_time for entry in shards)})


class _Filters:
    """Admission filters with their saved counts; tables that share one share the new one."""

    def __init__(self, saved: TableSource) -> None:
        self._saved = saved
        self._restored: dict[AdmissionFilter, AdmissionFilter] = {}

    def restored(
        self, current: AdmissionFilter | None, entry: TableEntry | None, buckets: range
    ) -> AdmissionFilter | None:
        """What takes the place of `current`."""
        if current is None:
            return None
        if current not in self._restored:
            fresh = AdmissionFilter(current.config)
            counts = None if entry is None else self._counts(current, entry, buckets)
            if counts is not None:
                fresh.core.restore(counts)
            self._restored[current] = fresh
        return self._restored[current]

    def _counts(self, current: AdmissionFilter, entry: TableEntry, buckets: range) -> bytes | None:
        found = saved_shard(entry.shards, buckets)
        if found is None or found.admission is None or not filters_fit(current.config, entry.admission):
            return None
        return self._saved.read(found.admission)
