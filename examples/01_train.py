"""Train a click model on 64-bit ids that arrive while it trains: no vocabulary, no hashing trick, no collisions.

The click log is synthetic with a known truth, so the best possible AUC is known too. Every batch is scored before the
model learns from it, the way a recommender meets live traffic: the AUC shown is always that of unseen events.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from monolith import Adagrad, EmbeddingTable, Segment, TableConfig
from monolith.nn import Embedding, EmbeddingBag

DIM, BATCH = 16, 4096
USERS, ITEMS, CATEGORIES = 60_000, 30_000, 500


@dataclass(frozen=True)
class Batch:
    """Impressions: who saw which item, its categories (two on average, ragged), whether it was clicked."""

    user: Tensor
    item: Tensor
    categories: Tensor
    row_splits: Tensor
    clicked: Tensor
    truth: Tensor  # the probability of the click, which no model can know better

    @property
    def ids(self) -> int:
        return self.user.numel() + self.item.numel() + self.categories.numel()


class ClickLog:
    """A stream in which new users and items keep appearing. Taste is a hidden vector per user and per item."""

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        anything = torch.randint(-(2**63), 2**63 - 1, (USERS + ITEMS + CATEGORIES,), generator=self.random)
        self.user_ids, self.item_ids, self.category_ids = anything.split([USERS, ITEMS, CATEGORIES])
        self.user_taste = torch.randn(USERS, 3, generator=self.random)
        self.item_taste = torch.randn(ITEMS, 3, generator=self.random)
        self.appeal = torch.randn(CATEGORIES, generator=self.random)

    def batch(self, progress: float) -> Batch:
        """Draw the next batch; progress goes from 0 to 1 as the stream gets older and its ids more."""
        known = 0.3 + 0.7 * progress
        user = (torch.rand(BATCH, generator=self.random) ** 1.5 * known * USERS).long()
        item = (torch.rand(BATCH, generator=self.random) ** 1.5 * known * ITEMS).long()
        lengths = 1 + item % 3
        row_splits = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        bag = torch.repeat_interleave(lengths)
        category = (item[bag] * 7 + torch.arange(len(bag)) - row_splits[bag]) % CATEGORIES
        appeal = torch.zeros(BATCH).index_add_(0, bag, self.appeal[category]) / lengths
        truth = ((self.user_taste[user] * self.item_taste[item]).sum(1) + appeal - 1).sigmoid()
        clicked = torch.bernoulli(truth, generator=self.random)
        return Batch(
            self.user_ids[user], self.item_ids[item], self.category_ids[category], row_splits, clicked, truth
        )


class ClickModel(nn.Module):
    """Plain PyTorch. The embeddings live in the table, which trains itself during `backward`."""

    def __init__(self, table: EmbeddingTable) -> None:
        super().__init__()
        self.embedding = Embedding(table)
        self.pooled = EmbeddingBag(table, mode="sum")
        self.mlp = nn.Sequential(nn.Linear(4 * DIM, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: Batch) -> Tensor:
        user, item = self.embedding(torch.stack([batch.user, batch.item])).unbind()
        categories = self.pooled(batch.categories, batch.row_splits)
        return self.mlp(torch.cat([user, item, categories, user * item], dim=1)).squeeze(1)


def auc(scores: Tensor, clicked: Tensor) -> float:
    """Return the exact area under the ROC curve: the probability that a click is scored above a non-click."""
    _, place, count = scores.unique(return_inverse=True, return_counts=True)
    rank = (count.cumsum(0) - (count - 1) / 2).double()[place]  # equal scores share the mean of their ranks
    positives, negatives = clicked.sum().item(), (1 - clicked).sum().item()
    return (rank[clicked > 0].sum().item() - positives * (positives + 1) / 2) / (positives * negatives)


def main(steps: int, folder: Path) -> None:
    torch.manual_seed(0)
    console, log = Console(highlight=False), ClickLog()
    segment = Segment(dim=DIM, optimizer=Adagrad(learning_rate=0.05))
    table = EmbeddingTable(TableConfig(name="clicks", segments=(segment,)))
    model = ClickModel(table)
    dense = torch.optim.Adam(model.mlp.parameters(), lr=1e-3)

    scores, truths, clicks = [], [], []
    seconds, ids = 0.0, 0
    console.print(f"{'impressions':>12} {'rows':>9} {'AUC':>7} {'best':>7} {'ids/s':>11}")
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for step in bar.track(range(1, steps + 1), description="training"):
            batch = log.batch(step / steps)
            started = time.perf_counter()
            logits = model(batch)
            dense.zero_grad()
            binary_cross_entropy_with_logits(logits, batch.clicked).backward()  # steps the rows of these ids
            dense.step()  # steps the MLP
            seconds, ids = seconds + time.perf_counter() - started, ids + batch.ids
            scores.append(logits.detach()), truths.append(batch.truth), clicks.append(batch.clicked)
            if step % max(1, steps // 10) == 0:
                now, best = (auc(torch.cat(s), torch.cat(clicks)) for s in (scores, truths))
                console.print(f"{step * BATCH:12,} {len(table):9,} {now:7.4f} {best:7.4f} {ids / seconds:11,.0f}")
                scores, truths, clicks = [], [], []

    path = folder / "clicks.table"
    table.save(path)
    copy = ClickModel(EmbeddingTable.load(path))
    copy.mlp.load_state_dict(model.mlp.state_dict())
    unseen = log.batch(1.0)
    with torch.no_grad():
        equal = torch.equal(copy(unseen), model(unseen))
    stats = table.stats()
    console.print(f"\nAUC {now:.4f} on unseen events, {100 * (now - 0.5) / (best - 0.5):.0f}% of the way from chance to the best possible {best:.4f}")
    console.print(f"{stats.rows:,} ids, one row each, {stats.bytes / stats.rows:.0f} bytes per row (payload {8 * DIM})")
    console.print(f"{ids / seconds:,.0f} ids/s through lookup, MLP, backward and both optimizers")
    console.print(f"saved to {path} ({path.stat().st_size / 1e6:.1f} MB), reloaded: predictions {'are equal' if equal else 'DIFFER'}")
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=3000, help=f"batches of {BATCH} impressions (default 3000)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to save the table")
    arguments = parser.parse_args()
    main(arguments.steps, arguments.folder)
