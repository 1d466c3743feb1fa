"""Balancing the losses of several tasks by the size of the gradients they send into shared parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from monolith.errors import InvalidArgumentError
from monolith.nn.checks import require_number

__all__ = ["GradNorm", "GradNormLosses"]


class GradNormLosses(NamedTuple):
    """Both are to be added up and minimised.

    Example:
        >>> GradNormLosses(torch.tensor(0.1), torch.tensor(2.0)).weighted_loss
        tensor(2.)
    """

    gnorm_loss: torch.Tensor
    """Trains the weights of the tasks only."""
    weighted_loss: torch.Tensor
    """Trains the model only."""


class GradNorm(nn.Module):
    """Task weights w = softmax(v), v starting at 0, trained until all tasks pull equally at the shared parameters.

    g_i = ||d loss_i / d shared|| (a constant), a = sum_i w_i g_i / n;
    gnorm_loss = scale * sum_i |w_i g_i - a|^loss_pow, each term divided by a + eps first if relative_diff;
    weighted_loss = sum_i w_i loss_i, w a constant.

    Args:
        loss_names: one per task.
        scale: of gnorm_loss.
        loss_pow: its power.
        relative_diff: compare relative to the mean, so that the scale of the losses does not matter.
        eps: keeps the relative form finite.

    Example:
        >>> shared = torch.tensor([1.0], requires_grad=True)
        >>> losses = {"click": (3 * shared).sum(), "buy": shared.sum()}
        >>> balance = GradNorm(["click", "buy"])
        >>> gnorm_loss, weighted_loss = balance(losses, shared)
        >>> gnorm_loss.item(), weighted_loss.item()
        (0.5, 2.0)
    """

    def __init__(
        self,
        loss_names: Sequence[str],
        *,
        scale: float = 1.0,
        loss_pow: float = 2.0,
        relative_diff: bool = False,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        if isinstance(loss_names, str) or not loss_names or len(set(loss_names)) != len(loss_names):
            raise InvalidArgumentError(
                f"GradNorm.loss_names: expected different names, one per task, got {loss_names!r}"
            )
        require_number("GradNorm.loss_pow", loss_pow, "a number >= 1", holds=loss_pow >= 1)
        require_number("GradNorm.eps", eps, "a number > 0", holds=eps > 0)
        self.loss_names = tuple(loss_names)
        self.scale, self.loss_pow, self.relative_diff, self.eps = scale, loss_pow, relative_diff, eps
        self.logits = nn.Parameter(torch.zeros(len(loss_names)))

    def weights(self) -> torch.Tensor:
        """w, [n], summing to 1."""
        return torch.softmax(self.logits, dim=0)

    def forward(
        self, losses: Mapping[str, torch.Tensor], shared: torch.Tensor | Sequence[torch.Tensor]
    ) -> GradNormLosses:
        """Scalar losses by name and the shared tensor(s) they all depend on -> both losses, scalars."""
        if set(losses) != set(self.loss_names):
            raise InvalidArgumentError(f"GradNorm.losses: expected {sorted(self.loss_names)}, got {sorted(losses)}")
        tensors = [shared] if isinstance(shared, torch.Tensor) else list(shared)
        norms = torch.stack([self._gradient_norm(losses[name], tensors) for name in self.loss_names])
        weights = self.weights()
        pulls = weights * norms.to(weights.dtype)
        mean = pulls.mean()
        difference = (pulls - mean) / (mean + self.eps) if self.relative_diff else pulls - mean
        gnorm_loss = self.scale * difference.abs().pow(self.loss_pow).sum()
        values = torch.stack([losses[name] for name in self.loss_names])
        return GradNormLosses(gnorm_loss, (weights.detach() * values).sum())

    @staticmethod
    def _gradient_norm(loss: torch.Tensor, shared: list[torch.Tensor]) -> torch.Tensor:
        gradients = torch.autograd.grad(loss, shared, retain_graph=True, allow_unused=True)
        parts = [gradient.norm() for gradient in gradients if gradient is not None]
        return torch.stack(parts).norm() if parts else loss.new_zeros(())
