"""Data shaped like the Criteo display advertising set, its best possible AUC, and Parquet files of batches."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch
from pydantic import Field

from monolith.config import Config, NonNegative
from monolith.data.synthetic.clicks import GeneratedSource, mix48
from monolith.errors import InvalidArgumentError
from monolith.features import Batch, BatchColumn, Ragged

if TYPE_CHECKING:
    import pyarrow

__all__ = ["CriteoLike", "CriteoLikeConfig", "best_auc", "write_parquet"]

_DENSE = 13
_FACTORS = 4


class CriteoLikeConfig(Config):
    """Sizes and signal of the data. The defaults have one million distinct ids, a label rate of 0.25 and a best AUC of 0.77."""

    seed: int = Field(default=0, ge=0)
    """Equal configs give equal data."""
    batch_size: int = Field(default=2048, ge=1)
    """Rows per batch."""
    batches: Annotated[int, Field(ge=0)] | None = None
    """Batches before the data end. None: they do not end."""
    cardinalities: tuple[Annotated[int, Field(ge=1, le=2**24)], ...] = (
        *(250_000, 200_000, 150_000, 120_000, 90_000, 60_000, 40_000, 30_000, 20_000, 12_000, 9_000, 6_000, 4_000),
        *(3_000, 2_000, 1_500, 1_000, 600, 400, 200, 130, 80, 50, 25, 10, 5),
    )
    """Distinct ids of each categorical column C1, C2 and so on. The id of rank r comes with probability ~ 1 / r."""
    bias: float = -1.3
    """Logit of an average row."""
    dense: NonNegative = 0.6
    """Standard deviation, in logits, of the numeric columns' part."""
    single: NonNegative = 0.6
    """Standard deviation, in logits, of the ids' own part."""
    pairs: NonNegative = 0.8
    """Standard deviation, in logits, of the part that pairs of ids make together."""


