"""Batch normalisation over the last dimension. For layer normalisation use `torch.nn.LayerNorm(dim, eps=1e-6)`."""

from __future__ import annotations

import torch
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.nn.checks import require_number, require_positive, require_shape

__all__ = ["BatchNorm"]


class BatchNorm(nn.Module):
    """y = weight * (x - mean) / sqrt(var + eps) + bias, unit by unit of the last dimension: x [*, num_features] -> the same.

    In training mean and (biased) variance are those of the batch, over all dimensions but the last; in evaluation the running
    ones, which training moves by running += momentum * (batch - running), as `nn.BatchNorm1d` does.

    Args:
        num_features: size of the last dimension.
        eps: added to the variance.
        momentum: share of the new batch in the running statistics (torch's convention; 0.01 here is 0.99 in Keras's).
        affine: whether there are weight and bias.
        renorm: batch renormalisation: in training too the value is that of the running statistics, while the gradient is that
            of the batch statistics. Training and serving then compute the same function, which small batches need.
        global_dist_momentum: share of the running statistics in those used in training; 0 is batch normalisation, 1 uses the
            running ones only.
        stop_grad_of_var_mean: treat the batch statistics as constants in the backward pass.

    Example:
        >>> norm = BatchNorm(1, eps=0.0)
        >>> norm(torch.tensor([[1.0], [3.0]])).flatten().tolist()
        [-1.0, 1.0]
        >>> norm.running_mean
        tensor([0.0200])
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-6,
        momentum: float = 0.01,
        affine: bool = True,
        renorm: bool = False,
        global_dist_momentum: float = 0.0,
        stop_grad_of_var_mean: bool = False,
    ) -> None:
        super().__init__()
        require_positive("BatchNorm.num_features", num_features)
        require_number("BatchNorm.eps", eps, "a number >= 0", holds=eps >= 0)
        require_number("BatchNorm.momentum", momentum, "a number in (0, 1]", holds=0 < momentum <= 1)
        share = global_dist_momentum
        require_number("BatchNorm.global_dist_momentum", share, "a number in [0, 1]", holds=0 <= share <= 1)
        if renorm and global_dist_momentum:
            raise InvalidArgumentError(
                "BatchNorm.global_dist_momentum: expected 0 with renorm=True, which already uses the running statistics, "
                f"got {global_dist_momentum!r}"
            )
        self.eps, self.momentum, self.renorm = eps, momentum, renorm
        self.global_dist_momentum, self.stop_grad_of_var_mean = global_dist_momentum, stop_grad_of_var_mean
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[*, num_features] -> [*, num_features]."""
        require_shape("BatchNorm.x", x, "*", len(self.running_mean))
        wide = x.to(self.running_mean.dtype)  # half precision has too few digits for a variance
        y = self._normalized_by_batch(wide) if self.training else self._normalized_by_running(wide)
        if self.weight is not None and self.bias is not None:
            y = y * self.weight + self.bias
        return y.to(x.dtype)

    def _normalized_by_running(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.running_mean) * (self.running_var + self.eps).rsqrt()

    def _normalized_by_batch(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        mean, var = flat.mean(0), flat.var(0, correction=0)
        if self.stop_grad_of_var_mean:
            mean, var = mean.detach(), var.detach()
        batch_mean, batch_var = mean.detach(), var.detach()
        if self.global_dist_momentum:
            mean = mean.lerp(self.running_mean.clone(), self.global_dist_momentum)
            var = var.lerp(self.running_var.clone(), self.global_dist_momentum)
        y = (x - mean) * (var + self.eps).rsqrt()
        if self.renorm:
            running_std = (self.running_var + self.eps).sqrt()
            stretch = (batch_var + self.eps).sqrt() / running_std
            shift = (batch_mean - self.running_mean) / running_std
            y = y * stretch + shift
        self.running_mean.lerp_(batch_mean, self.momentum)
        self.running_var.lerp_(batch_var, self.momentum)
        return y
