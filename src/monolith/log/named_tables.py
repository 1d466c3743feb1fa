"""Tables as callers have them, as pairs of a name and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monolith.errors import InvalidArgumentError
from monolith.table import EmbeddingTable

__all__ = ["Tables", "named_tables"]

Tables = Sequence[EmbeddingTable] | Mapping[str, EmbeddingTable | Sequence[EmbeddingTable]]
"""Tables, each under its own name, or by the name they have in log and checkpoints; several under one name are its shards."""


def named_tables(tables: Tables) -> tuple[list[str], list[EmbeddingTable]]:
    """Names and tables, in order.

    Example:
        >>> from monolith.testing import sgd_table_config
        >>> user = EmbeddingTable(sgd_table_config(1, name="user"))
        >>> named_tables([user])[0], named_tables({"0/user": user})[0]
        (['user'], ['0/user'])
    """
    if isinstance(tables, Mapping):
        pairs = [(name, table) for name, found in tables.items() for table in _shards(found)]
    else:
        pairs = [(table.name, table) for table in tables]
    if len({id(table) for _, table in pairs}) != len(pairs):
        raise InvalidArgumentError("tables: expected each table once")
    return [name for name, _ in pairs], [table for _, table in pairs]


def _shards(found: EmbeddingTable | Sequence[EmbeddingTable]) -> Sequence[EmbeddingTable]:
    return [found] if isinstance(found, EmbeddingTable) else found
