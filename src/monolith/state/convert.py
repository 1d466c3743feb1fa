"""Rows of one layout as rows of another: what both have is carried over, the rest is as in a new row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from monolith.table import EmbeddingTable, Entries

__all__ = ["convert_rows"]


def convert_rows(old: EmbeddingTable, new: EmbeddingTable, segments: Sequence[int | None]) -> None:
    """Insert every row of `old` into `new`; `segments` has for each new segment the old one it continues, or None.

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
        # A new row of each id, as training would have begun it, and then the old values over it.
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
