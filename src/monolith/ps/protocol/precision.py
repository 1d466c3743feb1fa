"""Rows and gradients in the precision they travel in. Only the wire is narrow: tables and models compute in float32."""

from __future__ import annotations

import numpy as np
import torch

from monolith.errors import ProtocolError
from monolith.ps.protocol.messages import Wire
from monolith.transport.frames import BFLOAT16

__all__ = ["WIRE_DTYPES", "narrow", "narrowed", "widen"]

WIRE_DTYPES: dict[Wire, np.dtype] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": BFLOAT16,
}
"""The dtype of an array in a frame, by the name of the precision."""


def narrow(rows: np.ndarray, out: np.ndarray) -> None:
    """Write float32 `rows` into `out`, an array of a frame. Rounds to nearest, ties to even."""
    if out.dtype == BFLOAT16:
        _bfloat16(out).copy_(torch.from_numpy(rows))
    else:
        # What float16 cannot hold becomes infinite, as it does in torch.
        with np.errstate(over="ignore"):
            out[...] = rows


def narrowed(rows: np.ndarray, wire: Wire) -> np.ndarray:
    """Return float32 `rows` in the precision of `wire`, rounded as by `narrow`. Shares memory if nothing is rounded."""
    if wire == "float32":
        return rows
    out = np.empty(rows.shape, dtype=WIRE_DTYPES[wire])
    narrow(rows, out)
    return out


def widen(rows: np.ndarray, name: str) -> np.ndarray:
    """Return `rows` of a frame as float32. Shares memory if they are float32 already."""
    if rows.dtype == np.float32:
        return rows
    if rows.dtype == BFLOAT16:
        # The high half of a float32.
        return (rows.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
    if rows.dtype == np.float16:
        return rows.astype(np.float32)
    raise ProtocolError(f"{name}: expected {', '.join(WIRE_DTYPES)}, got {rows.dtype}")


def _bfloat16(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view("<i2")).view(torch.bfloat16)
