"""All tables of a batch in one request: their ids lie in one array, their vectors in few, and the core is called once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, overload

import numpy as np
import torch

from monolith import _core
from monolith.table.bags import Bags, Gradient, read_only
from monolith.table.embedding_table import PoolingMode, as_event_time, as_pooling, as_step

__all__ = ["LearningRates", "PackedBags", "PackedGradients", "PackedLayout", "PackedVectors"]


class LearningRates(NamedTuple):
    """The learning rates of all tables of a request, by table and as the core takes them."""

    by_table: Sequence[tuple[float, ...]]
    """One per segment of each table."""
    flat: np.ndarray
    """float32: the same, one after the other."""

    @classmethod
    def of(cls, by_table: Sequence[tuple[float, ...]]) -> LearningRates:
        """Make both forms.

        Example:
            >>> LearningRates.of([(0.5,), (0.25, 1.0)]).flat.tolist()
            [0.5, 0.25, 1.0]
        """
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, which the core refuses
            return cls(by_table, np.asarray([rate for rates in by_table for rate in rates], dtype=np.float32))


class _Placed(NamedTuple):
    """Where the vectors of a request are written."""

    places: np.ndarray
    """int64 [tables, 4], as `_core.lookup_packed` takes them."""
    splits: list[list[int]]
    """Rows of each array of each buffer."""


class PackedLayout:
    """How the vectors of several tables lie in arrays: each table in an array of its own, or several side by side.

    Example:
        >>> layout = PackedLayout(tables=("a", "b"), dims=(2, 2), poolings=("sum", "sum"), arrays=((0, 1),))
        >>> layout.widths
        (4,)
    """

    def __init__(
        self,
        *,
        tables: Sequence[str],
        dims: Sequence[int],
        poolings: Sequence[PoolingMode],
        arrays: Sequence[Sequence[int]],
    ) -> None:
        self.tables, self.dims, self.poolings = tuple(tables), tuple(dims), tuple(poolings)
        self.arrays = tuple(map(tuple, arrays))
        """The tables of each array, by number. Those of one array have as many bags as each other."""
        self.widths = tuple(sum(dims[table] for table in array) for array in arrays)
        """Columns of each array."""
        self.modes = np.array([as_pooling(mode).value for mode in poolings], dtype=np.uint8)
        self.array_of = np.empty(len(tables), dtype=np.int64)
        """The array of each table."""
        self.column_of = np.empty(len(tables), dtype=np.int64)
        """Where its vectors begin there."""
        for number, array in enumerate(self.arrays):
            self.array_of[list(array)] = number
            self.column_of[list(array)] = np.cumsum([0, *(dims[table] for table in array[:-1])])
        # Arrays of one width are parts of one buffer: allocating a thousand takes longer than reading a batch.
        self._buffers = {width: [i for i, w in enumerate(self.widths) if w == width] for width in set(self.widths)}
        self._last: tuple[tuple[int, ...], _Placed] | None = None

    def _place(self, counts: tuple[int, ...]) -> _Placed:
        # Batches mostly have as many rows as the one before.
        if self._last is not None and self._last[0] == counts:
            return self._last[1]
        rows = np.array([counts[array[0]] for array in self.arrays], dtype=np.int64)
        buffer_of, first_row = np.empty_like(rows), np.empty_like(rows)
        for number, members in enumerate(self._buffers.values()):
            buffer_of[members] = number
            first_row[members] = np.cumsum(rows[members]) - rows[members]
        places = np.stack([counts, buffer_of[self.array_of], first_row[self.array_of], self.column_of], axis=1)
        placed = _Placed(places, [rows[members].tolist() for members in self._buffers.values()])
        self._last = (counts, placed)
        return placed

    def read(
        self, tables: Sequence[_core.Table], ids: np.ndarray, offsets: np.ndarray | None, counts: tuple[int, ...]
    ) -> list[torch.Tensor]:
        """Look up the bags of all tables. Returns the arrays, float32 [bags, width]."""
        placed = self._place(counts)
        buffers = [
            torch.empty(sum(rows), width, dtype=torch.float32, device="cpu")
            for width, rows in zip(self._buffers, placed.splits, strict=True)
        ]
        _core.lookup_packed(tables, self.modes, ids, offsets, placed.places, [buffer.numpy() for buffer in buffers])
        # "Unsafe": torch does not know that they share memory, so each may be changed in place as if it was alone.
        parts = [
            [buffer] if len(rows) == 1 else torch.unsafe_split_with_sizes(buffer, rows)
            for buffer, rows in zip(buffers, placed.splits, strict=True)
        ]
        if len(parts) == 1:
            return list(parts[0])
        arrays: dict[int, torch.Tensor] = {}
        for members, split in zip(self._buffers.values(), parts, strict=True):
            arrays.update(zip(members, split, strict=True))
        return [arrays[number] for number in range(len(self.arrays))]

    def pack(self, vectors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the arrays, given the vectors of each table."""
        if isinstance(vectors, PackedVectors):
            return vectors.arrays
        return [
            vectors[array[0]] if len(array) == 1 else torch.cat([vectors[table] for table in array], dim=1)
            for array in self.arrays
        ]


