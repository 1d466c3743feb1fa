"""Restoring tables: check everything, build new ones aside, and only then put them in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from monolith.errors import InvalidArgumentError
from monolith.log.commit import Tables
from monolith.state.build import build_tables
from monolith.state.fit import RestoreReport, TableFit, fit_table
from monolith.state.restore_points import RestorePoint
from monolith.state.saved_tables import ALL
from monolith.state.sharding import shard_buckets
from monolith.state.snapshot import group_tables
from monolith.state.storage import StrPath
from monolith.state.table_source import TableSource, open_source, reading
from monolith.table import EmbeddingTable
from monolith.table.store import RestoreChoices

__all__ = ["plan_restore", "prepare_tables", "restore_tables"]


def restore_tables(
    source: StrPath | RestorePoint, tables: Tables, *, buckets: range | None = None, **choices: Unpack[RestoreChoices]
) -> RestoreReport:
    """Give `tables` the rows of a checkpoint, or of another restore point; on an error nothing has changed.

    The table objects stay the same, their rows are exchanged. The number of shards may differ from that of the save.

    Args:
        source: the path of a checkpoint, or a `RestorePoint`.
        tables: in this process; equal names are shards of one table, a mapping gives names that differ from the tables' own.
        buckets: only the rows of these, for a caller whose tables are one shard of many; None divides all buckets among the
            shards in `tables`.
        choices: see `RestoreChoices`.

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
    """Like `restore_tables`, but only calling the second answer changes the tables: for those who restore more than tables.

    `ranges`, of buckets, limits the rows as `buckets` does, for a caller who owns several ranges. `owned=False` takes rows of
    buckets, too, that the server that has written them did not own any more: for that server itself.
    """
    groups = group_tables(tables)
    with reading(source) as whole:
        saved = (whole if owned else replace(whole, ranges=ALL)).within(ALL if ranges is None else ranges)
        report = _plan(saved, groups, choices, buckets)
        report.require()
        built = build_tables(saved, groups, report.tables, buckets)

    def put_in_place() -> None:
        for table, fresh in built:
            table.take_over(fresh)

    return report, put_in_place


def plan_restore(
    source: StrPath | RestorePoint, tables: Tables, *, buckets: range | None = None, **choices: Unpack[RestoreChoices]
) -> RestoreReport:
    """What `restore_tables` with these arguments would do, and every reason why it would not; reads no rows."""
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
        source=saved.where, step=saved.step, time=saved.time, sequence=saved.sequence, tables=fits, unused=unused
    )
