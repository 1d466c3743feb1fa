"""Element-wise pooling of several tensors of one shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from monolith.errors import InvalidArgumentError

__all__ = ["AvgPooling", "MaxPooling", "SumPooling"]


class SumPooling(nn.Module):
    """y = sum_i x_i, element by element: tensors [*] of one shape -> [*]. A single tensor is returned as it is.

    Example:
        >>> SumPooling()([torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0])]).tolist()
        [4.0, 6.0]
    """

    def forward(self, xs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tensors [*] -> [*]."""
        return xs[0] if _is_single("SumPooling.xs", xs) else torch.stack(tuple(xs)).sum(0)


class AvgPooling(nn.Module):
    """y = mean_i x_i, element by element: tensors [*] of one shape -> [*]. A single tensor is returned as it is.

    Example:
        >>> AvgPooling()([torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0])]).tolist()
        [2.0, 3.0]
    """

    def forward(self, xs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tensors [*] -> [*]."""
        return xs[0] if _is_single("AvgPooling.xs", xs) else torch.stack(tuple(xs)).mean(0)


class MaxPooling(nn.Module):
    """y = max_i x_i, element by element: tensors [*] of one shape -> [*]. A single tensor is returned as it is.

    Example:
        >>> MaxPooling()([torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0])]).tolist()
        [3.0, 5.0]
    """

    def forward(self, xs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tensors [*] -> [*]."""
        return xs[0] if _is_single("MaxPooling.xs", xs) else torch.stack(tuple(xs)).amax(0)


def _is_single(where: str, xs: Sequence[torch.Tensor]) -> bool:
    if not xs:
        raise InvalidArgumentError(f"{where}: expected at least one tensor, got none")
    for index, x in enumerate(xs[1:], start=1):
        if x.shape != xs[0].shape:
            raise InvalidArgumentError(
                f"{where}[{index}]: expected the shape of the first, {list(xs[0].shape)}, got {list(x.shape)}"
            )
    return len(xs) == 1
