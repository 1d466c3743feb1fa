"""The embedding table as a dict of NumPy arrays: slow, obvious, and written from the formulas alone.

Property tests run the same calls on the real table and on `DictTable` and compare every row, optimizer slot and
time. It shares no code with the core: a formula is a line of NumPy in float32, a table is a dict, a bag is a slice.
Initial values are the one thing it cannot know, so they are injected: `initial(id)` returns the stored float32 row
of a new id.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from monolith.table.config import Segment, TableConfig

Floats = npt.NDArray[np.float32]
Ids = Iterable[int] | npt.NDArray[np.int64]
Slots = dict[str, npt.NDArray[Any]]

real: type[np.floating[Any]] = np.float32
"""The type all arithmetic is done in. Set to float64 only to measure how well conditioned a test's numbers are."""


# --------------------------------------------------------------------------------------------------------------------
# Optimizers. `h` holds the hyperparameters as float32 scalars; `s` the slots, changed in place; the new w is returned.


def _decayed(h: SimpleNamespace, w: Floats, g: Floats) -> Floats:
    return g + h.weight_decay * w


def _sgd(h: SimpleNamespace, w: Floats, s: Slots, g: Floats, lr: np.float32, step: int) -> Floats:
    return w - lr * g


def _momentum(h: SimpleNamespace, w: Floats, s: Slots, g: Floats, lr: np.float32, step: int) -> Floats:
    before = s["n"]
    after = h.momentum * before - lr * _decayed(h, w, g)
    s["n"] = after
    return w + (1 + h.momentum) * after - h.momentum * before if h.nesterov else w + after


def _adagrad(h: SimpleNamespace, w: Floats, s: Slots, g: Floats, lr: np.float32, step: int) -> Floats:
    g = _decayed(h, w, g)
    s["norm"] = s["norm"] + g * g
    return w - lr * g / np.sqrt(s["norm"])


def _dynamic_wd_adagrad(h: SimpleNamespace, w: Floats, s: Slots, g: Floats, lr: np.float32, step: int) -> Floats:
    if not h.decouple_weight_decay:
        return _adagrad(h, w, s, g, lr, step)
    s["norm"] = s["norm"] + g * g
    return w - (lr * g / np.sqrt(s["norm"]) + lr * h.weight_decay * w)


def _rowwise_adagrad(h: SimpleNamespace, w: Floats, s: Slots, g: Floats, lr: np.float32, step: int) -> Floats:
    g = _decayed(h, w, g)
    s["norm"] = s["norm"] + np.mean(g * g)
    return w - lr * g / (np.sqrt(s["norm"]) + h.epsilon)


def _adadelta(h: SimpleNamespace, w: Floats, s: Slots, g: Floats, lr: np.float32, step: int) -> Floats:
    rho = h.averaging_ratio
    g = _decayed(h, w, g)
    s["accum"] = rho * s["accum"] + (1 - rho) * g * g
    update = np.sqrt(s["accum_update"] + h.epsilon) / np.sqrt(s["accum"] + h.epsilon) * g
    s["accum_update"] = rho * s["accum_update"] + (1 - rho) * update * update
    return w - lr * update


def _adam(h: SimpleNamespace, w: Floats, s: Slots, g: Floats, lr: np.float32, step: int) -> Floats:
    rate = lr * np.sqrt(1 - s["beta2_power"]) / (1 - s["beta1_power"])
    g = _decayed(h, w, g)
    s["m"] = s["m"] + (g - s["m"]) * (1 - h.beta1)
    s["v"] = s["v"] + (g * g - s["v"]) * (1 - h.beta2)
    second = s["v"]
    if "vhat" in s:
        s["vhat"] = second = np.maximum(s["vhat"], s["v"])
    numerator = (1 - h.beta1) * g + h.beta1 * s["m"] if h.nesterov else s["m"]
    s["beta1_power"] = s["beta1_power"] * h.beta1
    s["beta2_power"] = s["beta2_power"] * h.beta2
    return w - rate * numerator / (np.sqrt(second) + h.epsilon)


