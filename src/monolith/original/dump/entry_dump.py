"""Rows of a table from and to EntryDump records, many at a time.

Records in the shape that the original writes are read as columns; any other that protobuf allows (fields in another order,
packed, varints longer than needed) is parsed by protobuf, one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.lib.stride_tricks import sliding_window_view

from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.original.dump.record_layout import RecordLayout, layouts_by_size, segment_states, varint_widths
from monolith.original.dump.records import Records
from monolith.proto import table_dump_pb2
from monolith.table.config import TableConfig
from monolith.table.exchange import RowColumns, fresh_slots

__all__ = ["EntryReader", "EntryWriter"]

_MAX_TIME = 2**32 - 1


class EntryReader:
    """Reads the rows of one table. A record that does not fit the table is refused with its number and the reason.

    `optimizer_state`: False reads the weights only; every row then starts with fresh optimizer state, as it also does where
    a record has none.
    """

    def __init__(self, config: TableConfig, *, optimizer_state: bool = True) -> None:
        self._config = config
        self._states = segment_states(config)
        self._layouts = layouts_by_size(config.dim, self._states)
        self._fresh = fresh_slots(config)
        self._with_state = optimizer_state and config.mode == "training"

    def read(self, records: Records) -> RowColumns:
        """The rows of `records`, in their order."""
        n = len(records.starts)
        rows = RowColumns(
            ids=np.empty(n, np.int64),
            times=np.zeros(n, np.int64),
            values=np.empty((n, self._config.dim), np.float32),
            slots={name: np.repeat(slot, n, axis=0) for name, slot in self._fresh.items()},
        )
        sizes = records.ends - records.starts
        for size in np.unique(sizes):
            places = np.flatnonzero(sizes == size)
            for layout in self._layouts.get(int(size), ()):
                places = self._read_matching(layout, records, places, rows)
            for place in places:
                self._read_one(records, int(place), rows)
        self._check_times(records, rows)
        return rows

    def _read_matching(
        self, layout: RecordLayout, records: Records, places: np.ndarray, rows: RowColumns
    ) -> np.ndarray:
        """Read those of `places` that have this shape; the others are returned."""
        if not len(places):
            return places
        windows = sliding_window_view(np.frombuffer(records.data, np.uint8), layout.size)
        found = windows[records.starts[places]]
        fits = layout.matches(found)
        found, here = found[fits], places[fits]
        columns = found.view(layout.dtype).reshape(-1)
        rows.ids[here] = columns["id"]
        rows.values[here] = columns["values"]["value"]
        if layout.has_time:
            rows.times[here] = _decoded(columns["times"])
        if self._with_state:
            for name in layout.floats:
                rows.slots[name][here] = columns[name]["value"]
            for name in layout.steps:
                rows.slots[name][here, 0] = _decoded(columns[name])
        others: np.ndarray = places[~fits]
        return others

    def _read_one(self, records: Records, place: int, rows: RowColumns) -> None:
        entry = table_dump_pb2.EntryDump()
        try:
            entry.ParseFromString(records.data[records.starts[place] : records.ends[place]])
        except DecodeError:
            raise CorruptFileError(f"{records.where(place)}: not an EntryDump message") from None
        if not entry.HasField("id"):
            raise CorruptFileError(f"{records.where(place)}: an entry without an id")
        if len(entry.num) != self._config.dim:
            raise InvalidArgumentError(
                f"{records.where(place)}: id {entry.id} has {len(entry.num)} values, "
                f"table {self._config.name!r} has dim {self._config.dim}; give the dims of the dump"
            )
        rows.ids[place] = entry.id
        rows.values[place] = entry.num
        rows.times[place] = entry.last_update_ts_sec
        if self._with_state and len(entry.opt.dump):
            self._read_state(entry, records.where(place), place, rows)

    def _read_state(self, entry: table_dump_pb2.EntryDump, where: str, place: int, rows: RowColumns) -> None:
        expected = [state.field for state in self._states]
        there = [dump.WhichOneof("type") for dump in entry.opt.dump]
        if there != expected:
            raise InvalidArgumentError(
                f"{where}: id {entry.id} has the state of {_listed(there)}, table {self._config.name!r} keeps "
                f"{_listed(expected)}; change its optimizers, or import without optimizer state"
            )
        for state, dump in zip(self._states, entry.opt.dump, strict=True):
            kept: Message = getattr(dump, state.field)
            for name, _, width in state.slots:
                slot = _numbers(kept, name)
                if len(slot) != (width or 1):
                    raise InvalidArgumentError(
                        f"{where}: slot {name!r} of segment {state.segment} of id {entry.id} has {len(slot)} numbers, "
                        f"expected {width or 1}; give the dims of the dump"
                    )
                if width is None and slot[0] < 0:
                    raise CorruptFileError(f"{where}: {name} of id {entry.id} is {slot[0]}, expected at least 0")
                rows.slots[f"{state.segment}/{name}"][place] = slot

    def _check_times(self, records: Records, rows: RowColumns) -> None:
        wrong = np.flatnonzero((rows.times < 0) | (rows.times > _MAX_TIME))
        if len(wrong):
            first = int(wrong[0])
            raise CorruptFileError(
                f"{records.where(first)}: id {rows.ids[first]} was last updated at {rows.times[first]}, "
                f"expected seconds since 1970 in [0, {_MAX_TIME}]"
            )


class EntryWriter:
    """Writes the rows of one table as the original would. Raises if the original has no such optimizer."""

    def __init__(self, config: TableConfig) -> None:
        if config.mode == "serving":
            raise InvalidArgumentError(
                f"table {config.name!r} is for serving: the original's dumps hold weights and optimizer state of training"
            )
        self._dim = config.dim
        self._states = segment_states(config)
        for state in self._states:
            if state.number is None:
                raise InvalidArgumentError(
                    f"segment {state.segment} of table {config.name!r}: the original has no optimizer {state.kind!r}, "
                    "so its dumps have no place for the state; export to Parquet instead"
                )
        self._layouts: dict[tuple[int, ...], RecordLayout] = {}

    def write(self, rows: RowColumns) -> Iterator[np.ndarray]:
        """The records of `rows` as arrays of bytes, uint8 [m, size], one for each shape that occurs."""
        steps = [rows.slots[f"{s.segment}/{name}"][:, 0] for s in self._states for name, _, w in s.slots if w is None]
        widths = np.stack([varint_widths(varint) for varint in (rows.times, *steps)], axis=1)
        for shape in np.unique(widths, axis=0):
            layout = self._layout(tuple(int(width) for width in shape))
            here = np.flatnonzero((widths == shape).all(axis=1))
            yield _records(layout, rows, here)

    def _layout(self, widths: tuple[int, ...]) -> RecordLayout:
        if widths not in self._layouts:
            built = RecordLayout.build(self._dim, self._states, time_width=widths[0], step_widths=widths[1:])
            self._layouts[widths] = built
        return self._layouts[widths]


def _records(layout: RecordLayout, rows: RowColumns, here: np.ndarray) -> np.ndarray:
    records = np.tile(layout.template, (len(here), 1))
    columns = records.view(layout.dtype).reshape(-1)
    columns["id"] = rows.ids[here]
    columns["values"]["value"] = rows.values[here]
    columns["times"] |= _encoded(rows.times[here], columns["times"].shape[1])
    for name in layout.floats:
        columns[name]["value"] = rows.slots[name][here]
    for name in layout.steps:
        columns[name] |= _encoded(rows.slots[name][here, 0], columns[name].shape[1])
    return records


def _numbers(message: Message, name: str) -> np.ndarray:
    """The numbers of a field, one if it is not repeated, none if it is not there."""
    if message.DESCRIPTOR.fields_by_name[name].is_repeated:
        return np.array(getattr(message, name))
    return np.array([getattr(message, name)] if message.HasField(name) else [])


def _decoded(varints: np.ndarray) -> np.ndarray:
    """int64 [n] of the bytes [n, width] of varints."""
    shifts = 7 * np.arange(varints.shape[1], dtype=np.int64)
    total: np.ndarray = ((varints & 0x7F).astype(np.int64) << shifts).sum(axis=1)
    return total


def _encoded(values: np.ndarray, width: int) -> np.ndarray:
    """The payload bits of varints, uint8 [n, width], without the bits that tell whether another byte follows."""
    shifts = 7 * np.arange(width, dtype=np.int64)
    return (values[:, None] >> shifts & 0x7F).astype(np.uint8)


def _listed(kinds: Sequence[str | None]) -> str:
    return ", ".join(str(kind) for kind in kinds) or "no optimizer"
