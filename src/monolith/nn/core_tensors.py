"""Which tensors the core can read and write, and how."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["as_array", "core_can_use"]


def core_can_use(x: torch.Tensor) -> bool:
    """Whether `x` has floats in main memory. What is traced must be made of torch's operators instead."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and type(x) in (torch.Tensor, torch.nn.Parameter)  # a subclass, a fake tensor for one, may have no memory
        and x.shape[-1] > 0
        and not torch.compiler.is_compiling()
    )


def as_array(x: torch.Tensor) -> np.ndarray:
    """`x` in one piece, as the core reads it."""
    return x.detach().contiguous().numpy()