class PackedBags(Sequence[Bags]):
    """The bags of several tables, those of the first table first, in one array of ids. It is a sequence of `Bags`, one per table.

    Example:
        >>> layout = PackedLayout(tables=("a", "b"), dims=(2, 2), poolings=("sum", "sum"), arrays=((0,), (1,)))
        >>> packed = PackedBags(layout, ids=np.array([5, 6, 7]), offsets=np.array([0, 2, 3]), counts=(1, 1))
        >>> packed[1].table, packed[1].ids.tolist(), packed[1].offsets.tolist()
        ('b', [7], [0, 1])
    """

    def __init__(
        self, layout: PackedLayout, *, ids: np.ndarray, offsets: np.ndarray | None, counts: tuple[int, ...]
    ) -> None:
        self.layout = layout
        self.ids = read_only(ids)
        """int64 [n]."""
        self.offsets = None if offsets is None else read_only(offsets)
        """int64 [bags of all tables + 1]: which ids are in which bag. None: each id is a bag of its own."""
        self.counts = counts
        """Bags of each table."""
        self._bags: list[Bags] | None = None

    def lookup(self, tables: Sequence[_core.Table]) -> PackedVectors:
        """Read from `tables`, in the order of the layout."""
        return PackedVectors(self.layout, self.layout.read(tables, self.ids, self.offsets, self.counts))

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, index: int) -> Bags: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Bags]: ...
    def __getitem__(self, index: int | slice) -> Bags | Sequence[Bags]:
        # The same objects every time: a store on servers keeps how it has split them.
        if self._bags is None:
            self._bags = list(self._unpacked())
        return self._bags[index]

    def _unpacked(self) -> Iterable[Bags]:
        bag = 0
        for table, pooling, count in zip(self.layout.tables, self.layout.poolings, self.counts, strict=True):
            if self.offsets is None:
                ids, offsets = self.ids[bag : bag + count], np.arange(count + 1)
            else:
                offsets = self.offsets[bag : bag + count + 1]
                ids, offsets = self.ids[offsets[0] : offsets[-1]], offsets - offsets[0]
            yield Bags(table=table, ids=ids, offsets=offsets, pooling=pooling)
            bag += count


class PackedVectors(Sequence[torch.Tensor]):
    """What a lookup of `PackedBags` returned: a sequence of the vectors of each table, as views of `arrays`."""

    def __init__(self, layout: PackedLayout, arrays: list[torch.Tensor]) -> None:
        self.layout, self.arrays = layout, arrays

    def __len__(self) -> int:
        return len(self.layout.tables)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(index, slice):
            return [self[table] for table in range(len(self))[index]]
        column = int(self.layout.column_of[index])
        array: torch.Tensor = self.arrays[self.layout.array_of[index]]
        return array.narrow(1, column, self.layout.dims[index])


class PackedGradients(Sequence[Gradient]):
    """The gradients of what a lookup of `bags` returned. It is a sequence of a `Gradient` for each table that has one."""

    def __init__(
        self,
        bags: PackedBags,
        arrays: Sequence[torch.Tensor | None],
        *,
        learning_rates: LearningRates | None = None,
        snapshots: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.bags = bags
        self.arrays = arrays
        """float32 [bags, width] for each array of the layout, None if it has no gradient."""
        self.learning_rates = learning_rates
        """None takes those of the tables."""
        self.snapshots = snapshots or {}
        """By table: float32 [n, dim], what its ids were when they were looked up. For tables with `DelayCompensation`."""
        self._gradients: list[Gradient] | None = None

    def with_rates(self, learning_rates: LearningRates) -> PackedGradients:
        """Return the same gradients, to be applied with `learning_rates`."""
        return PackedGradients(self.bags, self.arrays, learning_rates=learning_rates, snapshots=self.snapshots)

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor], *, by_table: bool) -> PackedGradients:
        """Return the gradients after `change`, which is called for each array, or for each table with `by_table`."""
        arrays = [
            None if array is None else self._changed(array, n, change, by_table) for n, array in enumerate(self.arrays)
        ]
        return PackedGradients(self.bags, arrays, learning_rates=self.learning_rates, snapshots=self.snapshots)

    def _changed(
        self, array: torch.Tensor, number: int, change: Callable[[torch.Tensor], torch.Tensor], by_table: bool
    ) -> torch.Tensor:
        tables = self.bags.layout.arrays[number]
        if not by_table or len(tables) == 1:
            return change(array.contiguous())
        parts = torch.split(array, [self.bags.layout.dims[table] for table in tables], dim=1)
        return torch.cat([change(part.contiguous()) for part in parts], dim=1)

    def apply(self, tables: Sequence[_core.Table], learning_rates: np.ndarray, *, step: int, event_time: int) -> None:
        """Step `tables`, in the order of the layout. On an error nothing has changed."""
        layout, bags = self.bags.layout, self.bags
        present = [array for array in self.arrays if array is not None]
        number_of = np.cumsum([array is not None for array in self.arrays]) - 1
        number_of[[array is None for array in self.arrays]] = -1
        places = np.zeros((len(tables), 4), dtype=np.int64)
        places[:, 0], places[:, 1], places[:, 3] = bags.counts, number_of[layout.array_of], layout.column_of
        grads = [array.numpy() for array in present]
        when = (as_step(step), as_event_time(event_time))
        _core.apply_packed(tables, layout.modes, bags.ids, bags.offsets, places, grads, learning_rates, *when)

    def __len__(self) -> int:
        return sum(len(tables) for tables, a in zip(self.bags.layout.arrays, self.arrays, strict=True) if a is not None)

    @overload
    def __getitem__(self, index: int) -> Gradient: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Gradient]: ...
    def __getitem__(self, index: int | slice) -> Gradient | Sequence[Gradient]:
        if self._gradients is None:
            self._gradients = list(self._unpacked())
        return self._gradients[index]

    def _unpacked(self) -> Iterable[Gradient]:
        layout = self.bags.layout
        for number, bags in enumerate(self.bags):
            array = self.arrays[layout.array_of[number]]
            if array is not None:
                yield Gradient(
                    bags=bags,
                    values=array.narrow(1, int(layout.column_of[number]), layout.dims[number]).contiguous(),
                    learning_rates=None if self.learning_rates is None else self.learning_rates.by_table[number],
                    snapshot=self.snapshots.get(bags.table),
                )
