"""Bags of ids, which is what tables are asked for, the gradients of the answers, and pooling outside of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, overload

import numpy as np
import torch

from monolith import _core
from monolith.errors import InvalidArgumentError
from monolith.table.arrays import id_vector
from monolith.table.embedding_table import PoolingMode, as_event_time, as_pooling, as_step

__all__ = [
    "Bags",
    "Gradient",
    "LearningRates",
    "PackedBags",
    "PackedGradients",
    "PackedLayout",
    "PackedVectors",
    "join_gradients",
    "pool_rows",
    "pooling_factors",
    "read_only",
    "single_ids",
]


@dataclass(frozen=True, kw_only=True)
class Bags:
    """What is asked of one table: bag b is `ids[offsets[b]:offsets[b + 1]]`, pooled to one vector.

    The arrays are checked here, once, and are read-only from then on. Their memory must not be changed by others.

    Raises:
        InvalidArgumentError: an array is not int64 of one dimension, or `offsets` do not rise from 0 to the number of ids.
    """

    table: str
    ids: np.ndarray
    """int64 [n]."""
    offsets: np.ndarray
    """int64 [bags + 1]."""
    pooling: PoolingMode = "sum"

    def __post_init__(self) -> None:
        """Check the arrays and make them read-only."""
        ids, offsets = (
            id_vector(getattr(self, name), f"{name} of table {self.table!r}") for name in ("ids", "offsets")
        )
        try:
            _core.check_row_splits(offsets, len(ids))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"bags of table {self.table!r}: {error}") from None
        object.__setattr__(self, "ids", read_only(ids))
        object.__setattr__(self, "offsets", read_only(offsets))


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a view of `array` that cannot be written to."""
    view = array.view()
    view.setflags(write=False)
    return view


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """The gradient of what a lookup of `bags` returned."""

    bags: Bags
    values: torch.Tensor
    """float32 [bags, dim]."""
    learning_rates: tuple[float, ...] | None = None
    """One per segment. None takes those of the table."""
    snapshot: torch.Tensor | None = None
    """float32 [n, dim], what each id of `bags` was when it was looked up. For tables with `DelayCompensation`."""


def join_gradients(gradients: Sequence[Gradient]) -> list[Gradient]:
    """One gradient per table, in the order of first mention: bags behind each other, in the order given.

    Gradients of one table must pool alike and have the same learning rates: a row makes one step with their sum.

    Example:
        >>> bags = Bags(table="t", ids=np.array([7, 8]), offsets=np.array([0, 2]))
        >>> (joined,) = join_gradients([Gradient(bags=bags, values=torch.ones(1, 4))] * 2)
        >>> joined.bags.offsets.tolist(), list(joined.values.shape)
        ([0, 2, 4], [2, 4])
    """
    by_table: dict[str, list[Gradient]] = {}
    for gradient in gradients:
        by_table.setdefault(gradient.bags.table, []).append(gradient)
    return [parts[0] if len(parts) == 1 else _join(parts) for parts in by_table.values()]


def _join(parts: Sequence[Gradient]) -> Gradient:
    poolings = {part.bags.pooling for part in parts}
    if len(poolings) > 1:
        raise InvalidArgumentError(
            f"gradients of table {parts[0].bags.table!r}: expected one way of pooling, got {', '.join(sorted(poolings))}"
        )
    if any(part.learning_rates != parts[0].learning_rates for part in parts):
        rates = ", ".join(str(part.learning_rates) for part in parts)
        raise InvalidArgumentError(
            f"gradients of table {parts[0].bags.table!r}: expected one set of learning rates in a step, got {rates}; give "
            "features that share a table the same schedule"
        )
    ends = np.cumsum([0, *(len(part.bags.ids) for part in parts)])
    splits = [part.bags.offsets[1:] + end for part, end in zip(parts, ends[:-1], strict=True)]
    bags = replace(
        parts[0].bags,
        ids=np.concatenate([part.bags.ids for part in parts]),
        offsets=np.concatenate([np.zeros(1, dtype=np.int64), *splits]),
    )
    snapshots = [part.snapshot for part in parts if part.snapshot is not None]
    return Gradient(
        bags=bags,
        values=torch.cat([part.values for part in parts]),
        learning_rates=parts[0].learning_rates,
        # One that is missing is missed by the table, which says so.
        snapshot=torch.cat(snapshots) if len(snapshots) == len(parts) else None,
    )


def single_ids(table: str, ids: np.ndarray) -> Bags:
    """Return bags of one id each: their vectors are not pooled."""
    return Bags(table=table, ids=ids, offsets=np.arange(len(ids) + 1))


def pool_rows(rows: np.ndarray, places: np.ndarray, bags: Bags) -> torch.Tensor:
    """Return what a lookup of `bags` would, given the vectors of distinct ids and the index of each id of `bags` among them.

    It adds each bag in its order, as a table does, so a sum has the same bits.
    """
    pooled = np.empty((len(bags.offsets) - 1, rows.shape[1]), dtype=np.float32)
    _core.pool_places(np.ascontiguousarray(rows), places, bags.offsets, pooled)
    if bags.pooling != "sum":
        pooled *= pooling_factors(bags)
    return torch.from_numpy(pooled)


