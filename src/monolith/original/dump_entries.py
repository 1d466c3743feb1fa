"""The EntryDump messages of a dump, read and written in bulk.

The shape of a record depends only on the table's segments and on how many bytes its few varints take. Records of one shape are
therefore rows of a NumPy structure: a template of the bytes that are always the same, and columns for the values between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import cast

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from numpy.lib.stride_tricks import sliding_window_view

from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.original.dump_files import DumpRecords
from monolith.proto import table_dump_pb2
from monolith.table.config import TableConfig
from monolith.table.exchange import RowColumns, fresh_slots
from monolith.table.optimizers import DelayCompensation

__all__ = [
    "EntryReader",
    "EntryWriter",
    "RecordLayout",
    "SegmentState",
    "layouts_by_size",
    "segment_states",
    "varint_widths",
]

_FLOAT = np.dtype([("tag", "u1"), ("value", "<f4")])
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_NAMES = {"rmsprop_v2": "rmspropv2"}
_TIME_WIDTHS = (1, 2, 3, 4, 5)  # event times are below 2**32
_STEP_WIDTHS = tuple(range(1, 10))  # steps are below 2**63
_MAX_TIME = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class SegmentState:
    """The state of the optimizer of one segment in a dump."""

    segment: int
    """Position among the table's segments."""
    kind: str
    """The kind of the optimizer."""
    field: str
    """Its field of SingleOptimizerDump."""
    number: int | None
    """The number of that field, or None if the original has no such optimizer."""
    slots: tuple[tuple[str, int, int | None], ...]
    """Name, field number and width of each slot. An int64 has no width."""


def segment_states(config: TableConfig) -> list[SegmentState]:
    """Return the state of each segment that has an element in OptimizerDump: all but moving_average, which has no state."""
    states = []
    for i, segment in enumerate(config.segments):
        optimizer = segment.optimizer.base if isinstance(segment.optimizer, DelayCompensation) else segment.optimizer
        if optimizer.kind == "moving_average":
            continue
        name = _NAMES.get(optimizer.kind, optimizer.kind)
        found = table_dump_pb2.SingleOptimizerDump.DESCRIPTOR.fields_by_name.get(name)
        message = None if found is None else cast("Descriptor", found.message_type)
        states.append(
            SegmentState(
                segment=i,
                kind=optimizer.kind,
                field=name,
                number=None if found is None else found.number,
                slots=() if message is None else tuple(_slots(message, segment.dim)),
            )
        )
    return states


def _slots(message: Descriptor, dim: int) -> Iterator[tuple[str, int, int | None]]:
    for field in message.fields:
        if field.name == "last_update_step":  # declared by the original, but never written or read
            continue
        if field.type == FieldDescriptor.TYPE_INT64:
            yield field.name, field.number, None
        else:
            yield field.name, field.number, dim if field.is_repeated else 1


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordLayout:
    """The byte layout of records of one shape."""

    dtype: np.dtype[np.void]
    """Columns `id`, `values`, `times` and each slot by name, between bytes that are always the same."""
    template: np.ndarray
    """uint8 [size]: the constant bits."""
    mask: np.ndarray
    """uint8 [size]: which bits are constant."""
    steps: tuple[str, ...]
    """Slots that are varints."""
    floats: tuple[str, ...]
    """Slots that are runs of float32."""
    has_time: bool
    """False: records without a time, which count as written at time 0."""

    @property
    def size(self) -> int:
        """Bytes of a record."""
        return self.dtype.itemsize

    def matches(self, records: np.ndarray) -> np.ndarray:
        """Tell which of `records`, uint8 [n, size], have this shape, as bool [n]."""
        fits: np.ndarray = ((records & self.mask) == self.template).all(axis=1)
        return fits

    @classmethod
    def build(
        cls, dim: int, states: Sequence[SegmentState], *, time_width: int | None, step_widths: Sequence[int]
    ) -> RecordLayout:
        """Return the layout of records with varints of these widths, without a time if `time_width` is None."""
        record = _Message()
        record.fixed64("id", 1)
        record.floats("values", 2, dim)
        if states:
            record.message(3, _optimizer_dump(states, list(step_widths)))
        if time_width is not None:
            record.varint("times", 4, time_width)
        slots = [name for name in record.columns if "/" in name]
        return cls(
            dtype=record.dtype(),
            template=np.frombuffer(bytes(record.constant), np.uint8),
            mask=np.frombuffer(bytes(record.mask), np.uint8),
            steps=tuple(name for name in slots if record.columns[name][0].base == np.uint8),
            floats=tuple(name for name in slots if record.columns[name][0].base != np.uint8),
            has_time=time_width is not None,
        )


