"""`Replica`: one version of a model that answers requests, and `Lag`: how far it is behind training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from monolith.serve.manifest import Signature
from monolith.serve.predictor import Predictor

if TYPE_CHECKING:
    from monolith.table import TableStats

__all__ = ["Lag", "ModelFollower", "Replica"]


@dataclass(frozen=True, kw_only=True)
class Lag:
    """How far the rows and weights of a replica are behind those of the run that it follows."""

    seconds: float
    """Age of its state: everything that was trained before that is applied. Measured without comparing two clocks."""
    step: int
    """Global step of the newest changes applied."""
    event_time: int
    """Newest event time applied, seconds since 1970. 0 if the run knows none."""
    sequence: int
    """Number of the newest changes applied, of the writer that is furthest behind."""
    positions: Mapping[str, int] = field(default_factory=dict)
    """The number of the newest changes applied, by writer: a run, or each of its servers or ranks."""
    connected: bool
    """Whether all writers answer. If not, `seconds` grows."""
    held: str = ""
    """The moment that an operator has gone back to, as step=N. Empty while the run is followed."""
    missing: str = ""
    """Why the last changes of a run that does not answer may be missing: what it has saved cannot be read. Empty if it can."""


class ModelFollower(Protocol):
    """Keeps the tables and weights of a predictor up to date."""

    def lag(self) -> Lag:
        """Return how far it is behind."""

    def close(self) -> None:
        """Stop following. The predictor keeps what it has."""


class Replica:
    """Predicts with one version of one model. Thread-safe.

    Args:
        name: Name of the model.
        predictor: A loaded export.
        follower: Keeps the predictor up to date. None if it stays as it was exported.
        on_close: Called after the last use, to release what belongs to the replica.

    Example:
        >>> from monolith.serve import load
        >>> replica = Replica("clicks", load("exported_models"))  # doctest: +SKIP
        >>> replica.predict({"user": [3], "item": [4]})["ctr"]  # doctest: +SKIP
        tensor([0.0312])
    """

    def __init__(
        self,
        name: str,
        predictor: Predictor,
        *,
        follower: ModelFollower | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.predictor = predictor
        self._follower = follower
        self._on_close = on_close

    @property
    def version(self) -> int:
        """Number of the export."""
        return self.predictor.signature.version

    @property
    def signature(self) -> Signature:
        """Columns it needs and predictions it makes."""
        return self.predictor.signature

    def predict(self, batch: Mapping[str, object]) -> dict[str, Tensor]:
        """Predict by head: [rows], or [rows, classes]."""
        return self.predictor.predict(batch)

    def lag(self) -> Lag | None:
        """Return how far it is behind the run that it follows. None if it does not follow one."""
        return None if self._follower is None else self._follower.lag()

    @property
    def follower(self) -> ModelFollower | None:
        """What keeps it up to date. None if it stays as it was exported."""
        return self._follower

    def stats(self) -> dict[str, TableStats]:
        """Return the size of every table."""
        return {name: stats for store in self.predictor.stores.values() for name, stats in store.stats().items()}

    def close(self) -> None:
        """Stop following and release memory. Calling it twice is harmless."""
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def __repr__(self) -> str:
        return f"Replica({self.name!r}, version={self.version}, follows={self._follower is not None})"
