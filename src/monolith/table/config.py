"""What one table is: its segments, how unseen ids read, when rows expire."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from monolith import _core
from monolith.config import Config, Positive
from monolith.errors import ConfigError
from monolith.table.initializers import Initializer, RandomUniform
from monolith.table.optimizers import (
    Adagrad,
    BaseOptimizer,
    BatchSoftmax,
    DelayCompensation,
    MovingAverage,
    Optimizer,
)

__all__ = ["Bf16", "Compressor", "Expiry", "FixedR8", "Fp16", "Fp32", "OneBit", "Segment", "TableConfig", "to_core"]

# Where a field's name in the configuration differs from the core's.
_OPTIMIZER_FIELDS = {
    "initial_accumulator_value": "initial_accumulator",
    "averaging_ratio": "momentum",
    "mom_decay": "momentum",
    "ada_decay": "beta2",
    "beta": "beta1",
}


def to_core(config: TableConfig, capacity: int) -> _core.TableConfig:
    """The core's view of a table with room for `capacity` rows."""
    core = _core.TableConfig()
    core.name = config.name
    core.segments = [_segment(segment) for segment in config.segments]
    core.seed = config.seed
    core.serving = config.mode == "serving"
    core.unseen_reads_zeros = (config.unseen or ("zeros" if core.serving else "initializer")) == "zeros"
    core.skip_zero_rows = config.skip_zero_rows
    core.initial_capacity = capacity
    core.default_expiry_seconds = config.expiry.default
    core.slot_expiry_seconds = config.expiry.slots
    return core


def _segment(segment: Segment) -> _core.Segment:
    core = _core.Segment()
    core.dim = segment.dim
    core.initializer = _initializer(segment.initializer, segment.dim)
    core.optimizer = _optimizer(segment.optimizer)
    core.precision = _core.Precision[segment.precision.upper()]
    core.stochastic_rounding = segment.stochastic_rounding
    core.compressor = _compressor(segment.compressor)
    return core


def _initializer(initializer: Initializer, dim: int) -> _core.Initializer:
    kind = _core.InitializerKind
    match initializer.kind:
        case "zeros":
            return _make_initializer(kind.CONSTANT, 0.0)
        case "ones":
            return _make_initializer(kind.CONSTANT, 1.0)
        case "constant":
            return _make_initializer(kind.CONSTANT, initializer.value)
        case "batch_softmax":
            return _make_initializer(kind.CONSTANT, float(initializer.init_step_interval))
        case "random_uniform":
            return _make_initializer(kind.UNIFORM, initializer.low, initializer.high)
        case "random_normal":
            return _make_initializer(kind.NORMAL, initializer.mean, initializer.std)
        case "truncated_normal":
            return _make_initializer(kind.TRUNCATED_NORMAL, initializer.mean, initializer.std)
        case "xavier_uniform":
            bound = initializer.gain * math.sqrt(3 / dim)
            return _make_initializer(kind.UNIFORM, -bound, bound)
        case "xavier_normal":
            return _make_initializer(kind.NORMAL, 0.0, initializer.gain * math.sqrt(1 / dim))
        case "he_uniform":
            bound = math.sqrt(6 / dim)
            return _make_initializer(kind.UNIFORM, -bound, bound)
        case "he_normal":
            return _make_initializer(kind.NORMAL, 0.0, math.sqrt(2 / dim))


def _make_initializer(kind: _core.InitializerKind, a: float, b: float = 0.0) -> _core.Initializer:
    core = _core.Initializer()
    core.kind, core.a, core.b = kind, a, b
    return core


def _optimizer(optimizer: Optimizer) -> _core.Optimizer:
    if isinstance(optimizer, DelayCompensation):
        core = _optimizer(optimizer.base)
        core.delay_compensation = optimizer.lambda_
        return core
    core = _core.Optimizer()
    core.kind = _core.OptimizerKind[optimizer.kind.upper()]
    for field in type(optimizer).model_fields:
        if field not in ("kind", "learning_rate"):
            setattr(core, _OPTIMIZER_FIELDS.get(field, field), getattr(optimizer, field))
    return core


def _compressor(compressor: Compressor) -> _core.Compressor:
    core = _core.Compressor()
    core.kind = _core.CompressorKind[compressor.kind.upper()]
    if compressor.kind == "fixed_r8":
        core.range = compressor.range
    if isinstance(compressor, OneBit):
        core.step_size = compressor.step_size
        core.init_scale = compressor.init_scale
        core.max_scale = compressor.max_scale
        core.amplitude = compressor.amplitude
    return core


class Fp32(Config):
    """Read and serve the stored value unchanged. 4 bytes per dim when serving."""

    kind: Literal["fp32"] = "fp32"


class Fp16(Config):
    """IEEE half precision when serving, 2 bytes per dim. No effect on reads while training."""

    kind: Literal["fp16"] = "fp16"


class Bf16(Config):
    """bfloat16 when serving, 2 bytes per dim. No effect on reads while training."""

    kind: Literal["bf16"] = "bf16"


class FixedR8(Config):
    """8-bit fixed point in [-range, range). Training reads are quantised too, and gradients pass straight through."""

    kind: Literal["fixed_r8"] = "fixed_r8"
    range: Positive = 1.0
    """Values at or beyond ±range are clamped to the nearest code."""


