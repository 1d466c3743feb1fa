"""`Feature`: what one column of ids means, and how its embeddings are made, pooled, trained and forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from monolith.config import Config
from monolith.table.config import Compressor, Fp32, Segment
from monolith.table.embedding_table import PoolingMode
from monolith.table.initializers import Initializer, RandomUniform, Zeros
from monolith.table.optimizers import Adagrad, Ftrl, Optimizer

__all__ = ["BIAS", "Feature", "FeaturePooling", "RateFunction"]

RateFunction = Callable[[int], float]
"""A learning rate as a function of the global step."""
FeaturePooling = Literal[PoolingMode, "first_n", "last_n", "none"]
"""How the embeddings of a row's ids become one entry of the batch."""

BIAS = Segment(dim=1, initializer=Zeros(), optimizer=Ftrl(initial_accumulator_value=1e-6, beta=1.0))
"""The segment that `Feature(bias=True)` puts before the others."""


class Feature(Config):
    """One column of ids, and the rows of a table that embed them.

    Give `dim`, or `segments` for parts of a row with their own initializer and optimizer, or `shared_with` for the rows of
    another feature. With n ids in a row and embeddings x, the row's entry is, by `pooling`:

    - "sum" sum(x), "mean" sum(x) / n, "sqrtn" sum(x) / sqrt(n): [rows, dim], zeros without ids
    - "first_n", "last_n": the first or last `max_length` of x, in order, padded with zeros: [rows, max_length, dim]
    - "none": all of x, as a `Ragged` [rows, (n), dim]

    Example:
        >>> from monolith.features import Feature
        >>> from monolith.table import Adagrad
        >>> item = Feature(name="item", dim=16, optimizer=Adagrad(learning_rate=0.05), bias=True)
        >>> clicks = Feature(name="clicks", shared_with="item", pooling="last_n", max_length=50)
        >>> [segment.dim for segment in item.row]
        [1, 16]
    """

    config_group: ClassVar[str] = "table"

    name: Annotated[str, Field(min_length=1, max_length=255)]
    """The column of the batch, and the name of the output."""
    slot: Annotated[int, Field(ge=0, lt=32768)] | None = None
    """None: a table of its own for the ids as they are, any int64, never colliding. A slot: ids become fids v2, and features
    with equal segments share one table, which is faster for many features. `monolith.features.to_fids` says what becomes of
    ids beyond 48 bits."""
    dim: Annotated[int, Field(gt=0, le=65536)] | None = None
    """Elements of the embedding, when it is one segment."""
    segments: tuple[Segment, ...] = ()
    """The parts of the embedding, instead of `dim`."""
    initializer: Initializer = RandomUniform()
    """With `dim`: value of an element before its first update."""
    optimizer: Optimizer = Adagrad()
    """With `dim`: how gradients change it."""
    compressor: Compressor = Fp32()
    """With `dim`: how it is read while training and stored when serving."""
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    """With `dim`: how weights are stored while training."""
    bias: bool | Segment = False
    """True or a segment of dim 1: a number per id in addition to the embedding, pooled the same way, returned as
    `<name>.bias`."""
    pooling: FeaturePooling = "sum"
    """How the ids of a row become one entry."""
    max_length: Annotated[int, Field(gt=0)] | None = None
    """Ids kept of each row. Required for "first_n" and "last_n", and for no other pooling."""
    stack: Annotated[str, Field(min_length=1)] | None = None
    """Return this feature and all others with the same stack as one tensor [rows, features, dim] of that name, in the order of
    declaration, instead of one by one, and their biases as `<stack>.bias`. Needs no copy if they are in one table."""
    shared_with: str | None = None
    """The feature whose rows this one reads and trains too: an id means the same in both columns."""
    occurrence_threshold: Annotated[int, Field(ge=0, le=15)] = 0
    """Occurrences of an id that are dropped before it gets a row."""
    expire_seconds: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Event time without an update after which `evict` removes a row. None: a hundred years."""
    learning_rate: RateFunction | tuple[RateFunction | None, ...] | None = None
    """A schedule for all segments, or one for each (the bias first). None: the optimizer's own rate."""
    table: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    """The table's name, in files and as part of what initial values depend on. None: the feature's name, or, with a slot, one
    made of dims and optimizers, as in `slots_16_adagrad`, and numbered where that is not unique."""

    @property
    def row(self) -> tuple[Segment, ...]:
        """The segments of a row, the bias first. Empty for a feature that shares another's."""
        if self.dim is None or self.shared_with is not None:
            return (*self._bias(), *self.segments)
        vector = Segment(
            dim=self.dim,
            initializer=self.initializer,
            optimizer=self.optimizer,
            precision=self.precision,
            compressor=self.compressor,
        )
        return (*self._bias(), vector)

    @property
    def pools(self) -> bool:
        """Whether a row of the batch gives one vector."""
        return self.max_length is None and self.pooling != "none"

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names under which a collection returns it: the feature or its stack, and, where it has them, bias and mask."""
        name = self.stack or self.name
        return (name, *([f"{name}.bias"] if self.bias else []), *([f"{name}.mask"] if self.max_length else []))

    @property
    def schedules(self) -> tuple[RateFunction | None, ...]:
        """One schedule or None per segment of `row`."""
        if isinstance(self.learning_rate, tuple):
            return self.learning_rate
        return (self.learning_rate,) * len(self.row)

    def _bias(self) -> tuple[Segment, ...]:
        if isinstance(self.bias, Segment):
            return (self.bias,)
        return (BIAS,) if self.bias else ()

    @model_validator(mode="after")
    def _one_kind_of_row(self) -> Feature:
        if self.shared_with is not None:
            own = [name for name in self.model_fields_set if name in _OF_THE_ROW]
            if own:
                raise ValueError(f"{', '.join(sorted(own))}: decided by the feature it is shared_with")
        elif (self.dim is None) == (not self.segments):
            raise ValueError("give either dim or segments, or shared_with another feature")
        if self.segments and self.model_fields_set & _OF_DIM:
            raise ValueError(f"{', '.join(sorted(self.model_fields_set & _OF_DIM))}: set it in each segment")
        return self

    @model_validator(mode="after")
    def _fits(self) -> Feature:
        if (self.max_length is not None) != (self.pooling in ("first_n", "last_n")):
            raise ValueError("max_length goes with pooling 'first_n' or 'last_n', and they with it")
        if self.stack is not None and self.pooling in ("first_n", "last_n", "none"):
            raise ValueError(f"stack: expected a pooled feature, not pooling {self.pooling!r}")
        if isinstance(self.bias, Segment) and self.bias.dim != 1:
            raise ValueError(f"bias: expected a segment of dim 1, not {self.bias.dim}")
        if isinstance(self.learning_rate, tuple) and len(self.learning_rate) != len(self.row):
            raise ValueError(f"learning_rate: expected {len(self.row)} schedules, one per segment")
        return self


_OF_DIM = {"initializer", "optimizer", "compressor", "precision"}
_OF_THE_ROW = {*_OF_DIM, "slot", "segments", "occurrence_threshold", "expire_seconds", "learning_rate", "table"}
