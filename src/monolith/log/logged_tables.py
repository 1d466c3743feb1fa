"""The tables of a log: cut together, read later as they were at the cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

import numpy as np

from monolith.errors import InvalidArgumentError
from monolith.log.named_tables import Tables, named_tables
from monolith.log.segment_format import TableMeta, TableStateMeta
from monolith.log.segment_writer import Changes
from monolith.table import EmbeddingTable, TableCut

__all__ = ["LoggedTables", "TablesCut"]


class LoggedTables:
    """Tables, or shards of tables, that one log is about."""

    def __init__(self, tables: Tables, kind: Literal["rows", "values"]) -> None:
        self._names, self._tables = named_tables(tables)
        self._configs = [json.loads(table.config.model_dump_json()) for table in self._tables]
        self._replacements = [table.replacements for table in self._tables]
        self.kind = kind

    def add(self, tables: Tables) -> None:
        """Have further tables, which are empty, and remember what changes in them."""
        other = LoggedTables(tables, self.kind)
        if not other.empty:
            raise InvalidArgumentError("tables: expected empty ones; rows from before are in no commit of this log")
        other.track_changes()
        self._names, self._tables = self._names + other._names, self._tables + other._tables
        self._configs, self._replacements = self._configs + other._configs, self._replacements + other._replacements

    @property
    def empty(self) -> bool:
        """Whether no table has a row."""
        return not any(map(len, self._tables))

    @property
    def changed(self) -> int:
        """Ids waiting for the next cut."""
        return sum(table.changed for table in self._tables)

    def track_changes(self) -> None:
        """Let the tables remember from now on what changes."""
        for table in self._tables:
            table.track_changes()

    def cut(self) -> TablesCut:
        """Cut all tables, or none if one cannot be cut."""
        self._check_same_rows()
        cuts: list[TableCut] = []
        try:
            for table in self._tables:
                cuts.append(table.cut_changes())
            return TablesCut(self._tables, cuts, self.kind, tuple(map(self._meta, range(len(cuts)))))
        except BaseException:
            for cut in cuts:
                cut.rollback()
            raise

    def _check_same_rows(self) -> None:
        """A table that was restored is at another place of the log than this one goes on from."""
        for name, table, replacements in zip(self._names, self._tables, self._replacements, strict=True):
            if table.replacements != replacements:
                raise InvalidArgumentError(
                    f"tables: {name!r} was restored after this log was opened; close it and open it with the restore's parent"
                )

    def _meta(self, place: int) -> TableMeta:
        table = self._tables[place]
        state = table.state()
        return TableMeta(
            name=self._names[place],
            config=self._configs[place],
            layout=table.layout,
            row_bytes=table.row_bytes if self.kind == "rows" else 4 * table.dim,
            state=TableStateMeta(
                max_event_time=state.max_event_time, updates=state.updates, hashnet_scales=tuple(state.hashnet_scales)
            ),
        )


class TablesCut:
    """What changed in all tables up to one moment; to be committed or rolled back, once."""

    def __init__(
        self,
        tables: list[EmbeddingTable],
        cuts: list[TableCut],
        kind: Literal["rows", "values"],
        metas: tuple[TableMeta, ...],
    ) -> None:
        self.metas = metas
        self._tables = tables
        self._cuts = cuts
        self._kind = kind

    @property
    def event_time(self) -> int:
        """The newest event time of all tables at the cut."""
        return max((meta.state.max_event_time for meta in self.metas), default=0)

    def changes(self) -> Iterator[Changes]:
        """The rows as they were at the cut, and the erased ids, piece by piece."""
        for place, cut in enumerate(self._cuts):
            for piece in cut:
                rows = piece.rows
                if self._kind == "values":
                    entries = self._tables[place].decode(piece.ids, piece.times, piece.rows)
                    rows = entries.values.numpy().view(np.uint8)
                yield Changes(place, piece.ids, piece.times, rows, piece.erased)

    def commit(self) -> None:
        """Let the tables forget: the changes are durable."""
        for cut in self._cuts:
            cut.commit()

    def rollback(self) -> None:
        """Let everything count as changed again."""
        for cut in self._cuts:
            cut.rollback()