class CriteoLike(GeneratedSource):
    """Rows with columns `I1`..`I13` float32 [n], `C1`..`C26` int64 [n], `label` and `click_probability` float32 [n].

    The numeric columns are standard normal, as counts are after a logarithm and scaling. Each categorical column has its
    own slot (C1: slot 1, ...) of v2 feature ids. The logit is
    `bias + <a, I> + sum_c w[c] + sum_(c < d) <v[c], v[d]>` with random a, w and vectors v of 4 dimensions: a factorisation
    machine can learn all of it. `click_probability` is the true probability, for evaluation only.

    Example:
        >>> batch = next(iter(CriteoLike(CriteoLikeConfig(batch_size=4, cardinalities=(100, 10)))))
        >>> list(batch)[:2], list(batch)[-4:]
        (['I1', 'I2'], ['C1', 'C2', 'label', 'click_probability'])
        >>> [hex(id) for id in batch["C2"].tolist()]
        ['0x2a14737c2db63', '0x23d9f411c8599', '0x252278095e90b', '0x24f8cb76059d8']
    """

    def __init__(self, config: CriteoLikeConfig | None = None) -> None:
        self.config = config or CriteoLikeConfig()
        super().__init__(self.config, self.config.batches)

    def batch(self, number: int) -> Batch:
        """Return batch `number`, the same on every call and every machine."""
        config, rng = self.config, np.random.default_rng((self.config.seed, 0, number))
        size, fields = config.batch_size, len(config.cardinalities)
        dense = rng.standard_normal((_DENSE, size), dtype=np.float32)
        cardinalities = np.array(config.cardinalities)[:, None]
        # (N + 1) ** u for uniform u has rank r with probability log(1 + 1 / r) / log(N + 1), without a search.
        logs = np.log(cardinalities + 1).astype(np.float32)
        ranks = np.exp(rng.random((fields, size), dtype=np.float32) * logs).astype(np.int64) - 1
        np.minimum(ranks, cardinalities - 1, out=ranks)
        probability = 1 / (1 + np.exp(-self._logit(dense, ranks)))
        label = rng.random(size, dtype=np.float32) < probability
        columns = {f"I{i + 1}": dense[i] for i in range(_DENSE)}
        ids = mix48(ranks, slot=np.arange(1, fields + 1)[:, None])
        columns |= {f"C{c + 1}": ids[c] for c in range(fields)}
        columns |= {"label": label.astype(np.float32), "click_probability": probability}
        return {name: torch.from_numpy(column) for name, column in columns.items()}

    def _logit(self, dense: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        weights, slopes, offsets = self._weights
        single, *vector, squares = weights.take(ranks + offsets[:, None], axis=0).sum(axis=0).T
        pairs = (sum(component * component for component in vector) - squares) / 2
        return np.asarray(np.float32(self.config.bias) + slopes @ dense + single + pairs)

    @cached_property
    def _weights(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Weight, vector and squared norm of each id, float32 [ids, 1 + 4 + 1], slopes, and the first row of each column."""
        config, rng = self.config, np.random.default_rng((self.config.seed, 1))
        fields = len(config.cardinalities)
        weights = rng.standard_normal((sum(config.cardinalities), 1 + _FACTORS + 1), dtype=np.float32)
        weights[:, 0] *= config.single / fields**0.5
        count = max(fields * (fields - 1) / 2, 1)
        weights[:, 1:-1] *= (config.pairs / (count * _FACTORS) ** 0.5) ** 0.5
        weights[:, -1] = np.square(weights[:, 1:-1]).sum(axis=1)
        slopes = rng.standard_normal(_DENSE, dtype=np.float32)
        slopes *= config.dense / np.linalg.norm(slopes)
        return weights, slopes, np.cumsum((0, *config.cardinalities[:-1]))


def best_auc(probability: torch.Tensor) -> float:
    """Return the AUC of ranking rows by their true `probability` [n] of label 1, expected over the labels.

    The share of pairs (i, j), i labelled 1 and j labelled 0, in which i has the higher probability, a tie counting half:
    sum_(i != j) p_i (1 - p_j) ([p_i > p_j] + [p_i = p_j] / 2) / sum_(i != j) p_i (1 - p_j).

    Example:
        >>> round(best_auc(torch.tensor([0.1, 0.5, 0.9])), 4)
        0.9396
        >>> best_auc(torch.full((10,), 0.3))
        0.5
    """
    p = torch.sort(probability.detach().double().flatten()).values
    if len(p) < 2 or not (p[0] >= 0 and p[-1] <= 1 and p[0] < 1 and p[-1] > 0):
        raise InvalidArgumentError(
            f"probability: expected at least two numbers in [0, 1] that make both labels possible, got {probability}"
        )
    below = torch.cumsum(1 - p, 0)
    first = torch.searchsorted(p, p, right=False)
    last = torch.searchsorted(p, p, right=True)
    zero = torch.cat([torch.zeros(1, dtype=p.dtype), below])
    lower, tied = zero[first], zero[last] - zero[first] - (1 - p)
    every = p.sum() * (1 - p).sum() - (p * (1 - p)).sum()
    return float((p * (lower + tied / 2)).sum() / every)


def write_parquet(
    batches: Iterable[Mapping[str, BatchColumn]], path: str | os.PathLike[str], *, rows_per_group: int = 65_536
) -> int:
    """Write the columns of all batches to one file, in row groups of `rows_per_group` rows. Returns the number of rows.

    A tensor [n] becomes a flat column, a `Ragged` a list column.

    Example:
        >>> import tempfile, torch, pyarrow.parquet
        >>> batches = [{"label": torch.tensor([0.0, 1.0]), "ids": Ragged.from_lists([[7], [8, 9]])}]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rows = write_parquet(batches, f"{folder}/a.parquet")
        ...     pyarrow.parquet.read_table(f"{folder}/a.parquet").to_pydict()
        {'label': [0.0, 1.0], 'ids': [[7], [8, 9]]}
    """
    import pyarrow
    import pyarrow.parquet

    if rows_per_group < 1:
        raise InvalidArgumentError(f"rows_per_group: expected at least 1, got {rows_per_group}")
    writer, held, rows = None, [], 0
    try:
        for batch in batches:
            table = pyarrow.table({name: _column(name, values) for name, values in batch.items()})
            writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
            held.append(table)
            rows += table.num_rows
            if sum(part.num_rows for part in held) >= rows_per_group:
                joined = pyarrow.concat_tables(held)
                full = joined.num_rows // rows_per_group * rows_per_group
                writer.write_table(joined.slice(0, full), row_group_size=rows_per_group)
                held = [joined.slice(full)]
        if writer is None:
            raise InvalidArgumentError("batches: expected at least one batch, got none; a file needs its columns")
        if held[0].num_rows or len(held) > 1:
            writer.write_table(pyarrow.concat_tables(held))
    finally:
        if writer is not None:
            writer.close()
    return rows


def _column(name: str, values: BatchColumn) -> pyarrow.Array:
    import pyarrow

    if isinstance(values, Ragged):
        return pyarrow.LargeListArray.from_arrays(values.offsets.numpy(), values.values.numpy())
    if values.ndim != 1:
        raise InvalidArgumentError(f"{name}: expected a column [n] or a Ragged, got shape {list(values.shape)}")
    return pyarrow.array(values.numpy())
