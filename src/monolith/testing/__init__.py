"""Helpers for tests: table configurations and fault injection, for our own tests and for users'."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from monolith.table.config import Segment, TableConfig
from monolith.table.initializers import Zeros
from monolith.table.optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamom,
    Amsgrad,
    BatchSoftmax,
    DelayCompensation,
    DynamicWdAdagrad,
    Ftrl,
    GroupAdagrad,
    GroupFtrl,
    Momentum,
    MovingAverage,
    Optimizer,
    RMSprop,
    RMSpropV2,
    RowwiseAdagrad,
)

__all__ = ["bit_flips", "every_optimizer", "scrambles", "sgd_table_config", "truncations"]


def sgd_table_config(dim: int, *, name: str = "test") -> TableConfig:
    """A table that starts at zero and subtracts each gradient once, so that expected values are plain sums.

    Example:
        >>> from monolith.testing import sgd_table_config
        >>> sgd_table_config(4).learning_rates
        (1.0,)
    """
    return TableConfig(name=name, segments=(Segment(dim=dim, initializer=Zeros(), optimizer=SGD(learning_rate=1.0)),))


def every_optimizer() -> dict[str, Optimizer]:
    """One instance of every sparse optimizer under a readable name, with weight decay and variants switched on.

    Example:
        >>> from monolith.testing import every_optimizer
        >>> sorted(every_optimizer())[:3]
        ['adadelta', 'adagrad', 'adam']
    """
    return {
        "sgd": SGD(learning_rate=0.1),
        "momentum": Momentum(learning_rate=0.1, weight_decay=0.01),
        "momentum_nesterov": Momentum(learning_rate=0.1, momentum=0.7, nesterov=True, weight_decay=0.01),
        "adagrad": Adagrad(learning_rate=0.1, weight_decay=0.01),
        "dynamic_wd_adagrad_coupled": DynamicWdAdagrad(learning_rate=0.1, weight_decay=0.1),
        "dynamic_wd_adagrad_decoupled": DynamicWdAdagrad(
            learning_rate=0.1, weight_decay=0.1, decouple_weight_decay=True
        ),
        "rowwise_adagrad": RowwiseAdagrad(learning_rate=0.1, weight_decay=0.01),
        "adadelta": Adadelta(learning_rate=0.5, weight_decay=0.01),
        "adam": Adam(learning_rate=0.1, weight_decay=0.01),
        "adam_nesterov": Adam(learning_rate=0.1, nesterov=True, weight_decay=0.01),
        "amsgrad": Amsgrad(learning_rate=0.1, weight_decay=0.01),
        "adamom": Adamom(learning_rate=0.1, ada_decay=0.9, mom_decay=0.8, weight_decay=0.01),
        "rmsprop": RMSprop(learning_rate=0.1, weight_decay=0.01),
        "rmsprop_v2": RMSpropV2(learning_rate=0.1, weight_decay=0.01),
        "ftrl": Ftrl(learning_rate=0.1, beta=0.5, l1=0.05, l2=0.1),
        "group_ftrl": GroupFtrl(learning_rate=0.1, l1=0.05, l2=0.1),
        "group_adagrad": GroupAdagrad(learning_rate=0.1, beta=0.5, l2=0.05, weight_decay=0.01),
        "moving_average": MovingAverage(momentum=0.75),
        "batch_softmax": BatchSoftmax(learning_rate=0.25),
        "delay_compensation": DelayCompensation(base=Adagrad(learning_rate=0.1), lambda_=0.5),
    }


def truncations(data: bytes, *, count: int | None = None, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield every proper prefix of `data`, or `count` of them drawn with `seed`, each with a description.

    Example:
        >>> from monolith.testing import truncations
        >>> list(truncations(b"ab"))
        [('first 0 of 2 bytes', b''), ('first 1 of 2 bytes', b'a')]
    """
    for length in _some(len(data), count, seed):
        yield f"first {length} of {len(data)} bytes", data[:length]


def bit_flips(data: bytes, *, count: int | None = None, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield `data` with one bit inverted: every bit in turn, or `count` of them drawn with `seed`.

    Example:
        >>> from monolith.testing import bit_flips
        >>> len(list(bit_flips(b"ab")))
        16
    """
    for position in _some(8 * len(data), count, seed):
        byte, bit = divmod(position, 8)
        damaged = bytearray(data)
        damaged[byte] ^= 1 << bit
        yield f"bit {bit} of byte {byte} flipped", bytes(damaged)


def scrambles(data: bytes, *, count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """`data` after `count` larger accidents: a run zeroed, set, randomised, moved, removed, repeated, or appended.

    Accidents that change nothing (zeroing zeros, say) are skipped, so every yielded value differs from `data`.

    Example:
        >>> from monolith.testing import scrambles
        >>> all(damaged != b"some bytes" for _, damaged in scrambles(b"some bytes", count=50))
        True
    """
    rng = random.Random(seed)
    made = 0
    while made < count:
        begin = rng.randrange(len(data))
        end = min(len(data), begin + rng.choice([1, 2, 4, 8, 16, 64, 256, 4096]))
        run = data[begin:end]
        replacements = {
            "zeroed": bytes(len(run)),
            "set to ff": b"\xff" * len(run),
            "randomised": rng.randbytes(len(run)),
            "reversed": run[::-1],
            "removed": b"",
            "repeated": run + run,
        }
        what = rng.choice([*replacements, "appended"])
        damaged = data + run if what == "appended" else data[:begin] + replacements[what] + data[end:]
        if damaged != data:
            made += 1
            yield f"bytes {begin}..{end} {what}", damaged


def _some(size: int, count: int | None, seed: int) -> Iterable[int]:
    everything = range(size)
    return everything if count is None or count >= size else sorted(random.Random(seed).sample(everything, count))
