"""Restoring tables: check everything, build new ones aside, and only then put them in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import numpy as np

from monolith.errors import InvalidArgumentError
from monolith.log.commit import Tables
from monolith.state.compatibility import RestoreReport, TableFit, filters_fit, fit_table
from monolith.state.manifest import ShardEntry, TableEntry
from monolith.state.restore_points import RestorePoint
from monolith.state.storage import StrPath
from monolith.state.tables import (
    ALL,
    PartedSource,
    TableSource,
    group_tables,
    open_source,
    reading,
    saved_shard,
    shard_buckets,
)
from monolith.table import AdmissionFilter, EmbeddingTable, Entries, TableConfig, TableState
from monolith.table.store import RestoreChoices

__all__ = ["build_tables", "convert_rows", "plan_restore", "prepare_empty", "prepare_tables", "restore_tables"]


def restore_tables(
    source: StrPath | RestorePoint, tables: Tables, *, buckets: range | None = None, **choices: Unpack[RestoreChoices]
) -> RestoreReport:
    """Replace the rows of `tables` by those of a checkpoint or of another restore point. On an error nothing has changed.

    Everything is checked first, then new tables are built, and only then are they put in place. The table objects stay the
    same. The number of shards may differ from that of the save.

    Args:
        source: The path of a checkpoint, or a `RestorePoint`.
        tables: In this process. Equal names are shards of one table. A mapping gives names that differ from the tables' own.
        buckets: Only the rows of these, for a caller whose tables are one shard of many. None divides all buckets among the
            shards in `tables`.
        choices: See `RestoreChoices`.

    Example:
        >>> import tempfile
        >>> from monolith.state import restore_tables, write_checkpoint
        >>> from monolith.testing import sgd_table_config
        >>> table, shards = EmbeddingTable(sgd_table_config(1)), [EmbeddingTable(sgd_table_config(1)) for _ in range(2)]
        >>> _ = table.reinitialize([1, 2, 3, 4])
        >>> with tempfile.TemporaryDirectory() as model_dir:
        ...     _ = write_checkpoint(f"{model_dir}/model.ckpt-1", state={}, step=1, tables=[table])
        ...     report = restore_tables(f"{model_dir}/model.ckpt-1", shards)
        >>> report.tables["test"].fate, len(shards[0]) + len(shards[1])
        ('restored', 4)
    """
    report, put_in_place = prepare_tables(source, tables, buckets=buckets, **choices)
    put_in_place()
    return report


def prepare_tables(
    source: StrPath | RestorePoint,
    tables: Tables,
    *,
    buckets: range | None = None,
    ranges: Sequence[range] | None = None,
    owned: bool = True,
    **choices: Unpack[RestoreChoices],
) -> tuple[RestoreReport, Callable[[], None]]:
    """Read and check what `restore_tables` would restore. Calling the second result puts it in place.

    `ranges`, of buckets, limits the rows as `buckets` does, for a caller that owns several ranges. `owned=False` also takes rows
    of buckets that the server that has written them no longer owned. Only that server itself does so.
    """
    groups = group_tables(tables)
    wanted = ALL if ranges is None else ranges
    with reading(source, wanted) as whole:
        saved = (whole if owned else replace(whole, ranges=ALL)).within(wanted)
        report = _plan(saved, groups, choices, buckets)
        report.require()
        built = build_tables(saved, groups, report.tables, buckets)

    def put_in_place() -> None:
        for table, fresh in built:
            table.take_over(fresh)

    return report, put_in_place


def prepare_empty(tables: Tables) -> Callable[[], None]:
    """Build tables without rows, with the settings of `tables`. Calling the result puts them in place."""
    groups = group_tables(tables)
    admissions: dict[AdmissionFilter, AdmissionFilter] = {}
    built = []
    for table in (shard for shards in groups.values() for shard in shards):
        shared = table.admission
        admission = None if shared is None else admissions.setdefault(shared, AdmissionFilter(shared.config))
        built.append((table, EmbeddingTable(table.config, admission=admission)))

    def put_in_place() -> None:
        for table, fresh in built:
            table.take_over(fresh)

    return put_in_place


def plan_restore(
    source: StrPath | RestorePoint, tables: Tables, *, buckets: range | None = None, **choices: Unpack[RestoreChoices]
) -> RestoreReport:
    """Return what `restore_tables` with these arguments would do, and every reason why it would not. Reads no rows."""
    return _plan(open_source(source), group_tables(tables), choices, buckets)


def _plan(
    saved: TableSource,
    groups: Mapping[str, Sequence[EmbeddingTable]],
    choices: RestoreChoices,
    buckets: range | None,
) -> RestoreReport:
    aliases, only = choices.get("aliases") or {}, choices.get("only")
    for argument, names in (("aliases", aliases), ("only", only or ())):
        unknown = [name for name in names if name not in groups]
        if unknown:
            known = ", ".join(map(repr, groups)) or "none"
            raise InvalidArgumentError(f"{argument}: the model has no table {unknown[0]!r}; it has {known}")
    fits = {}
    for name, shards in groups.items():
        if only is not None and name not in only:
            fits[name] = TableFit(fate="kept")
            continue
        fits[name] = fit_table(
            shards,
            aliases.get(name, name),
            saved.tables,
            allow_new_tables=choices.get("allow_new_tables", False),
            allow_new_segments=choices.get("allow_new_segments", False),
            reset_admission=choices.get("reset_admission", False),
            parts=shard_buckets(len(shards), buckets),
        )
    used = {fit.saved_as for fit in fits.values()}
    unused = tuple(name for name in saved.tables if name not in used) if only is None else ()
    return RestoreReport(
        source=saved.where,
        step=saved.step,
        time=saved.time,
        sequence=saved.sequence,
        tables=fits,
        unused=unused,
        from_parts=isinstance(saved, PartedSource) and any(used - {None, *saved.own.tables}),
    )


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A shard of a table of the model, and what will replace it."""

    table: EmbeddingTable
    fresh: EmbeddingTable
    filled: EmbeddingTable
    """What is filled with the saved rows: `fresh` itself, or a table of the old layout."""
    fit: TableFit
    buckets: range


