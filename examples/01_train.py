"""Train a click model on 64-bit ids that arrive while it trains: no vocabulary, no hashing trick, no collisions.

The click log is synthetic with a known truth, so the best possible AUC is known too. Every batch is scored before the
model learns from it, the way a recommender meets live traffic: the AUC shown is always that of unseen events.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from monolith import EmbeddingTable, Segment, TableConfig
from monolith.nn import Embedding, EmbeddingBag
from monolith.table import Adagrad

DIM, BATCH = 16, 4096
USERS, ITEMS, CATEGORIES = 60_000, 5_000, 500


@dataclass(frozen=True)
class Batch:
    """Impressions: who saw which item, the item's one to three categories (ragged), whether it was clicked."""

    user: Tensor
    item: Tensor
    categories: Tensor
    row_splits: Tensor
    clicked: Tensor
    truth: Tensor  # the probability of the click, which no model can know better


class ClickLog:
    """A stream in which new users and items keep appearing. Taste is a hidden vector per user and per item."""

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        ids = torch.randint(-(2**63), 2**63 - 1, (USERS + ITEMS + CATEGORIES,), generator=self.random)
        self.user_ids, self.item_ids, self.category_ids = ids.split([USERS, ITEMS, CATEGORIES])
        self.user_taste = torch.randn(USERS, 3, generator=self.random) + 0.7
        self.item_taste = torch.randn(ITEMS, 3, generator=self.random) + 0.7
        self.appeal = torch.randn(CATEGORIES, generator=self.random)

    def batch(self, age: float) -> Batch:
        """Draw the next batch. As the age of the stream goes from 0 to 1, its ids become three times as many."""
        arrived = (1 + 2 * age) / 3
        user = (torch.rand(BATCH, generator=self.random) ** 1.5 * arrived * USERS).long()
        item = (torch.rand(BATCH, generator=self.random) ** 1.5 * arrived * ITEMS).long()
        lengths = 1 + item % 3
        row_splits = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        bag = torch.repeat_interleave(lengths)
        category = (item[bag] * 7 + torch.arange(len(bag)) - row_splits[bag]) % CATEGORIES
        appeal = torch.zeros(BATCH).index_add_(0, bag, self.appeal[category]) / lengths
        truth = ((self.user_taste[user] * self.item_taste[item]).sum(1) + appeal - 1).sigmoid()
        clicked = torch.bernoulli(truth, generator=self.random)
        categories = self.category_ids[category]
        return Batch(self.user_ids[user], self.item_ids[item], categories, row_splits, clicked, truth)


class ClickModel(nn.Module):
    """Plain PyTorch: an MLP plus a dot product. The rows live in the table, which trains itself in `backward`."""

    def __init__(self, table: EmbeddingTable) -> None:
        super().__init__()
        self.embedding = Embedding(table)
        self.pooled = EmbeddingBag(table, mode="sum")
        self.mlp = nn.Sequential(nn.Linear(3 * DIM, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: Batch) -> Tensor:
        user, item = self.embedding(torch.stack([batch.user, batch.item])).unbind()
        categories = self.pooled(batch.categories, batch.row_splits)
        return self.mlp(torch.cat([user, item, categories], dim=1)).squeeze(1) + (user * item).sum(1)


def auc(scores: list[Tensor], clicked: list[Tensor]) -> float:
    """Return the exact area under the ROC curve: the chance that a click is scored above a non-click."""
    label = torch.cat(clicked) > 0
    _, place, count = torch.cat(scores).unique(return_inverse=True, return_counts=True)
    rank = (count.cumsum(0) - (count - 1) / 2).double()[place]  # equal scores share the mean of their ranks
    clicks, others = int(label.sum()), int((~label).sum())
    return (float(rank[label].sum()) - clicks * (clicks + 1) / 2) / (clicks * others)


def train(steps: int, folder: Path) -> bool:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # layers this small lose more by handing work to threads than they gain
    segment = Segment(dim=DIM, optimizer=Adagrad(learning_rate=0.15))
    table = EmbeddingTable(TableConfig(name="clicks", segments=(segment,)))
    model, log, console = ClickModel(table), ClickLog(), Console(highlight=False)
    adam = torch.optim.Adam(model.mlp.parameters(), lr=1e-3)

    ids, seconds = 0, 0.0
    scores, truths, labels = [], [], []
    console.print(f"{'impressions':>12} {'ids in table':>13} {'AUC':>7} {'best possible':>14} {'ids/s':>11}")
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for step in progress.track(range(1, steps + 1), description="training"):
            batch = log.batch(step / steps)
            started = time.perf_counter()
            logits = model(batch)
            # Summed, not averaged: the step of an id should not depend on how many others are in the batch.
            loss = binary_cross_entropy_with_logits(logits, batch.clicked, reduction="sum")
            adam.zero_grad()
            loss.backward()  # Adagrad steps the rows of this batch's ids
            adam.step()  # Adam steps the MLP
            seconds += time.perf_counter() - started
            ids += 2 * BATCH + batch.categories.numel()
            scores.append(logits.detach())
            truths.append(batch.truth)
            labels.append(batch.clicked)
            if step % max(1, steps // 10) == 0:
                now, best = auc(scores, labels), auc(truths, labels)
                scores, truths, labels = [], [], []
                console.print(f"{step * BATCH:12,} {len(table):13,} {now:7.4f} {best:14.4f} {ids / seconds:11,.0f}")

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "clicks.table"
    table.save(path)
    copy = ClickModel(EmbeddingTable.load(path))
    copy.mlp.load_state_dict(model.mlp.state_dict())
    batch = log.batch(1.0)
    with torch.no_grad():
        equal = torch.equal(copy(batch), model(batch))

    stats = table.stats()
    console.print(f"\nmodel   {DIM}-dim embeddings of users, items, categories; dot product + MLP")
    console.print(
        f"AUC     {now:.4f} on unseen events: {(now - 0.5) / (best - 0.5):.0%} of the way from chance to the best"
    )
    console.print(
        f"table   {stats.rows:,} rows, {stats.bytes / stats.rows:.0f} bytes each ({8 * DIM} of weights and state)"
    )
    console.print(f"speed   {ids / seconds:,.0f} ids/s through lookup, MLP, backward and both optimizers")
    console.print(f"saved   {path}, {path.stat().st_size / 1e6:.1f} MB")
    console.print(f"loaded  predictions of the reloaded model are {'equal, bit for bit' if equal else 'NOT EQUAL'}")
    return equal


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help=f"batches of {BATCH:,} impressions")
    parser.add_argument("--folder", type=Path, default=Path("build/demo"), help="where the table is saved")
    arguments = parser.parse_args()
    raise SystemExit(0 if train(arguments.steps, arguments.folder) else 1)
