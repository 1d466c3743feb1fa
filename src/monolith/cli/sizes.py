"""Amounts of memory, as people write them."""

from __future__ import annotations

import re

from monolith.errors import ConfigError

__all__ = ["size_in_bytes"]

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def size_in_bytes(text: str, option: str) -> int:
    """The bytes in `text`, which was given for `option`.

    Example:
        >>> size_in_bytes("8GiB", "--memory-limit"), size_in_bytes("1.5k", "--memory-limit")
        (8589934592, 1536)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ConfigError(f"{option}: expected a size as 8GiB or 500MB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])
