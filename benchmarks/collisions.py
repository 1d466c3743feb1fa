"""Compare collisionless ids with hashed ids: one model, with ids as they are and hashed into tables of a fixed size.

python benchmarks/collisions.py                                   the synthetic stream, minutes
python benchmarks/collisions.py --movielens ml-1m/ratings.dat      MovieLens, rating >= 3.5 is a positive

`--movielens` takes the ratings of any public release (ratings.csv, ratings.dat, u.data), or Parquet files with the columns user,
item, and label or rating. Several files count as one.

As in the experiment of the Monolith paper: DeepFM on user and item, AUC on a random tenth of the events after every epoch, ids
through MD5 modulo a number of rows. In the paper, hashing reduces the number of distinct ids by 7.73% for users
and by 2.86% for movies. Its tables thus have about 6 rows per user and 17 per movie. The other cases are tables with fewer
rows. Everything else is equal: hashed ids use the same table, and the seed determines the order of events and the split.
If matplotlib is installed, the result is also drawn.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from freshbench.datasets import DataError, read_ratings
from monolith.data.synthetic import ClickStream, ClickStreamConfig, best_auc
from monolith.features import Batch, Feature
from monolith.nn import FM, EmbeddingBagCollection
from monolith.table import Adagrad, RandomUniform
from monolith.train import Estimator, Head, RunConfig

CASES: dict[str, tuple[float, float] | None] = {
    "collisionless": None,
    "hashed, the paper's rates": (0.0773, 0.0286),
    "hashed, a row per id": (math.exp(-1), math.exp(-1)),
    "hashed, a row per 4 ids": (1 + math.expm1(-4) / 4, 1 + math.expm1(-4) / 4),
}
"""Share of distinct users and items that hashing loses."""
DIM, BATCH, POSITIVE_RATING = 16, 4096, 3.5


@dataclass(frozen=True)
class Events:
    """Users, items and labels (int64, int64, float32 [n]), and the best possible AUC if it is known."""

    users: np.ndarray
    items: np.ndarray
    labels: np.ndarray
    best: float | None = None

    def batches(self, chosen: np.ndarray) -> Iterator[Batch]:
        for start in range(0, len(chosen), BATCH):
            rows = chosen[start : start + BATCH]
            columns = {"user": self.users[rows], "item": self.items[rows], "label": self.labels[rows]}
            yield {name: torch.from_numpy(column) for name, column in columns.items()}


@dataclass(frozen=True)
class Run:
    """One model of one seed: table rows and share of lost ids as (users, items), AUC after every epoch."""

    rows: tuple[int, int]
    lost: tuple[float, float]
    aucs: tuple[float, ...]


class DeepFM(nn.Module):
    """Biases, factorization machine and MLP over the embeddings of user and item."""

    heads = (Head(name="like", label="label", metrics=("auc",)),)

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        features = [
            Feature(
                name=name,
                dim=DIM,
                bias=True,
                stack="ids",
                initializer=RandomUniform(low=-0.05, high=0.05),
                optimizer=Adagrad(learning_rate=0.05),
            )
            for name in ("user", "item")
        ]
        self.embeddings = EmbeddingBagCollection(features, seed=seed)
        self.fm = FM()
        self.mlp = nn.Sequential(nn.Linear(2 * DIM, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: Batch) -> Tensor:
        rows = self.embeddings(batch)
        logits = rows["ids.bias"].sum(1) + self.fm(rows["ids"]) + self.mlp(rows["ids"].flatten(1))
        return logits.squeeze(1)


def synthetic(seed: int, count: int) -> Events:
    """`count` impressions with as many per user and per item as MovieLens-25M has ratings: 154 and 423."""
    users, items = max(1, count // 154), max(1, count // 423)
    config = ClickStreamConfig(seed=seed, batch_size=BATCH, users=users, items=items, new_items_per_hour=0)
    stream = ClickStream(config)
    batches = [stream.batch(number) for number in range(math.ceil(count / BATCH))]
    names = ("user_id", "item_id", "label", "click_probability")
    columns = {name: torch.cat([batch[name] for batch in batches]) for name in names}
    chances = columns.pop("click_probability")
    return Events(*(column.numpy() for column in columns.values()), best=best_auc(chances))


def movielens(paths: Sequence[Path]) -> Events:
    """Ratings of MovieLens as one set of events. A Parquet file may have labels of its own instead of ratings."""
    parts = []
    for path in paths:
        table = read_ratings(path, needed=("user_id", "item_id"))
        if "label" in table.column_names:
            labels = table["label"].to_numpy()
        elif "rating" in table.column_names:
            labels = table["rating"].to_numpy() >= POSITIVE_RATING
        else:
            raise DataError(f"{path}: has neither a column label nor rating")
        parts.append((table["user_id"].to_numpy(), table["item_id"].to_numpy(), labels))
    users, items, labels = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return Events(users.astype(np.int64), items.astype(np.int64), labels.astype(np.float32))


def rows_for(ids: int, lost: float) -> int:
    """The smallest number of rows that `ids` distinct ids hash into with at most the share `lost` of them lost on average."""
    low, high = 1, math.ceil(ids / lost) + 1
    while low < high:
        rows = (low + high) // 2
        occupied = -rows * math.expm1(ids * math.log1p(-1 / rows)) if rows > 1 else 1
        low, high = (low, rows) if occupied >= (1 - lost) * ids else (rows + 1, high)
    return low


def hashed(ids: np.ndarray, rows: int, salt: int) -> np.ndarray:
    """MD5 of `salt` and each id, modulo `rows`."""
    distinct, place = np.unique(ids, return_inverse=True)
    digests = (hashlib.md5(f"{salt}:{number}".encode()).digest() for number in distinct.tolist())
    buckets = np.fromiter((int.from_bytes(digest[:8], "little") % rows for digest in digests), np.int64, len(distinct))
    return buckets[place]


def run(events: Events, losses: tuple[float, float] | None, *, seed: int, epochs: int) -> Run:
    """Train and measure one model on ids that lose `losses` of the users and items by hashing, or none."""
    before = [len(np.unique(ids)) for ids in (events.users, events.items)]
    rows = before
    if losses is not None:
        rows = [rows_for(count, lost) for count, lost in zip(before, losses, strict=True)]
        users, items = hashed(events.users, rows[0], seed), hashed(events.items, rows[1], seed)
        events = replace(events, users=users, items=items)
    after = [len(np.unique(ids)) for ids in (events.users, events.items)]
    random = np.random.default_rng(seed)
    order = random.permutation(len(events.labels))
    test, train = np.split(order, [len(order) // 10])
    estimator = Estimator(DeepFM(seed), RunConfig(seed=seed))
    aucs = []
    for _ in range(epochs):
        estimator.train(events.batches(random.permutation(train)))
        aucs.append(estimator.evaluate(events.batches(test))["like/auc"])
    lost = [1 - kept / count for kept, count in zip(after, before, strict=True)]
    return Run((rows[0], rows[1]), (lost[0], lost[1]), tuple(aucs))


def table(runs: dict[str, list[Run]]) -> str:
    """A Markdown table: AUC after the last epoch, and the mean difference of runs of one seed with its standard error."""
    lines = [
        "| ids | rows, users / items | ids lost, users / items | AUC | against collisionless |",
        "|---|---:|---:|---:|---:|",
    ]
    free = [one.aucs[-1] for one in runs["collisionless"]]
    for case, own in runs.items():
        aucs = [one.aucs[-1] for one in own]
        rows = " / ".join(f"{statistics.mean(one.rows[side] for one in own):,.0f}" for side in (0, 1))
        lost = " / ".join(f"{statistics.mean(one.lost[side] for one in own):.2%}" for side in (0, 1))
        difference = _mean_and_error([100 * (a - b) for a, b in zip(aucs, free, strict=True)])
        shown = "" if case == "collisionless" else f"{difference} points"
        lines.append(f"| {case} | {rows} | {lost} | {statistics.mean(aucs):.4f} | {shown} |")
    return "\n".join(lines)


def _mean_and_error(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:+.2f}"
    return f"{statistics.mean(values):+.2f} ± {statistics.stdev(values) / len(values) ** 0.5:.2f}"


def draw(runs: dict[str, list[Run]], path: Path, title: str) -> bool:
    """AUC by epoch, mean and range of the seeds; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.6), layout="constrained")
    for (case, own), colour in zip(runs.items(), ("#1f6fd0", "#d9601a", "#3a8f5d", "#7b7b76"), strict=True):
        aucs = np.array([one.aucs for one in own])
        epochs = np.arange(1, aucs.shape[1] + 1)
        axes.plot(epochs, aucs.mean(0), color=colour, marker="o", linewidth=2, label=case)
        axes.fill_between(epochs, aucs.min(0), aucs.max(0), color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="epoch", ylabel="AUC on held-out events", title=title, xticks=epochs)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e3e2de")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--movielens", type=Path, nargs="+", metavar="FILE", help="ratings; the synthetic stream without it"
    )
    parser.add_argument("--events", type=int, default=1_000_000, help="of the synthetic stream")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plot", type=Path, default=Path("benchmarks/results/collisions.svg"), help=".svg or .png")
    parser.add_argument("--title", help="of the plot; default: MovieLens or Synthetic stream")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # layers this small lose more by handing work to threads than they gain
    console = Console(highlight=False, soft_wrap=True)
    runs: dict[str, list[Run]] = {case: [] for case in CASES}
    best = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        under_way = bar.add_task("training", total=arguments.seeds * len(CASES))
        for seed in range(arguments.seeds):
            events = movielens(arguments.movielens) if arguments.movielens else synthetic(seed, arguments.events)
            best.append(events.best)
            for case, lost in CASES.items():
                done = run(events, lost, seed=seed, epochs=arguments.epochs)
                runs[case].append(done)
                bar.advance(under_way)
                console.print(f"seed {seed}  {case:<26}", *(f"{auc:.4f}" for auc in done.aucs))
    name = arguments.title or ("MovieLens" if arguments.movielens else "Synthetic stream")
    console.print(
        f"{name}, {len(events.labels):,} events, {arguments.epochs} epochs, {arguments.seeds} seeds", markup=False
    )
    if None not in best:
        console.print(f"best possible AUC {statistics.mean(best):.4f}")
    console.print(table(runs), markup=False)
    if draw(runs, arguments.plot, name):
        console.print(f"drawn in {arguments.plot}")
    else:
        console.print("not drawn: matplotlib is not installed (pip install matplotlib)")


if __name__ == "__main__":
    main()
