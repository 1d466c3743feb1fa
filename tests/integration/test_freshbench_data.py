"""Danger: ratings are read out of order, or as other columns than they are, and the benchmark measures something else."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from monolith.data.synthetic import CriteoLike, CriteoLikeConfig, write_parquet

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RATINGS = [(3, 7, 4.0, 200), (1, 9, 3.0, 100), (2, 7, 5.0, 300)]
"""User, item, rating and time, not in the order of time."""


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401 - a module that is found at run time
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("freshbench.datasets")


def _written(folder: Path, name: str) -> None:
    if name == "x.parquet":
        users, items, ratings, times = zip(*RATINGS, strict=True)
        columns = {"user_id": users, "item_id": items, "rating": ratings, "timestamp": times}
        pa.parquet.write_table(pa.table(columns), folder / name)
        return
    delimiter = {"u.data": "\t", "ratings.dat": "::", "ratings.csv": ","}[name]
    lines = [delimiter.join(map(str, row)) for row in RATINGS]
    header = ["userId,movieId,rating,timestamp"] if name == "ratings.csv" else []
    (folder / name).write_text("\n".join([*header, *lines]) + "\n")


@pytest.mark.parametrize("name", ["u.data", "ratings.dat", "ratings.csv", "x.parquet"])
def test_ratings_of_every_format_are_the_same_by_time(
    datasets: Any,  # noqa: ANN401 - a module that is found at run time
    tmp_path: Path,
    name: str,
) -> None:
    _written(tmp_path, name)
    for path in (tmp_path, tmp_path / name):
        data = datasets.movielens(path)
        assert data.examples.times.tolist() == [100, 200, 300]
        assert data.examples.ids["user_id"].tolist() == [1, 3, 2]
        assert data.examples.ids["item_id"].tolist() == [9, 7, 7]
        assert data.examples.labels.tolist() == [0, 1, 1]


def test_other_columns_of_parquet_are_features(datasets: Any, tmp_path: Path) -> None:  # noqa: ANN401 - a module
    columns = {"user_id": [1, 2], "item_id": [3, 4], "rating": [5, 1], "timestamp": [20, 10], "label": [1.0, 0.0]}
    genres = pa.array([["a", "b"], ["b"]])
    pa.parquet.write_table(pa.table({**columns, "genres": genres, "job": ["x", "y"]}), tmp_path / "x.parquet")
    data = datasets.movielens(tmp_path)
    assert data.schema.single == ("user_id", "item_id", "job")
    assert data.schema.lists == ("genres",)
    lists = data.examples.ids["genres"]
    assert lists.offsets.tolist() == [0, 1, 3]
    assert lists.values[0] == lists.values[2]
    assert (lists.values >= 0).all()


def test_criteo_like_files_are_read_as_they_were_made(datasets: Any, tmp_path: Path) -> None:  # noqa: ANN401 - a module
    stream = CriteoLike(CriteoLikeConfig(batch_size=50, batches=2))
    write_parquet(
        ({n: c for n, c in batch.items() if n != "click_probability"} for batch in stream), tmp_path / "a.parquet"
    )
    data = datasets.criteo(tmp_path)
    first = stream.batch(0)
    assert (data.examples.ids["C26"][:50] == first["C26"].numpy()).all()
    assert (data.examples.numbers[:50, 12] == first["I13"].numpy()).all()
    assert len(data.examples) == 100
    assert len(datasets.criteo(tmp_path, 70).examples) == 70


def test_counts_and_missing_values_of_criteo(datasets: Any, tmp_path: Path) -> None:  # noqa: ANN401 - a module
    columns: dict[str, Any] = {"label": [0, 1]}
    columns |= {f"I{number}": [99, None] for number in range(1, 14)}
    columns |= {f"C{number}": ["68fd1e64", None] for number in range(1, 27)}
    pa.parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    data = datasets.criteo(tmp_path)
    assert data.examples.numbers[:, 0] == pytest.approx([np.log(100), 0])
    assert len(set(data.examples.ids["C1"].tolist())) == 2


def test_a_file_without_its_columns_is_refused_by_name(datasets: Any, tmp_path: Path) -> None:  # noqa: ANN401 - a module
    pa.parquet.write_table(pa.table({"label": [1], "I1": [2]}), tmp_path / "a.parquet")
    with pytest.raises(datasets.DataError, match=r"a\.parquet.*I2.*C26"):
        datasets.criteo(tmp_path)
    with pytest.raises(datasets.DataError, match=r"user_id"):
        datasets.movielens(tmp_path / "a.parquet")
    with pytest.raises(datasets.DataError, match=r"u\.data"):
        datasets.movielens(tmp_path / "nothing")


def test_lists_are_cut_and_reordered_with_their_rows(datasets: Any) -> None:  # noqa: ANN401 - a module
    examples = importlib.import_module("freshbench.examples")
    lists = examples.IdLists(np.arange(6), np.array([0, 2, 2, 3, 6]))
    taken = lists.take(np.array([3, 0, 1]))
    assert taken.values.tolist() == [3, 4, 5, 0, 1]
    assert taken.offsets.tolist() == [0, 3, 5, 5]
    data = datasets.synthetic(0, 500)
    mixed = data.shuffled(1)
    order = np.argsort(mixed.examples.times, kind="stable")
    assert sorted(mixed.examples.times) == sorted(data.examples.times)
    assert (np.sort(mixed.examples.ids["tag_ids"].values) == np.sort(data.examples.ids["tag_ids"].values)).all()
    assert len(order) == 500


@pytest.mark.parametrize("kind", ["synthetic", "movielens", "criteo"])
def test_every_part_and_process_has_the_data_set_that_was_asked_for(
    datasets: Any,  # noqa: ANN401 - a module that is found at run time
    tmp_path: Path,
    kind: str,
) -> None:
    source = datasets.Source("synthetic", 40)
    if kind == "movielens":
        _written(tmp_path, "u.data")
        source = datasets.Source(kind, path=tmp_path)
    if kind == "criteo":
        stream = CriteoLike(CriteoLikeConfig(batch_size=50, batches=2))
        write_parquet(
            ({n: c for n, c in batch.items() if n != "click_probability"} for batch in stream), tmp_path / "a.parquet"
        )
        source = datasets.Source(kind, 60, tmp_path)
    again, options = datasets.Source.of(argparse.ArgumentParser(), source.arguments())
    assert again == source
    assert vars(options) == {"data": kind, "events": source.events, "path": source.path}
    data = source(0)
    assert data.name == kind
    count = 2 if kind == "movielens" else 30
    few = source.at_most(count)(0)
    assert len(few.examples) == count
    if kind != "synthetic":  # fewer events are another world
        assert (few.examples.labels == data.examples.labels[:count]).all()
    assert len(source.at_most(10**6)(0).examples) == len(data.examples)