def _optimizer_dump(states: Sequence[SegmentState], step_widths: list[int]) -> _Message:
    dumps = _Message()
    for state in states:
        assert state.number is not None
        slots = _Message()
        for name, number, width in state.slots:
            if width is None:
                slots.varint(f"{state.segment}/{name}", number, step_widths.pop(0))
            else:
                slots.floats(f"{state.segment}/{name}", number, width)
        single = _Message()
        single.message(state.number, slots)
        dumps.message(1, single)
    return dumps


def layouts_by_size(dim: int, states: Sequence[SegmentState]) -> dict[int, list[RecordLayout]]:
    """Return the layouts that records of such a table can have, by size.

    Tables with several int64 slots would have too many, so protobuf's own parser reads them.
    """
    known = [state for state in states if state.number is not None]
    steps = sum(width is None for state in known for *_, width in state.slots)
    shapes: list[RecordLayout] = []
    for time_width in (None, *_TIME_WIDTHS):
        if len(known) == len(states) and steps <= 1:
            for widths in product(_STEP_WIDTHS, repeat=steps):
                shapes.append(RecordLayout.build(dim, known, time_width=time_width, step_widths=widths))
        if known:
            shapes.append(RecordLayout.build(dim, (), time_width=time_width, step_widths=()))
    by_size: dict[int, list[RecordLayout]] = {}
    for shape in shapes:
        by_size.setdefault(shape.size, []).append(shape)
    return by_size


def varint_widths(values: np.ndarray) -> np.ndarray:
    """Return the number of bytes of each non-negative int64 as a varint.

    Example:
        >>> varint_widths(np.array([0, 127, 128, 2**62])).tolist()
        [1, 1, 2, 9]
    """
    return 1 + np.searchsorted(1 << np.arange(7, 63, 7, dtype=np.int64), values, side="right")


class _Message:
    """The constant bytes of a message so far, and its columns."""

    def __init__(self) -> None:
        self.constant = bytearray()
        self.mask = bytearray()
        self.columns: dict[str, tuple[np.dtype[np.generic], int]] = {}

    def fixed64(self, name: str, number: int) -> None:
        self._always(_tag(number, _FIXED64))
        self._column(name, np.dtype("<i8"), bytes(8), bytes(8))

    def floats(self, name: str, number: int, count: int) -> None:
        unit, mask = _tag(number, _FIXED32) + bytes(4), b"\xff" + bytes(4)
        self._column(name, np.dtype((_FLOAT, (count,))), unit * count, mask * count)

    def varint(self, name: str, number: int, width: int) -> None:
        self._always(_tag(number, _VARINT))
        self._column(name, np.dtype(("u1", (width,))), b"\x80" * (width - 1) + b"\0", b"\x80" * width)

    def message(self, number: int, inner: _Message) -> None:
        self._always(_tag(number, _BYTES) + _varint(len(inner.constant)))
        start = len(self.constant)
        self.constant += inner.constant
        self.mask += inner.mask
        self.columns |= {name: (kind, start + offset) for name, (kind, offset) in inner.columns.items()}

    def dtype(self) -> np.dtype[np.void]:
        return np.dtype(
            {
                "names": list(self.columns),
                "formats": [kind for kind, _ in self.columns.values()],
                "offsets": [offset for _, offset in self.columns.values()],
                "itemsize": len(self.constant),
            }
        )

    def _always(self, data: bytes) -> None:
        self.constant += data
        self.mask += b"\xff" * len(data)

    def _column(self, name: str, kind: np.dtype[np.generic], constant: bytes, mask: bytes) -> None:
        self.columns[name] = (kind, len(self.constant))
        self.constant += constant
        self.mask += mask


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class EntryReader:
    """Reads the rows of one table. A record that does not fit the table is refused with its number and the reason.

    With `optimizer_state=False` only the weights are read. Rows then start with fresh optimizer state, as they also do where
    a record has none.
    """

    def __init__(self, config: TableConfig, *, optimizer_state: bool = True) -> None:
        self._config = config
        self._states = segment_states(config)
        self._layouts = layouts_by_size(config.dim, self._states)
        self._fresh = fresh_slots(config)
        self._with_state = optimizer_state and config.mode == "training"

    def read(self, records: DumpRecords) -> RowColumns:
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
        self, layout: RecordLayout, records: DumpRecords, places: np.ndarray, rows: RowColumns
    ) -> np.ndarray:
        """Read those of `places` that have this shape. Returns the others."""
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

    def _read_one(self, records: DumpRecords, place: int, rows: RowColumns) -> None:
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

    def _check_times(self, records: DumpRecords, rows: RowColumns) -> None:
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