class OneBit(Config):
    """HashNet: training reads amplitude * tanh(scale * w) with a growing scale, serving keeps only the sign.

    Whenever a batch with step % step_size == 0 is applied, scale = min(max_scale, init_scale * sqrt(1 + 0.005 * step)).
    """

    kind: Literal["one_bit"] = "one_bit"
    step_size: Annotated[int, Field(gt=0, lt=2**63)] = 200
    init_scale: Positive = 1.0
    max_scale: Positive = 10000.0
    amplitude: Positive = 0.05


Compressor = Annotated[Fp32 | Fp16 | Bf16 | FixedR8 | OneBit, Field(discriminator="kind")]
"""Any of the compressors above."""


def _base(optimizer: Optimizer) -> BaseOptimizer:
    return optimizer.base if isinstance(optimizer, DelayCompensation) else optimizer


class Segment(Config):
    """A run of consecutive dims of a row with one initializer, optimizer, precision and compressor.

    Example:
        >>> from monolith import Segment
        >>> from monolith.table import Adagrad
        >>> Segment(dim=16, optimizer=Adagrad(learning_rate=0.05)).dim
        16
    """

    config_group: ClassVar[str] = "table"

    dim: Annotated[int, Field(gt=0, le=65536)]
    """Number of elements."""
    initializer: Initializer = RandomUniform()
    """Value of an element before its first update."""
    optimizer: Optimizer = Adagrad()
    """How gradients change the segment."""
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    """How weights are stored while training. Optimizer state is always fp32."""
    stochastic_rounding: bool = True
    """For fp16 and bf16 weights: round up or down with probability by distance, so that small updates are not lost."""
    compressor: Compressor = Fp32()
    """How the value is read while training and stored when serving."""

    @model_validator(mode="after")
    def _fits(self) -> Segment:
        if isinstance(_base(self.optimizer), BatchSoftmax) and self.dim != 1:
            raise ValueError(f"the batch_softmax optimizer keeps one number per id: dim must be 1, not {self.dim}")
        return self

    @property
    def learning_rate(self) -> float:
        """The learning rate used when a call names none."""
        optimizer = _base(self.optimizer)
        return 0.0 if isinstance(optimizer, MovingAverage) else optimizer.learning_rate


_Seconds = Annotated[int, Field(ge=0, lt=2**63)]


class Expiry(Config):
    """How long a row lives after its last update, by feature slot (bits 48..62 of the id), in event time.

    Example:
        >>> from monolith.table import Expiry
        >>> Expiry.days(default=30, slots={7: 1}).slots
        {7: 86400}
    """

    default: _Seconds = 36500 * 86400
    """Seconds for slots not named. 0 expires at the next `evict`."""
    slots: dict[Annotated[int, Field(ge=0, lt=32768)], _Seconds] = {}
    """Seconds per slot."""

    @classmethod
    def days(cls, *, default: float = 36500, slots: dict[int, float] | None = None) -> Expiry:
        """Build from days instead of seconds."""
        try:
            by_slot = {slot: round(days * 86400) for slot, days in (slots or {}).items()}
            by_default = round(default * 86400)
        except (OverflowError, TypeError, ValueError):
            raise ConfigError(f"Expiry.days: expected finite numbers of days, got {default!r} and {slots!r}") from None
        return cls(default=by_default, slots=by_slot)


class TableConfig(Config):
    """Everything that defines a table. Two tables with equal configs initialise every id to the same values.

    Example:
        >>> from monolith import Segment, TableConfig
        >>> from monolith.table import Adagrad, Zeros
        >>> config = TableConfig(name="item", segments=(Segment(dim=1, initializer=Zeros()), Segment(dim=16)))
        >>> config.dim
        17
    """

    config_group: ClassVar[str] = "table"

    name: Annotated[str, Field(min_length=1, max_length=255)]
    """Identifies the table in files and logs, and is part of what an id's initial value depends on."""
    segments: Annotated[tuple[Segment, ...], Field(min_length=1, max_length=64)]
    """The parts of a row, in order."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """Changes every initial value. Stored in the table file."""
    mode: Literal["training", "serving"] = "training"
    """Serving tables hold compressed values without optimizer state and refuse gradients."""
    unseen: Literal["initializer", "zeros"] | None = None
    """What an id without a row reads. None means the initializer while training and zeros when serving."""
    initial_capacity: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Rows that are expected: refused at once if the system would not give memory for them."""
    expiry: Expiry = Expiry()
    """When `evict` removes a row."""
    skip_zero_rows: bool = False
    """Serving only: assigning an all-zero value erases the id instead of storing it."""

    @model_validator(mode="after")
    def _consistent(self) -> TableConfig:
        if self.skip_zero_rows and self.mode != "serving":
            raise ValueError("skip_zero_rows needs mode='serving': a training row must keep its optimizer state")
        if self.dim > 65536:
            raise ValueError(f"the dims of all segments add up to {self.dim}; the limit is 65536")
        return self

    @property
    def dim(self) -> int:
        """Elements of a whole row."""
        return sum(segment.dim for segment in self.segments)

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The default learning rate of each segment."""
        return tuple(segment.learning_rate for segment in self.segments)

    @property
    def needs_snapshot(self) -> bool:
        """Whether a gradient must come with the values it was computed at: some segment has `DelayCompensation`."""
        return any(segment.optimizer.kind == "delay_compensation" for segment in self.segments)
