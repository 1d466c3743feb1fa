"""`top_k`: one user and many items, without repeating the user's columns in the request."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from monolith.errors import InvalidArgumentError
from monolith.features import Ragged
from monolith.features.batch import BatchColumn

__all__ = ["broadcast_context", "top_rows"]

_MAX_ELEMENTS = 2**26
"""Of one column after its row was repeated: half a GiB of ids."""


def broadcast_context(columns: Mapping[str, BatchColumn]) -> Mapping[str, BatchColumn]:
    """Repeat columns of one row, the context, as often as there are candidates: rows of the other columns.

    Raises:
        InvalidArgumentError: columns of candidates have different numbers of rows.

    Example:
        >>> broadcast_context({"user": torch.tensor([7]), "item": torch.tensor([1, 2])})
        {'user': tensor([7, 7]), 'item': tensor([1, 2])}
    """
    counts = {name: len(column) for name, column in columns.items()}
    candidates = {name: count for name, count in counts.items() if count != 1}
    if not candidates:
        return columns
    (first, rows), *others = candidates.items()
    for name, count in others:
        if count != rows:
            raise InvalidArgumentError(
                f"inputs[{name!r}]: expected 1 row, of the context, or {rows} as in inputs[{first!r}], got {count}"
            )
    return {name: column if counts[name] != 1 else _repeated(name, column, rows) for name, column in columns.items()}


def _repeated(name: str, column: BatchColumn, rows: int) -> BatchColumn:
    values = column.values if isinstance(column, Ragged) else column
    if values.numel() * rows > _MAX_ELEMENTS:
        raise InvalidArgumentError(
            f"inputs[{name!r}]: expected at most {_MAX_ELEMENTS:,} elements for all candidates, got {values.numel():,} x {rows:,}"
        )
    if isinstance(column, Ragged):
        return Ragged(values.repeat(rows, *(1,) * (values.ndim - 1)), torch.arange(rows + 1) * len(values))
    return column.expand(rows, *column.shape[1:]).contiguous()


def top_rows(outputs: Mapping[str, torch.Tensor], k: int, output: str | None) -> dict[str, torch.Tensor]:
    """Return the `k` rows with the highest predictions: their `indices` and `scores`, descending, ties by index.

    Args:
        outputs: Predictions by head.
        k: How many rows. All, if there are fewer. NaN counts as the lowest score.
        output: The head whose predictions are the scores. It may be left out if there is only one.

    Example:
        >>> top_rows({"ctr": torch.tensor([0.1, 0.9, 0.9])}, 2, None)
        {'indices': tensor([1, 2]), 'scores': tensor([0.9000, 0.9000])}
    """
    if k < 1:
        raise InvalidArgumentError(f"parameters['top_k']: expected a number >= 1, got {k}")
    if output is None and len(outputs) != 1:
        raise InvalidArgumentError(f"parameters['output']: expected one of {', '.join(map(repr, outputs))} for top_k")
    name = next(iter(outputs)) if output is None else output
    if name not in outputs:
        raise InvalidArgumentError(
            f"parameters['output']: expected one of {', '.join(map(repr, outputs))}, got {name!r:.80}"
        )
    scores = outputs[name]
    if scores.ndim != 1:
        raise InvalidArgumentError(
            f"parameters['output']: {name!r} has {list(scores.shape[1:])} numbers per row, top_k needs one"
        )
    order = torch.where(scores.isnan(), -torch.inf, scores).argsort(descending=True, stable=True)[:k]
    return {"indices": order, "scores": scores[order]}
