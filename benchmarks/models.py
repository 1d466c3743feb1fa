"""The ready models of monolith.models on MovieLens-100K and on synthetic clicks: AUC, and speed as a ratio to DeepFM.

    python benchmarks/models.py --movielens ml100k_train.parquet ml100k_test.parquet

The Parquet files have the columns user_id, item_id, occupation (text), genres (texts), age, rating and timestamp. All models
train in turn on the same batch, so that each meets the same machine, and speed is in examples per second of processor time of
one thread. MovieLens is split by time: the files are joined, sorted, and the last tenth is evaluated. Of the stream the last
fifth is evaluated. Models of several tasks also learn which ratings are 5.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from monolith import models
from monolith.data import ParquetSource
from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.features import Batch, Ragged, hash_strings
from monolith.metrics import AUC
from monolith.models import RankingModel
from monolith.nn.heads import logits_by_head, total_loss

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
movielens = importlib.import_module("07_movielens")

NAMES = (
    "DeepFM",
    "DLRM",
    "DCNv2",
    "XDeepFM",
    "AutoIntModel",
    "DINModel",
    "DIENModel",
    "SASRec",
    "MMoEModel",
    "PLE",
    "TwoTower",
)
BATCH = 512
LIKE, FIVE = {"name": "like"}, {"name": "five", "label": "five"}
MOVIELENS = {
    "ids": ["user_id", "item_id", "occupation", "genres"],
    "numbers": ["age"],
    "item": "item_id",
    "history": "liked",
}
CLICKS = {"ids": ["user_id", "item_id", "category_id", "tag_ids"], "item": "item_id", "history": "liked"}


def movielens_batches(paths: Sequence[Path], folder: Path) -> list[Batch]:
    """All ratings by time, with what the user liked before."""
    names = ["user_id", "item_id", "occupation", "genres", "age", "rating", "timestamp"]
    table = pa.concat_tables([pq.read_table(path, columns=names) for path in paths])
    table = table.append_column("row", pa.array(range(len(table))))
    table = table.take(pc.sort_indices(table, [("timestamp", "ascending"), ("row", "ascending")]))
    table, _ = movielens.with_history(table)
    genres = table["genres"].combine_chunks()
    columns = {
        "user_id": table["user_id"],
        "item_id": table["item_id"],
        "occupation": pa.array(hash_strings(table["occupation"]).numpy()),
        "genres": pa.ListArray.from_arrays(genres.offsets, pa.array(hash_strings(genres.values).numpy())),
        "age": pc.divide(table["age"].cast(pa.float32()), 100),
        "liked": table["liked"],
        "label": table["label"],
        "five": pc.equal(table["rating"], 5).cast(pa.float32()),
    }
    pq.write_table(pa.table(columns), folder / "examples.parquet")
    return list(ParquetSource(str(folder / "examples.parquet"), batch_size=BATCH))


def click_batches(count: int) -> list[Batch]:
    """A stream of clicks, with the items that the user clicked before."""
    stream = ClickStream(
        ClickStreamConfig(users=2_000, items=1_000, new_items_per_hour=100, batch_size=BATCH, batches=count)
    )
    clicked: dict[int, list[int]] = {}
    batches = []
    for batch in stream:
        rows = zip(batch["user_id"].tolist(), batch["item_id"].tolist(), batch["label"].tolist(), strict=True)
        histories = []
        for user, item, label in rows:
            histories.append(clicked.get(user, []))
            if label:
                clicked[user] = [*clicked.get(user, []), item][-movielens.KEPT :]
        batches.append({**batch, "liked": Ragged.from_lists(histories)})
    return batches


class Contestant:
    """A model, its optimizers, and the processor time that its training took."""

    def __init__(self, name: str, inputs: dict[str, object], tasks: list[dict[str, str]]) -> None:
        torch.manual_seed(0)
        kind = getattr(models, name)
        fields = {**inputs, "feature": {"optimizer": {"kind": "adagrad", "learning_rate": 0.05}}}
        if not kind.sequence:
            del fields["history"], fields["item"]
        if name == "TwoTower":
            fields["user"] = [column for column in ("user_id", "occupation", "age") if column in str(inputs)]
        self.model: RankingModel = kind(**fields, heads=tasks if kind.multitask else tasks[:1])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.seconds = 0.0

    def train(self, batch: Batch) -> None:
        begin = time.process_time()
        logits = logits_by_head(self.model(batch), self.model.heads)
        self.optimizer.zero_grad()
        total_loss(logits, batch, self.model.heads).backward()
        self.optimizer.step()
        self.model.embeddings.step()
        self.seconds += time.process_time() - begin

    def auc(self, batches: Sequence[Batch]) -> float:
        self.model.eval()
        metric = AUC()
        with torch.no_grad():
            for batch in batches:
                metric.update(logits_by_head(self.model(batch), self.model.heads)["like"], batch["label"])
        return float(metric.compute())


def run(
    batches: list[Batch], share: float, epochs: int, inputs: dict[str, object], tasks: list[dict[str, str]]
) -> list[tuple[float, float]]:
    """AUC and seconds of each model."""
    cut = int(len(batches) * share)
    contestants = [Contestant(name, inputs, tasks) for name in NAMES]
    for _ in range(epochs):
        for batch in batches[:cut]:
            for contestant in contestants:
                contestant.train(batch)
    return [(contestant.auc(batches[cut:]), contestant.seconds / (cut * epochs * BATCH)) for contestant in contestants]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--movielens", type=Path, nargs="*", default=[])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--clicks", type=int, default=400, help=f"batches of {BATCH} synthetic impressions")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    if arguments.movielens:
        with tempfile.TemporaryDirectory() as folder:
            batches = movielens_batches(arguments.movielens, Path(folder))
        results["MovieLens-100K"] = run(batches, 0.9, arguments.epochs, MOVIELENS, [LIKE, FIVE])
    clicks = click_batches(arguments.clicks)
    results["synthetic"] = run(clicks, 0.8, 1, CLICKS, [LIKE])
    print("| model |" + "".join(f" AUC, {data} | speed, {data} |" for data in results))
    print("|---|" + "--:|--:|" * len(results))
    for i, name in enumerate(NAMES):
        cells = (f" {rows[i][0]:.4f} | {rows[0][1] / rows[i][1]:.2f} |" for rows in results.values())
        print(f"| {name} |" + "".join(cells))
    for data, rows in results.items():
        print(f"{data}: DeepFM trains {1 / rows[0][1]:,.0f} examples per second of processor time")
    best = AUC()
    for batch in clicks[int(len(clicks) * 0.8) :]:
        best.update(batch["click_probability"], batch["label"])
    print(f"synthetic: the best possible AUC is {best.compute():.4f}")


if __name__ == "__main__":
    main()
