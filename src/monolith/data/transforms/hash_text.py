"""Columns of text as columns of ids."""

from __future__ import annotations

import numpy as np
import torch
from pydantic import Field

from monolith.config import Config
from monolith.errors import InvalidArgumentError
from monolith.features import Batch, Column, Ragged, hash_strings
from monolith.features.batch import column_of

__all__ = ["HashText"]


class HashText(Config):
    """Ids in place of text, by `monolith.features.hash_strings`: the same text is the same id in every column and run.

    One text in a row becomes int64 [rows]. Of lists of texts (`<name>.lengths` beside the bytes, as sources give nested
    columns) each list becomes a row of a `Ragged` of int64, and the lengths go. A row without a text has the empty one.

    Example:
        >>> batch = {"city": Ragged.from_lists([list(b"Bonn"), list(b"Rome"), list(b"Bonn")], dtype=torch.uint8)}
        >>> first, second, third = HashText(columns=("city",))(batch)["city"].tolist()
        >>> first == third, first == second
        (True, False)
    """

    columns: tuple[str, ...] = Field(min_length=1)
    """Columns of uint8, one text or one list of texts in each row."""

    def __call__(self, batch: Batch) -> Batch:
        """The batch transformed; the one given is not changed."""
        hashed = {name: _ids(name, batch) for name in self.columns}
        spent = {_lengths(name) for name in self.columns}
        return {**{name: column for name, column in batch.items() if name not in spent}, **hashed}


def _ids(name: str, batch: Batch) -> Column:
    text, lengths = column_of(batch, name), batch.get(_lengths(name))
    if not isinstance(text, Ragged) or text.values.dtype != torch.uint8:
        kind = "rows of one length" if not isinstance(text, Ragged) else f"Ragged of {text.values.dtype}"
        raise InvalidArgumentError(
            f"batch[{name!r}]: expected text, Ragged of uint8, got {kind}; read it as a Column with dtype='bytes'"
        )
    if isinstance(lengths, Ragged):
        ends = np.concatenate([[0], np.cumsum(lengths.values.numpy(), dtype=np.int64)])
        return Ragged(_hash(text.values, ends), lengths.offsets)
    return _hash(text.values, text.offsets.numpy())


def _hash(text: torch.Tensor, splits: np.ndarray) -> torch.Tensor:
    import pyarrow as pa

    offsets = np.ascontiguousarray(splits, dtype=np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(text.contiguous().numpy())]
    return hash_strings(pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers))


def _lengths(name: str) -> str:
    return f"{name}.lengths"
