"""From a ratings file to served recommendations: trained on the past, evaluated on what came later.

Reads the files of MovieLens as they are published (u.data, ratings.dat, ratings.csv), or Parquet files with the columns
user_id, item_id, rating and timestamp. A rating of 4 or more is an item that the user likes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from pyarrow import csv
from rich.console import Console

from monolith.data import ParquetSource
from monolith.models import DINModel
from monolith.serve import Predictor, load
from monolith.train import Estimator, Head, RunConfig

NAMES = ("user_id", "item_id", "rating", "timestamp")
KEPT = 20  # the newest items that a user liked


def read_ratings(paths: list[Path]) -> pa.Table:
    """All ratings, oldest first. Those of one second are in the order of the files."""
    tables = []
    for path in paths:
        if path.suffix == ".parquet":
            table = pq.read_table(path, columns=list(NAMES))
        elif path.suffix == ".csv":  # MovieLens 20M, 25M, latest: with a header userId,movieId,rating,timestamp
            table = csv.read_csv(path).rename_columns(list(NAMES))
        elif path.suffix in (".dat", ".data"):  # 1M and 10M are separated by "::", 100K by tabs
            text = path.read_bytes().replace(b"::", b"\t")
            options = csv.ReadOptions(column_names=list(NAMES))
            table = csv.read_csv(pa.BufferReader(text), options, csv.ParseOptions(delimiter="\t"))
        else:
            sys.exit(
                f"{path}: expected .parquet, .csv (with a header), .dat or .data, got {path.suffix or 'no suffix'}"
            )
        types = (pa.int64(), pa.int64(), pa.float32(), pa.int64())
        tables.append(table.cast(pa.schema(zip(NAMES, types, strict=True))))
    ratings = pa.concat_tables(tables)
    order = pc.sort_indices(
        ratings.append_column("row", pa.array(range(len(ratings)))), [("timestamp", "ascending"), ("row", "ascending")]
    )
    return ratings.take(order)


def with_history(ratings: pa.Table) -> tuple[pa.Table, dict[int, list[int]]]:
    """Examples with a label and what the user liked before, and what each user has liked in the end."""
    liked: dict[int, list[int]] = {}
    histories = []
    label = pc.greater_equal(ratings["rating"], 4)
    rows = zip(ratings["user_id"].to_pylist(), ratings["item_id"].to_pylist(), label.to_pylist(), strict=True)
    for user, item, likes in rows:
        histories.append(liked.get(user, []))
        if likes:
            liked[user] = [*liked.get(user, []), item][-KEPT:]
    examples = ratings.append_column("liked", pa.array(histories, pa.list_(pa.int64())))
    return examples.append_column("label", label.cast(pa.float32())), liked


def recommend(served: Predictor, user: int, liked: list[int], items: list[int], count: int) -> list[tuple[int, float]]:
    """The items with the best predictions."""
    batch = {"user_id": [user] * len(items), "item_id": items, "liked": [liked] * len(items)}
    scores = served.predict(batch)["like"]
    best = scores.topk(min(count, len(items)))
    return [(items[i], p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def main(paths: list[Path], folder: Path, *, epochs: int, user: int | None) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for layers this small, more threads are slower
    console = Console(highlight=False)
    ratings = read_ratings(paths)
    examples, liked = with_history(ratings)
    cut = len(examples) * 9 // 10  # nothing that is trained is later than what is evaluated
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", examples.slice(0, cut)), ("test", examples.slice(cut))):
        pq.write_table(part, folder / f"{name}.parquet", row_group_size=8192)
    console.print(f"{cut:,} ratings to train, {len(examples) - cut:,} later ones to evaluate")

    model = DINModel(
        ids=["user_id", "item_id"],
        item="item_id",
        history="liked",
        max_length=KEPT,
        hidden=[64, 32],
        feature={"optimizer": {"kind": "adagrad", "learning_rate": 0.05}},
        heads=[Head(name="like", group="user_id")],
    )
    run = RunConfig(model_dir=str(folder / "run"), seed=0, epochs=epochs)
    columns = ["user_id", "item_id", "liked", "label"]
    estimator = Estimator(model, run)
    estimator.train(ParquetSource(str(folder / "train.parquet"), columns, batch_size=512))
    metrics = estimator.evaluate(ParquetSource(str(folder / "test.parquet"), columns, batch_size=2048))
    console.print(f"AUC {metrics['like/auc']:.4f}, within a user {metrics['like/gauc']:.4f}")
    export = estimator.export_saved_model()

    served = load(export)  # needs none of the code above
    who = user if user is not None else ratings["user_id"][-1].as_py()
    seen = set(ratings.filter(pc.equal(ratings["user_id"], who))["item_id"].to_pylist())
    items = [item for item in pc.unique(ratings["item_id"]).to_pylist() if item not in seen]
    console.print(f"for user {who}, who has liked {liked.get(who, [])[-5:]} lately:")
    for item, probability in recommend(served, who, liked.get(who, []), items, count=5):
        console.print(f"  item {item:<6} liked with probability {probability:.2f}")
    console.print(f"to answer over HTTP and gRPC: monolith serve {export.parent}", soft_wrap=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ratings", type=Path, nargs="+", help="u.data, ratings.dat, ratings.csv, or Parquet files")
    parser.add_argument("--folder", type=Path, default=Path("build/examples/07_movielens"), help="continued next time")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--user", type=int, help="whom to recommend to, by default whoever rated last")
    arguments = parser.parse_args()
    main(arguments.ratings, arguments.folder, epochs=arguments.epochs, user=arguments.user)
