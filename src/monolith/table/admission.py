"""Admission: which ids that a table does not hold yet may enter it. No filter at all is `None`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch.autograd.function import FunctionCtx, once_differentiable

from monolith import _core
from monolith.config import Config
from monolith.durable import write_durably
from monolith.errors import InvalidArgumentError, StorageError
from monolith.table.arrays import Ids, id_array
from monolith.urls import local_path

__all__ = ["AdmissionFilter", "ProbabilisticAdmission", "SlidingAdmission", "intercept_gradient"]

Slot = Annotated[int, Field(ge=0, le=32767)]
FourBits = Annotated[int, Field(ge=0, le=15)]
Occurrences = Annotated[int, Field(ge=0, lt=2**32)]


class SlidingAdmission(Config):
    """Drop the first `threshold` occurrences of every id, counted in memory of a fixed size.

    Memory grows with use up to about `2.4 * capacity * split_num / (split_num - 1)` bytes. Ids not seen while about
    `capacity` other ids came are forgotten. The counters have 4 bits, so a threshold above 15 is refused.

    Example:
        >>> SlidingAdmission(default_threshold=3).slot_thresholds
        {}
    """

    capacity: int = Field(default=30_000_000, ge=300, le=2**40)
    """Ids remembered at the same time, about."""
    split_num: int = Field(default=7, ge=5, le=1024)
    """Generations of counters in the ring. When the newest is full, the oldest is dropped."""
    default_threshold: FourBits = 0
    """Occurrences dropped for ids of slots not named in `slot_thresholds`. 0 admits at once."""
    slot_thresholds: dict[Slot, FourBits] = {}
    """Occurrences dropped by slot (bits 48..62 of the id)."""

    @model_validator(mode="after")
    def _two_ids_per_split(self) -> Self:
        if self.capacity // (self.split_num - 1) < 2:
            raise ValueError(f"split_num {self.split_num} leaves fewer than 2 of capacity {self.capacity} to a split")
        return self


class ProbabilisticAdmission(Config):
    """Admit each occurrence by chance: no memory, and about `threshold` occurrences are needed.

    The same seed and the same calls in the same order give the same answers.

    Example:
        >>> ProbabilisticAdmission(default_threshold=10).equal_probability
        True
    """

    default_threshold: Occurrences = 0
    """Occurrences that should be needed, for ids of slots not named in `slot_thresholds`. 0 admits at once."""
    slot_thresholds: dict[Slot, Occurrences] = {}
    """The same by slot (bits 48..62 of the id)."""
    equal_probability: bool = True
    """True: 95% of ids are in after `threshold` occurrences. False: n occurrences at once are admitted with probability
    n / threshold."""
    seed: int = Field(default=0, ge=0, lt=2**64)
    """Seed of the draws."""


class AdmissionFilter:
    """Counts the occurrences of ids and decides which may enter a table. Thread-safe, and may be shared by tables.

    Ask only for ids that the table does not contain, as `EmbeddingTable` does. With a `SlidingAdmission` an update is
    dropped if and only if the id was seen fewer than `threshold` times before.

    Example:
        >>> filter = AdmissionFilter(SlidingAdmission(capacity=1000, default_threshold=2))
        >>> for _ in range(3):
        ...     filter.admit([7, 8, 7]).tolist()
        [False, False, False]
        [True, False, True]
        [True, True, True]
    """

    def __init__(self, config: SlidingAdmission | ProbabilisticAdmission) -> None:
        self.config = config
        self.core: _core.AdmissionFilter
        if isinstance(config, SlidingAdmission):
            self.core = _core.SlidingFilter(
                config.capacity, config.split_num, config.default_threshold, config.slot_thresholds
            )
        else:
            self.core = _core.ProbabilisticFilter(
                config.equal_probability, config.seed, config.default_threshold, config.slot_thresholds
            )

    def admit(self, ids: Ids, counts: Ids | None = None) -> torch.Tensor:
        """Count every id in row-major order. Returns a bool of the shape of `ids`: whether the update of the id is admitted.

        `counts`: occurrences of each id, at least 1, when duplicates were merged before. None means 1 each.
        """
        wanted = id_array(ids)
        occurrences = None if counts is None else _occurrences(counts)
        admitted = self.core.admit(wanted.reshape(-1), occurrences)
        return torch.from_numpy(admitted).reshape(wanted.shape)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to one file, which appears complete and durable or not at all.

        Example:
            >>> import tempfile
            >>> filter = AdmissionFilter(SlidingAdmission(capacity=1000, default_threshold=1))
            >>> filter.admit([7]).tolist()
            [False]
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     filter.save(folder + "/filter")
            ...     restored = AdmissionFilter(filter.config)
            ...     restored.load(folder + "/filter")
            >>> restored.admit([7]).tolist()
            [True]
        """
        try:
            write_durably(Path(local_path(path, "path")), self.core.serialize())
        except OSError as error:
            raise StorageError(f"{path}: cannot write the admission filter: {error.strerror}") from error

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the state by what `save` wrote. Thresholds may differ, the rest of the configuration may not.

        Raises `CorruptFileError`, and keeps its state, for a file that is damaged or of another kind of filter.
        """
        try:
            data = Path(local_path(path, "path")).read_bytes()
        except OSError as error:
            raise StorageError(f"{path}: cannot read the admission filter: {error.strerror}") from error
        self.core.restore(data)

    def __deepcopy__(self, memo: dict[int, object]) -> AdmissionFilter:
        copy = AdmissionFilter(self.config)
        copy.core.restore(self.core.serialize())
        return copy

    @property
    def nbytes(self) -> int:
        """Memory held now."""
        return self.core.nbytes

    @property
    def failure_count(self) -> int:
        """Ids admitted because the counters were full. Raise `capacity` if this keeps growing."""
        return self.core.failure_count if isinstance(self.core, _core.SlidingFilter) else 0

    def __repr__(self) -> str:
        return f"AdmissionFilter({self.config!r})"


def intercept_gradient(filter: AdmissionFilter | None, ids: Ids, embeddings: torch.Tensor) -> torch.Tensor:  # noqa: A002
    """Returns `embeddings` unchanged. In backward, each row counts an occurrence of its id, and those not admitted get zero.

    Shapes: ids [n], embeddings [n, ...]. The filter is asked for every row: nothing here knows what a table contains.

    Example:
        >>> filter = AdmissionFilter(SlidingAdmission(capacity=1000, default_threshold=1))
        >>> rows = torch.ones(2, 1, requires_grad=True)
        >>> intercept_gradient(filter, [5, 5], rows).sum().backward()
        >>> rows.grad.tolist()
        [[0.0], [1.0]]
    """
    if filter is None:
        return embeddings
    rows = id_array(ids).reshape(-1)
    if embeddings.ndim == 0 or embeddings.shape[0] != rows.size:
        raise InvalidArgumentError(
            f"embeddings: expected [{rows.size}, ...], one row per id, got {list(embeddings.shape)}"
        )
    out: torch.Tensor = _Intercept.apply(filter, rows, embeddings)  # type: ignore[no-untyped-call]
    return out


class _Intercept(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, admission: AdmissionFilter, ids: np.ndarray, embeddings: torch.Tensor
    ) -> torch.Tensor:
        ctx.admission, ctx.ids = admission, ids.copy()  # type: ignore[attr-defined]
        return embeddings.view_as(embeddings)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        dropped = ~ctx.admission.admit(ctx.ids).to(grad.device)  # type: ignore[attr-defined]
        # masked_fill, not a product: a dropped row is zero even if its gradient is not finite.
        return None, None, grad.masked_fill(dropped.reshape(-1, *[1] * (grad.ndim - 1)), 0.0)


def _occurrences(counts: Ids) -> np.ndarray:
    array = id_array(counts, "counts").reshape(-1)
    if array.size and not (array.min() >= 1 and array.max() < 2**32):
        wrong = int(np.flatnonzero((array < 1) | (array >= 2**32))[0])
        raise InvalidArgumentError(f"counts[{wrong}]: expected 1..{2**32 - 1} occurrences, got {array[wrong]}")
    return array.astype(np.uint32)
