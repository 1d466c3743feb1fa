"""The same training compared with a popularity ranking and the best possible one, with an HTML report."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch
from demo_report import OFFER_COLUMNS, OFFERS, Point, write_report
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.features import Batch, Feature
from monolith.metrics import WindowedAUC
from monolith.nn import FM, EmbeddingBagCollection
from monolith.serve import Predictor, load
from monolith.table import Adagrad
from monolith.train import Estimator, Head, StepResult, Trainer
from monolith.train.hooks import Hook, ProgressHook, ProgressReport

COLUMNS, DIM, REPORTS = ("user_id", "item_id", "category_id", "tag_ids"), 16, 20
WORLD = {"users": 5_000, "items": 1_000, "new_items_per_hour": 500, "batch_size": 4096}


class ClickModel(nn.Module):
    """DeepFM: biases, a factorization machine and an MLP over the embeddings of four columns."""

    heads = (Head(name="click", label="label"),)

    def __init__(self) -> None:
        super().__init__()
        adagrad = Adagrad(learning_rate=0.1)
        self.embeddings = EmbeddingBagCollection(
            [Feature(name=name, dim=DIM, bias=True, optimizer=adagrad, pooling="mean", stack="ids") for name in COLUMNS]
        )
        self.fm = FM()
        self.mlp = nn.Sequential(nn.Linear(len(COLUMNS) * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: Batch) -> Tensor:
        rows = self.embeddings(batch)  # "ids" [rows, columns, DIM], "ids.bias" [rows, columns, 1]
        logits = rows["ids.bias"].sum(1) + self.fm(rows["ids"]) + self.mlp(rows["ids"].flatten(1))
        return logits.squeeze(1)


class Comparison(Hook):
    """Scores every event by the smoothed click rate of its item and by its true probability, and keeps the curves."""

    def __init__(self, window: int, console: Console) -> None:
        self.points: list[Point] = []
        self._console = console
        self._popularity, self._best = WindowedAUC(window), WindowedAUC(window)
        self._shown: Counter[int] = Counter()
        self._clicked: Counter[int] = Counter()
        console.print(f"{'impressions':>12} {'rows':>9} {'AUC':>8} {'popularity':>11} {'best':>8} {'examples/s':>11}")

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        items, labels = result.batch["item_id"].tolist(), result.batch["label"]
        rate = (self._clicked.total() + 1) / (self._shown.total() + 10)
        scores = [(self._clicked[item] + 20 * rate) / (self._shown[item] + 20) for item in items]
        self._popularity.update(scores, labels)
        self._best.update(result.batch["click_probability"], labels)
        self._shown.update(items)
        self._clicked.update(result.batch["item_id"][labels > 0].tolist())

    def write(self, now: ProgressReport) -> None:
        popularity, best = self._popularity.compute(), self._best.compute()
        self.points.append(Point(now.examples, now.rows, now.auc["click"], popularity, best))
        self._console.print(
            f"{now.examples:12,} {now.rows:9,} [bold]{now.auc['click']:8.4f}[/] {popularity:11.4f} {best:8.4f} "
            f"{now.examples_per_second:11,.0f}"
        )


def offers_of_busiest_users(batches: list[Batch], predictor: Predictor) -> list[list[str]]:
    """Return the top three items, with true probabilities, for the three users with the most events in `batches`."""
    names = ("user_id", "item_id", "click_probability")
    users, items, truths = (torch.cat([batch[name] for batch in batches]) for name in names)
    predictions = torch.cat([predictor.predict(batch)["click"] for batch in batches])
    rows = []
    for user, _ in Counter(users.tolist()).most_common(3):
        own = users == user
        pairs = zip(predictions[own].tolist(), truths[own].tolist(), strict=True)
        offers = dict(zip(items[own].tolist(), pairs, strict=True))
        for rank, item in enumerate(sorted(offers, key=lambda item: -offers[item][0])[:3], 1):
            predicted, truth = offers[item]
            rows.append([f"{user:x}", f"{item:x}", f"{rank} of {len(offers)}", f"{predicted:.1%}", f"{truth:.1%}"])
    return rows


def main(steps: int, folder: Path) -> bool:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for layers this small, more threads are slower
    stream = ClickStream(ClickStreamConfig(**WORLD, batches=steps))
    estimator, console, every = (
        Estimator(ClickModel()),
        Console(highlight=False, soft_wrap=True),
        max(1, steps // REPORTS),
    )
    window = every * stream.config.batch_size
    comparison = Comparison(window, console)
    progress = ProgressHook(comparison.write, every_steps=every, auc_window=window)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        estimator.train(bar.track(stream, total=steps, description="training"), hooks=[comparison, progress])

    export = estimator.export_saved_model(folder / "export")
    predictor, later = load(export), [stream.batch(number) for number in range(steps, steps + 20)]
    (trained,) = estimator.predict(later[:1], yield_single_examples=False)
    difference = float((predictor.predict(later[0])["click"] - trained["click"]).abs().max())
    offers = offers_of_busiest_users(later, predictor)
    report = folder / "report.html"
    write_report(report, comparison.points, offers)

    table = Table(*OFFER_COLUMNS, title=f"\n{OFFERS}", title_justify="left", box=None, padding=(0, 2))
    for row in offers:
        table.add_row(*row)
    console.print(table, "")
    console.print(summary(comparison.points[-1]))
    console.print(f"export  {export}; its predictions differ from the model's by at most {difference:.1g}")
    console.print(f"report  {report.resolve().as_uri()}")
    return difference <= 1e-6


def summary(last: Point) -> str:
    gained = (last.auc - last.popularity) / (last.best - last.popularity)
    return (
        f"AUC     {last.auc:.4f} on unseen events; popularity {last.popularity:.4f}, best possible {last.best:.4f}: "
        f"{gained:.0%} of the way between them"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000, help="batches of 4,096 impressions")
    parser.add_argument("--folder", type=Path, default=Path("build/demo"), help="where export and report go")
    arguments = parser.parse_args()
    sys.exit(0 if main(arguments.steps, arguments.folder) else 1)
