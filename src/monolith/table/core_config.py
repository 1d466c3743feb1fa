"""Translates the configuration objects into the core's plain structs."""

from __future__ import annotations

import math

from monolith import _core
from monolith.table.config import Compressor, OneBit, Segment, TableConfig
from monolith.table.initializers import Initializer
from monolith.table.optimizers import DelayCompensation, Optimizer

__all__ = ["to_core"]

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