def _adamom(h: SimpleNamespace, w: Floats, s: Slots, g: Floats, lr: np.float32, step: int) -> Floats:
    g = _decayed(h, w, g)
    s["m"] = h.mom_decay * s["m"] + (1 - h.mom_decay) * g
    s["v"] = h.ada_decay * s["v"] + g * g
    s["c"] = h.ada_decay * s["c"] + 1
    return w - lr * s["m"] / np.sqrt(s["v"] / s["c"] + h.epsilon)


def _rmsprop(h: SimpleNamespace, w: Floats, s: Slots, g: Floats, lr: np.float32, step: int) -> Floats:
    g = _decayed(h, w, g)
    s["n"] = h.momentum * s["n"] + (1 - h.momentum) * g * g
    return w - lr * g / (np.sqrt(s["n"]) + 1)


def _rmsprop_v2(h: SimpleNamespace, w: Floats, s: Slots, g: Floats, lr: np.float32, step: int) -> Floats:
    g = _decayed(h, w, g)
    s["n"] = h.momentum * s["n"] + g * g
    return w - lr * g / (np.sqrt(s["n"]) + 1)


def _ftrl_state(w: Floats, s: Slots, g: Floats, lr: np.float32) -> None:
    norm = s["norm"] + g * g
    s["zero"] = s["zero"] + g - (np.sqrt(norm) - np.sqrt(s["norm"])) / lr * w
    s["norm"] = norm


def _ftrl(h: SimpleNamespace, w: Floats, s: Slots, g: Floats, lr: np.float32, step: int) -> Floats:
    _ftrl_state(w, s, g, lr)
    z = s["zero"]
    kept = np.abs(z) > h.l1
    divisor = np.sqrt(s["norm"]) + h.beta + h.l2 * lr
    return np.where(kept, lr * (np.sign(z) * h.l1 - z) / np.where(kept, divisor, 1), real(0))


def _group_ftrl(h: SimpleNamespace, w: Floats, s: Slots, g: Floats, lr: np.float32, step: int) -> Floats:
    _ftrl_state(w, s, g, lr)
    z = s["zero"]
    length = np.sqrt(np.sum(z * z))
    if length < h.l1 or length == 0:
        return np.zeros_like(w)
    divisor = h.beta + np.sqrt(s["norm"]) + h.l2 * lr
    # An element that never saw a gradient has z = norm = 0; with beta = l2 = 0 its quotient is 0/0, and it stays 0.
    return np.where(z == 0, real(0), lr * z * (h.l1 - length) / length / np.where(z == 0, 1, divisor))


def _group_adagrad(h: SimpleNamespace, w: Floats, s: Slots, g: Floats, lr: np.float32, step: int) -> Floats:
    g = _decayed(h, w, g)
    s["grad_square_sum"] = s["grad_square_sum"] + np.max(g * g)
    divisor = h.beta + np.sqrt(s["grad_square_sum"])
    if divisor == 0:
        return w  # no gradient but 0 yet
    rate = lr / divisor
    z = g - w / rate
    length = np.sqrt(np.sum(z * z))
    if length < h.l2 or length == 0:
        return np.zeros_like(w)
    return -rate * (length - h.l2) / length * z


def _moving_average(h: SimpleNamespace, w: Floats, s: Slots, g: Floats, lr: np.float32, step: int) -> Floats:
    return h.momentum * w + (1 - h.momentum) * g


def _batch_softmax(h: SimpleNamespace, w: Floats, s: Slots, g: Floats, lr: np.float32, step: int) -> Floats:
    interval = real(step - int(s["global_step"][0]))
    s["global_step"] = np.array([step], np.int64)
    return (1 - lr) * w + lr * interval