def build_tables(
    saved: TableSource,
    groups: Mapping[str, Sequence[EmbeddingTable]],
    fits: Mapping[str, TableFit],
    buckets: range | None,
) -> list[tuple[EmbeddingTable, EmbeddingTable]]:
    """Return every table whose rows are replaced, with a new one that has the saved rows."""
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
    """Reserve capacity, so that the table need not grow while it is filled."""
    return config.model_copy(update={"initial_capacity": max(config.initial_capacity, rows)})


def _rounds(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Group the parts that can be filled in one pass: of the same buckets, and no two from the same saved table."""
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
    """Return the state of the shard that had these ids, or the newest of all if several had."""
    found = saved_shard(shards, buckets)
    if found is not None:
        return found
    newest = max(shards, key=lambda entry: entry.updates)
    return newest.model_copy(update={"max_event_time": max(entry.max_event_time for entry in shards)})


class _Filters:
    """Admission filters with their saved counts. Tables that share one share the new one."""

    def __init__(self, saved: TableSource) -> None:
        self._saved = saved
        self._restored: dict[AdmissionFilter, AdmissionFilter] = {}

    def restored(
        self, current: AdmissionFilter | None, entry: TableEntry | None, buckets: range
    ) -> AdmissionFilter | None:
        """Return what replaces `current`."""
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


def convert_rows(old: EmbeddingTable, new: EmbeddingTable, segments: Sequence[int | None]) -> None:
    """Insert every row of `old` into `new`. `segments` has for each new segment the old one it continues, or None.

    Segments that both have are copied, and the rest is as in a new row.

    Example:
        >>> from monolith import Segment, TableConfig
        >>> from monolith.table import Ones, Zeros
        >>> narrow, wide = (
        ...     EmbeddingTable(TableConfig(name="t", segments=tuple(Segment(dim=1, initializer=i) for i in initializers)))
        ...     for initializers in ([Zeros()], [Zeros(), Ones()])
        ... )
        >>> import torch
        >>> narrow.assign([7], torch.tensor([[5.0]]))
        >>> convert_rows(narrow, wide, [0, None])
        >>> wide.lookup([7]).tolist()
        [[5.0, 1.0]]
    """
    for entries in old.iter_batches():
        # A new row of each id, as training would have initialised it, overwritten by the old values.
        new.reinitialize(entries.ids)
        rows = _overlay(new.lookup_entry(entries.ids), entries, _columns(old), _columns(new), segments)
        new.insert_rows(entries.ids.numpy(), entries.times.numpy().astype(np.uint32), new.encode(rows))


def _overlay(
    fresh: Entries, saved: Entries, old: Sequence[slice], new: Sequence[slice], segments: Sequence[int | None]
) -> Entries:
    values, slots = fresh.values.clone(), dict(fresh.slots)
    for target, source in enumerate(segments):
        if source is None:
            continue
        values[:, new[target]] = saved.values[:, old[source]]
        for name, slot in saved.slots.items():
            segment, _, kind = name.partition("/")
            if int(segment) == source:
                slots[f"{target}/{kind}"] = slot
    return replace(fresh, values=values, slots=slots, times=saved.times)


def _columns(table: EmbeddingTable) -> list[slice]:
    ends = np.cumsum([segment.dim for segment in table.config.segments]).tolist()
    return [slice(end - segment.dim, end) for end, segment in zip(ends, table.config.segments, strict=True)]
