"""Sampled softmax over the items of the batch, for two-tower retrieval."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from monolith.nn.checks import require_number, require_shape

__all__ = ["batch_softmax_loss"]


def batch_softmax_loss(
    query: torch.Tensor,
    item: torch.Tensor,
    item_step_interval: torch.Tensor,
    r: torch.Tensor,
    *,
    normalize: bool = True,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Each query's own item against all items of the batch, corrected for how often each item is sampled; a scalar.

    s_ij = q_i · v_j / temperature + ln(max(interval_j, 1)); loss = -sum_i r_i ln softmax_j(s_i)_i. An item that comes back every
    `interval` steps is in a batch with probability 1 / interval: popular items, which are negatives of almost everybody, would
    otherwise be pushed down for their popularity.

    Args:
        query: [B, k].
        item: [B, k], row i belongs to query i.
        item_step_interval: steps between two occurrences of each item, as `monolith.table.BatchSoftmax` keeps them; [B].
        r: reward of each pair, [B].
        normalize: scale rows of both to length 1 first.
        temperature: divides the similarities.

    Example:
        >>> same = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> batch_softmax_loss(same, same, torch.ones(2), torch.ones(2))
        tensor(1.3863)
    """
    require_number("batch_softmax_loss.temperature", temperature, "a number > 0", holds=temperature > 0)
    require_shape("batch_softmax_loss.query", query, "B", "k")
    require_shape("batch_softmax_loss.item", item, *query.shape)
    if normalize:
        query, item = F.normalize(query, dim=1), F.normalize(item, dim=1)
    interval, reward = item_step_interval.flatten(), r.flatten()
    require_shape("batch_softmax_loss.item_step_interval", interval, len(query))
    require_shape("batch_softmax_loss.r", reward, len(query))
    scores = query @ item.T / temperature + interval.to(query.dtype).clamp(min=1).log()
    own = torch.arange(len(query), device=query.device)
    return (reward * F.cross_entropy(scores, own, reduction="none")).sum()
