"""Bags of ids, which is what tables are asked for, the gradients of the answers, and pooling outside of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from monolith import _core
from monolith.errors import InvalidArgumentError
from monolith.table.arrays import id_vector
from monolith.table.embedding_table import PoolingMode

__all__ = [
    "Bags",
    "Gradient",
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