@dataclass(frozen=True)
class _Rule:
    step: Callable[[SimpleNamespace, Floats, Slots, Floats, np.float32, int], Floats]
    slots: dict[str, Callable[[SimpleNamespace], float]] = field(default_factory=dict)
    """Slot name -> its value in a new row."""
    scalars: frozenset[str] = frozenset()
    """The slots that hold one number per row instead of one per element."""


def _zero(h: SimpleNamespace) -> float:
    return 0.0


def _accumulator(h: SimpleNamespace) -> float:
    return float(h.initial_accumulator_value)


def _beta1(h: SimpleNamespace) -> float:
    return float(h.beta1)


def _beta2(h: SimpleNamespace) -> float:
    return float(h.beta2)


_POWERS = {"beta1_power": _beta1, "beta2_power": _beta2}
RULES: dict[str, _Rule] = {
    "sgd": _Rule(_sgd),
    "momentum": _Rule(_momentum, {"n": _zero}),
    "adagrad": _Rule(_adagrad, {"norm": _accumulator}),
    "dynamic_wd_adagrad": _Rule(_dynamic_wd_adagrad, {"norm": _accumulator}),
    "rowwise_adagrad": _Rule(_rowwise_adagrad, {"norm": _accumulator}, frozenset({"norm"})),
    "adadelta": _Rule(_adadelta, {"accum": _zero, "accum_update": _zero}),
    "adam": _Rule(_adam, {"m": _zero, "v": _zero, **_POWERS}, frozenset(_POWERS)),
    "amsgrad": _Rule(_adam, {"m": _zero, "v": _zero, "vhat": _zero, **_POWERS}, frozenset(_POWERS)),
    "adamom": _Rule(_adamom, {"m": _zero, "v": _zero, "c": _zero}, frozenset({"c"})),
    "rmsprop": _Rule(_rmsprop, {"n": _zero}),
    "rmsprop_v2": _Rule(_rmsprop_v2, {"n": _zero}),
    "ftrl": _Rule(_ftrl, {"zero": _zero, "norm": _accumulator}),
    "group_ftrl": _Rule(_group_ftrl, {"zero": _zero, "norm": _accumulator}),
    "group_adagrad": _Rule(_group_adagrad, {"grad_square_sum": _accumulator}, frozenset({"grad_square_sum"})),
    "moving_average": _Rule(_moving_average),
    "batch_softmax": _Rule(_batch_softmax, {"global_step": _zero}, frozenset({"global_step"})),
}


# --------------------------------------------------------------------------------------------------------------------
# Storage formats and read paths.


def to_fp16(x: Floats) -> Floats:
    """The nearest half-precision number, ties to even, as float32."""
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32).astype(np.float16).astype(np.float32)


