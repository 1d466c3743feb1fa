"""Batches to and from TorchRec's KeyedJaggedTensor. TorchRec is imported only when one is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from monolith.errors import InvalidArgumentError
from monolith.features.batch import Batch, BatchColumn, column_of, num_rows
from monolith.features.ragged import Ragged

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor

__all__ = ["from_keyed_jagged", "to_keyed_jagged"]


class _KeyedJagged(Protocol):
    """The part of a KeyedJaggedTensor that is read."""

    def keys(self) -> list[str]: ...
    def values(self) -> torch.Tensor: ...
    def offsets(self) -> torch.Tensor: ...
    def weights_or_none(self) -> torch.Tensor | None: ...


def from_keyed_jagged(keyed: _KeyedJagged) -> Batch:
    """Return one `Ragged` column per key, sharing the values. All keys must have the same number of rows.

    Example, where TorchRec is installed: `from_keyed_jagged(KeyedJaggedTensor.from_lengths_sync(keys, values, lengths))`.
    """
    if keyed.weights_or_none() is not None:
        raise InvalidArgumentError("keyed: has weights, which a column of ids cannot hold; multiply them in the model")
    keys, offsets, values = keyed.keys(), keyed.offsets().cpu().to(torch.int64), keyed.values()
    rows, rest = divmod(len(offsets) - 1, max(len(keys), 1))
    if rest:
        raise InvalidArgumentError(f"keyed: {len(offsets) - 1} rows for {len(keys)} keys, expected as many for each")
    batch: Batch = {}
    for place, key in enumerate(keys):
        splits = offsets[place * rows : (place + 1) * rows + 1]
        batch[key] = Ragged(values[splits[0] : splits[-1]], splits - splits[0])
    return batch


def to_keyed_jagged(batch: Mapping[str, BatchColumn], keys: Sequence[str]) -> KeyedJaggedTensor:
    """Return the columns `keys` of a batch, [rows], [rows, n] or ragged, as one KeyedJaggedTensor. Needs TorchRec."""
    from torchrec import KeyedJaggedTensor

    rows = num_rows(batch, keys)
    values, lengths = [], []
    for key in keys:
        column = column_of(batch, key)
        if isinstance(column, Ragged):
            values.append(column.values)
            lengths.append(column.row_lengths())
        else:
            values.append(column.reshape(-1))
            lengths.append(torch.full((rows,), column[0].numel() if rows else 0))
    return KeyedJaggedTensor(keys=list(keys), values=torch.cat(values), lengths=torch.cat(lengths).to(values[0].device))
