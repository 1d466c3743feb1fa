"""What a table knows besides its rows."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TableState"]


@dataclass(frozen=True, kw_only=True)
class TableState:
    """Saved with the rows, so that a restored table trains on to the same bits.

    Example:
        >>> import torch
        >>> from monolith import EmbeddingTable, Segment, TableConfig
        >>> config = TableConfig(name="item", segments=(Segment(dim=2),))
        >>> table, copy = EmbeddingTable(config), EmbeddingTable(config)
        >>> table.assign([1], torch.ones(1, 2), event_time=1_700_000_000)
        >>> copy.set_state(table.state())
        >>> copy.state()
        TableState(max_event_time=1700000000, updates=0, hashnet_scales=(1.0,))
    """

    max_event_time: int
    """The newest event time any write has carried, seconds."""
    updates: int
    """Gradient calls so far, modulo 2**32; stochastic rounding draws from it."""
    hashnet_scales: tuple[float, ...]
    """The scale of `OneBit` reads, one per segment."""