def to_bf16(x: Floats) -> Floats:
    """The nearest bfloat16 number, ties to even, as float32."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.where(np.isnan(x), np.float32(np.nan), rounded.astype(np.uint32).view(np.float32))


def fixed_r8(x: Floats, value_range: float) -> Floats:
    """Round x to a multiple of range / 128, half away from zero, within 8 bits; NaN becomes 0."""
    step = np.float32(value_range) / np.float32(128)
    x = np.where(np.isnan(x), np.float32(0), x)
    code = np.trunc((x + np.where(x >= 0, step / 2, -step / 2)) / step)
    return (np.clip(code, -128, 127) * step).astype(np.float32)


class _SegmentModel:
    """One segment: how its weights are stored, read and stepped."""

    def __init__(self, segment: Segment, *, serving: bool) -> None:
        optimizer = segment.optimizer
        self.delay = 0.0
        self.compensated = optimizer.kind == "delay_compensation"
        if optimizer.kind == "delay_compensation":
            self.delay = optimizer.lambda_
            optimizer = optimizer.base
        self.segment = segment
        self.compressor = segment.compressor
        self.serving = serving
        self.rule = RULES[optimizer.kind]
        self.hyper = SimpleNamespace(
            **{name: real(np.float32(x)) if isinstance(x, float) else x for name, x in optimizer.model_dump().items()}
        )
        self.scale = self.compressor.init_scale if self.compressor.kind == "one_bit" else 0.0

    def new_slots(self) -> Slots:
        if self.serving:
            return {}
        slots: Slots = {}
        for name, first in self.rule.slots.items():
            width = 1 if name in self.rule.scalars else self.segment.dim
            slots[name] = np.full(width, first(self.hyper), np.int64 if name == "global_step" else real)
        return slots

    def store(self, x: Floats) -> Floats:
        """What the row holds after x is written: rounded by precision (training) or compressor (serving)."""
        kind = self.compressor.kind if self.serving else self.segment.precision
        if kind == "fp16":
            return to_fp16(x)
        if kind == "bf16":
            return to_bf16(x)
        if kind == "fixed_r8":
            return fixed_r8(x, self.compressor.range)
        if kind == "one_bit":
            amplitude = np.float32(self.compressor.amplitude)
            return np.where(x > 0, amplitude, -amplitude).astype(np.float32)
        return x.astype(real)

    def read(self, w: Floats) -> Floats:
        """What a lookup returns for stored weights w."""
        if self.serving:
            return w
        if self.compressor.kind == "fixed_r8":
            return fixed_r8(w, self.compressor.range)
        if self.compressor.kind == "one_bit":
            return real(self.compressor.amplitude) * np.tanh(real(self.scale) * w)
        return w

    def advance_scale(self, step: int) -> None:
        """HashNet: sharpen tanh as training goes on."""
        if self.compressor.kind == "one_bit" and step % self.compressor.step_size == 0:
            grown = self.compressor.init_scale * float(np.sqrt(1 + 0.005 * step))
            self.scale = min(self.compressor.max_scale, grown)

    def train(self, w: Floats, slots: Slots, g: Floats, lr: float, step: int, snapshot: Floats | None) -> Floats:
        g = g.astype(real)
        if self.compressor.kind == "one_bit":
            t = np.tanh(real(self.scale) * w)
            g = g * real(self.compressor.amplitude) * real(self.scale) * (1 - t * t)
        if self.compensated and snapshot is not None:
            g = g + real(self.delay) * g * g * (w - snapshot)
        return self.store(self.rule.step(self.hyper, w, slots, g, real(np.float32(lr)), step))


# --------------------------------------------------------------------------------------------------------------------
# The table.


@dataclass
class Row:
    """One id: what is stored, per segment, and when it was last written."""

    weights: list[Floats]
    slots: list[Slots]
    time: int = 0


@dataclass(frozen=True)
class Entries:
    """What `lookup_entry` returns, in NumPy."""

    ids: npt.NDArray[np.int64]
    found: npt.NDArray[np.bool_]
    values: Floats
    slots: dict[str, npt.NDArray[Any]]
    times: npt.NDArray[np.int64]


class DictTable:
    """The reference model of `monolith.EmbeddingTable`: the same calls, on NumPy arrays.

    `initial(id)` gives the float32 [dim] weights a new row is stored with.
    """

    def __init__(self, config: TableConfig, initial: Callable[[int], Floats]) -> None:
        self.config = config
        self.serving = config.mode == "serving"
        self.segments = [_SegmentModel(segment, serving=self.serving) for segment in config.segments]
        self.bounds = np.cumsum([segment.dim for segment in config.segments])[:-1].tolist()
        self.initial = initial
        self.rows: dict[int, Row] = {}
        self.newest = 0

    def copy(self) -> DictTable:
        """An independent table with the same rows: what a save and a load must give."""
        clone = copy.copy(self)
        clone.rows = copy.deepcopy(self.rows)
        clone.segments = copy.deepcopy(self.segments)
        return clone

    # Reads.

    def __len__(self) -> int:
        return len(self.rows)

    def contains(self, ids: Ids) -> npt.NDArray[np.bool_]:
        return np.array([int(id_) in self.rows for id_ in ids], np.bool_)

    def read(self, weights: Floats) -> Floats:
        """What a lookup returns for the stored weights [n, dim]: the read path of each segment's compressor."""
        parts = np.split(np.asarray(weights), self.bounds, axis=-1)
        return np.concatenate([segment.read(part) for segment, part in zip(self.segments, parts, strict=True)], axis=-1)

    def unseen(self, id_: int) -> Floats:
        """What a lookup returns for an id without a row."""
        zeros = self.config.unseen == "zeros" or (self.config.unseen is None and self.serving)
        return np.zeros(self.config.dim, real) if zeros else self.read(self.initial(id_).astype(real))

    def lookup(self, ids: Ids) -> Floats:
        found = []
        for id_ in map(int, ids):
            row = self.rows.get(id_)
            found.append(self.unseen(id_) if row is None else self.read(np.concatenate(row.weights)))
        return np.array(found, real).reshape(-1, self.config.dim)

    def lookup_pooled(self, ids: Ids, offsets: Sequence[int], mode: str = "sum") -> Floats:
        values = self.lookup(ids)
        bags = [values[begin:end].sum(axis=0) / bag_divisor(end - begin, mode) for begin, end in _bags(offsets)]
        return np.array(bags, real).reshape(-1, self.config.dim)

    def lookup_entry(self, ids: Ids) -> Entries:
        wanted = np.array([int(id_) for id_ in ids], np.int64)
        rows = [self.rows.get(int(id_)) for id_ in wanted]
        values = [np.zeros(self.config.dim, real) if row is None else np.concatenate(row.weights) for row in rows]
        slots: dict[str, npt.NDArray[Any]] = {}
        for index, segment in enumerate(self.segments):
            for name, fresh in segment.new_slots().items():
                column = [np.zeros_like(fresh) if row is None else row.slots[index][name] for row in rows]
                slots[f"{index}/{name}"] = np.array(column, fresh.dtype).reshape(-1, len(fresh))
        return Entries(
            ids=wanted,
            found=np.array([row is not None for row in rows], np.bool_),
            values=np.array(values, real).reshape(-1, self.config.dim),
            slots=slots,
            times=np.array([0 if row is None else row.time for row in rows], np.int64),
        )

    # Writes.

    def apply_gradients(
        self,
        ids: Ids,
        grads: Floats,
        *,
        learning_rates: Sequence[float] | None = None,
        step: int = 0,
        event_time: int = 0,
        duplicates: str = "sum",
        snapshot: Floats | None = None,
    ) -> None:
        for segment in self.segments:
            segment.advance_scale(step)
        rates = self.config.learning_rates if learning_rates is None else learning_rates
        updates: list[tuple[int, Floats, Floats | None]] = []
        for position, id_ in enumerate(map(int, ids)):
            at = None if snapshot is None else snapshot[position]
            updates.append((id_, grads[position].astype(real), at))
        for id_, grad, at in updates if duplicates == "sequential" else _summed(updates):
            row = self._upsert(id_, event_time)
            grad_parts = np.split(grad, self.bounds)
            at_parts = [None] * len(self.segments) if at is None else np.split(at, self.bounds)
            row.weights = [
                segment.train(w, slots, g, rate, step, a)
                for segment, w, slots, g, rate, a in zip(
                    self.segments, row.weights, row.slots, grad_parts, rates, at_parts, strict=True
                )
            ]

    def apply_pooled_gradients(
        self,
        ids: Ids,
        offsets: Sequence[int],
        grads: Floats,
        *,
        mode: str = "sum",
        learning_rates: Sequence[float] | None = None,
        step: int = 0,
        event_time: int = 0,
    ) -> None:
        each = [
            grad / bag_divisor(end - begin, mode)
            for (begin, end), grad in zip(_bags(offsets), grads, strict=True)
            for _ in range(begin, end)
        ]
        self.apply_gradients(
            ids,
            np.array(each, real).reshape(-1, self.config.dim),
            learning_rates=learning_rates,
            step=step,
            event_time=event_time,
        )

    def assign(self, ids: Ids, values: Floats, *, event_time: int = 0) -> None:
        for id_, value in zip(map(int, ids), values, strict=True):
            if self.config.skip_zero_rows and not np.any(value):
                self.rows.pop(id_, None)
                self.newest = max(self.newest, event_time)
            else:
                self._write(self._upsert(id_, event_time), value)

    def assign_add(self, ids: Ids, values: Floats, *, event_time: int = 0) -> None:
        for id_, value in zip(map(int, ids), values, strict=True):
            row = self._upsert(id_, event_time)
            self._write(row, np.concatenate(row.weights) + value.astype(real))

    def reinitialize(self, ids: Ids, *, event_time: int = 0) -> npt.NDArray[np.int32]:
        existed = []
        for id_ in map(int, ids):
            existed.append(self.rows.pop(id_, None) is not None)
            self._upsert(id_, event_time)
        return np.array(existed, np.int32)

    def erase(self, ids: Ids) -> npt.NDArray[np.bool_]:
        return np.array([self.rows.pop(int(id_), None) is not None for id_ in ids], np.bool_)

    def evict(self, *, now: int | None = None) -> int:
        clock = self.newest if now is None else now
        expired = [id_ for id_, row in self.rows.items() if clock - row.time >= self.lifetime(id_)]
        for id_ in expired:
            del self.rows[id_]
        return len(expired)

    def clear(self) -> None:
        self.rows.clear()

    def lifetime(self, id_: int) -> int:
        """Seconds the row of this id lives after its last write."""
        slot = (id_ >> 48) & 0x7FFF
        return self.config.expiry.slots.get(slot, self.config.expiry.default)

    def adopt(self, entries: Any) -> None:  # noqa: ANN401 - the table's Entries or ours
        """Take over weights and slots of rows both tables hold, so that rounding does not add up over many steps."""
        for position, id_ in enumerate(entries.ids.tolist()):
            if not bool(entries.found[position]):
                continue
            row = self.rows[id_]
            row.weights = [part.copy() for part in np.split(_numpy(entries.values[position]), self.bounds)]
            for key, column in entries.slots.items():
                index, name = key.split("/")
                row.slots[int(index)][name] = _numpy(column[position]).copy()

    def _upsert(self, id_: int, event_time: int) -> Row:
        row = self.rows.get(id_)
        if row is None:
            weights = [part.copy() for part in np.split(self.initial(id_).astype(real), self.bounds)]
            row = self.rows[id_] = Row(weights, [segment.new_slots() for segment in self.segments])
        row.time = event_time
        self.newest = max(self.newest, event_time)
        return row

    def _write(self, row: Row, value: Floats) -> None:
        parts = np.split(value, self.bounds)
        row.weights = [segment.store(part.copy()) for segment, part in zip(self.segments, parts, strict=True)]


def _numpy(values: Any) -> npt.NDArray[Any]:  # noqa: ANN401 - a tensor or an array
    return values if isinstance(values, np.ndarray) else values.numpy()


def bag_divisor(length: int, mode: str) -> np.float32:
    """What the sum over a bag of this length is divided by; 1 for an empty bag, whose sum is 0."""
    if mode == "sum" or length == 0:
        return np.float32(1)
    return np.float32(length) if mode == "mean" else np.sqrt(np.float32(length))


def _bags(offsets: Sequence[int]) -> list[tuple[int, int]]:
    return [(int(begin), int(end)) for begin, end in itertools.pairwise(offsets)]


def _summed(
    updates: list[tuple[int, Floats, Floats | None]],
) -> list[tuple[int, Floats, Floats | None]]:
    """One update per id: its gradients added in order; the snapshot of its first occurrence."""
    total: dict[int, tuple[int, Floats, Floats | None]] = {}
    for id_, grad, at in updates:
        _, before, first = total.get(id_, (id_, None, at))
        total[id_] = (id_, grad if before is None else before + grad, first)
    return list(total.values())