def pooling_factors(bags: Bags) -> np.ndarray:
    """Return float32 [bags, 1]: what the sum of each bag is multiplied by to pool it as a mean or by sqrtn.

    Example:
        >>> pooling_factors(Bags(table="t", ids=np.arange(4), offsets=np.array([0, 4]), pooling="mean")).tolist()
        [[0.25]]
    """
    sizes = np.maximum(np.diff(bags.offsets), 1).astype(np.float32)
    return (np.float32(1) / (sizes if bags.pooling == "mean" else np.sqrt(sizes)))[:, np.newaxis]


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

    def is_like(self, other: PackedLayout) -> bool:
        """Whether it has the same tables in the same arrays."""
        return self is other or (
            (self.tables, self.dims, self.poolings, self.arrays)
            == (other.tables, other.dims, other.poolings, other.arrays)
        )

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

    def places(self, counts: tuple[int, ...]) -> np.ndarray:
        """Return int64 [tables, 4], as `_core.lookup_packed` takes them, for `counts` bags of each table."""
        return self._place(counts).places

    def fill(
        self, counts: tuple[int, ...], write: Callable[[np.ndarray, list[np.ndarray]], None]
    ) -> list[torch.Tensor]:
        """Return the arrays, float32 [bags, width], after `write(places, buffers)` has written the vectors of all tables."""
        placed = self._place(counts)
        buffers = [
            torch.empty(sum(rows), width, dtype=torch.float32, device="cpu")
            for width, rows in zip(self._buffers, placed.splits, strict=True)
        ]
        write(placed.places, [buffer.numpy() for buffer in buffers])
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

        write = partial(_core.lookup_packed, tables, self.layout.modes, self.ids, self.offsets)
        return PackedVectors(self.layout, self.layout.fill(self.counts, write))

    @classmethod
    def of(cls, bags: Sequence[Bags], dims: Sequence[int]) -> PackedBags:
        """Pack the bags of tables with `dims`, each of them in an array of its own.

        Example:
            >>> bags = Bags(table="a", ids=np.array([5, 6]), offsets=np.array([0, 1, 2]))
            >>> PackedBags.of([bags, bags], dims=[2, 2]).offsets.tolist()
            [0, 1, 2, 3, 4]
        """
        layout = PackedLayout(
            tables=[one.table for one in bags],
            dims=dims,
            poolings=[one.pooling for one in bags],
            arrays=[(number,) for number in range(len(bags))],
        )
        starts = np.cumsum([0, *(len(one.ids) for one in bags)])
        splits = [one.offsets[1:] + start for one, start in zip(bags, starts[:-1], strict=True)]
        return cls(
            layout,
            ids=np.concatenate([np.empty(0, dtype=np.int64), *(one.ids for one in bags)]),
            offsets=np.concatenate([np.zeros(1, dtype=np.int64), *splits]),
            counts=tuple(len(one.offsets) - 1 for one in bags),
        )

    def equals(self, other: object) -> bool:
        """Whether `other` asks for the same vectors of the same tables, in the same arrays."""
        return self is other or (
            isinstance(other, PackedBags)
            and self.layout.is_like(other.layout)
            and self.counts == other.counts
            and np.array_equal(self.ids, other.ids)
            and (
                self.offsets is other.offsets
                if self.offsets is None or other.offsets is None
                else np.array_equal(self.offsets, other.offsets)
            )
        )

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

    def values(self) -> list[torch.Tensor]:
        """Return the values of each `Gradient` without the bags, which take longer to make than to clip by norm."""
        layout = self.bags.layout
        places = zip(layout.array_of.tolist(), layout.column_of.tolist(), layout.dims, strict=True)
        return [
            array.narrow(1, column, dim).contiguous()
            for number, column, dim in places
            if (array := self.arrays[number]) is not None
        ]

    def squares(self) -> np.ndarray:
        """Return the sum of squares of the values of each table, float64 [tables]. 0 for a table without a gradient."""
        found = np.zeros(len(self.bags.layout.tables))
        there = [self.arrays[number] is not None for number in self.bags.layout.array_of.tolist()]
        if any(there):
            norms = torch.stack(torch._foreach_norm(self.values()))
            found[there] = norms.double().square().cpu().numpy()
        return found

    def scaled(self, factors: Sequence[float]) -> PackedGradients:
        """Return the gradients of each table multiplied by its factor."""
        layout = self.bags.layout
        by_column = [
            torch.cat([torch.full((layout.dims[table],), factors[table]) for table in tables])
            for tables in layout.arrays
        ]
        pairs = zip(self.arrays, by_column, strict=True)
        arrays = [None if array is None else array * factor.to(array.device) for array, factor in pairs]
        return PackedGradients(self.bags, arrays, learning_rates=self.learning_rates, snapshots=self.snapshots)

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
        values = iter(self.values())
        for number, bags in enumerate(self.bags):
            if self.arrays[self.bags.layout.array_of[number]] is not None:
                yield Gradient(
                    bags=bags,
                    values=next(values),
                    learning_rates=None if self.learning_rates is None else self.learning_rates.by_table[number],
                    snapshot=self.snapshots.get(bags.table),
                )
