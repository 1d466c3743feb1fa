"""The bytes of an EntryDump as the original writes them, described once for reading and writing in bulk.

A record's shape depends only on the table's segments and on how many bytes its few varints take. So records of one shape are
rows of a NumPy structure: a template of the bytes that are always the same, and columns where the values lie between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import cast

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from monolith.proto import table_dump_pb2
from monolith.table.config import TableConfig
from monolith.table.optimizers import DelayCompensation

__all__ = ["RecordLayout", "SegmentState", "layouts_by_size", "segment_states", "varint_widths"]

_FLOAT = np.dtype([("tag", "u1"), ("value", "<f4")])
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_NAMES = {"rmsprop_v2": "rmspropv2"}
_TIME_WIDTHS = (1, 2, 3, 4, 5)  # event times are below 2**32
_STEP_WIDTHS = tuple(range(1, 10))  # steps are below 2**63


@dataclass(frozen=True, kw_only=True)
class SegmentState:
    """What the dump keeps for the optimizer of one segment."""

    segment: int
    """Position among the table's segments."""
    kind: str
    """The optimizer, in our words."""
    field: str
    """Its field of SingleOptimizerDump."""
    number: int | None
    """The number of that field; None if the original has no such optimizer."""
    slots: tuple[tuple[str, int, int | None], ...]
    """Name, field number and width of each slot; no width for an int64."""


def segment_states(config: TableConfig) -> list[SegmentState]:
    """One per segment with an element in OptimizerDump: all but moving_average, which has no state and writes none."""
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
        if field.name == "last_update_step":  # declared by the original, written and read by nobody
            continue
        if field.type == FieldDescriptor.TYPE_INT64:
            yield field.name, field.number, None
        else:
            yield field.name, field.number, dim if field.is_repeated else 1


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordLayout:
    """Where everything lies in records of one shape."""

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
        """Which of `records`, uint8 [n, size], have this shape: bool [n]."""
        fits: np.ndarray = ((records & self.mask) == self.template).all(axis=1)
        return fits

    @classmethod
    def build(
        cls, dim: int, states: Sequence[SegmentState], *, time_width: int | None, step_widths: Sequence[int]
    ) -> RecordLayout:
        """The shape of records with varints of these widths; no time if `time_width` is None."""
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
    """Every shape that records of such a table take, by their size, without those that nobody writes.

    Tables with several int64 slots have too many; theirs are left to protobuf's own parser.
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
    """How many bytes each non-negative int64 takes as a varint.

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
