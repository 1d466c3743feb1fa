"""Ways a file or message can arrive wrong, reproducible by seed. Each generator yields (what was done, damaged bytes).

A reader of the damaged bytes must answer with a typed error: never a signal, never a value it was not given.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

__all__ = ["bit_flips", "scrambles", "truncations"]


def truncations(data: bytes, *, count: int | None = None, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Every proper prefix of `data`, or `count` of them drawn with `seed`.

    Example:
        >>> from monolith.testing import truncations
        >>> list(truncations(b"ab"))
        [('first 0 of 2 bytes', b''), ('first 1 of 2 bytes', b'a')]
    """
    for length in _some(len(data), count, seed):
        yield f"first {length} of {len(data)} bytes", data[:length]


def bit_flips(data: bytes, *, count: int | None = None, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """`data` with one bit inverted: every bit in turn, or `count` of them drawn with `seed`.

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
