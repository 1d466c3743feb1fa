"""The data sets: a synthetic stream that drifts, MovieLens by time, and files like Criteo's. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
import torch

from freshbench.examples import DataSet, Examples, IdLists, Ids, of_schema
from monolith.data.synthetic import ClickStream, ClickStreamConfig, CriteoLike, CriteoLikeConfig, best_auc
from monolith.features import Batch, Ragged

POSITIVE_RATING = 3.5
"""As in the paper."""
WEEK_SECS = 7 * 86_400
"""The paper's Criteo data: five days of batch training, two days online."""
NUMBERS = [f"I{number}" for number in range(1, 14)]
CATEGORIES = [f"C{number}" for number in range(1, 27)]


class DataError(ValueError):
    """A file is not what its data set needs."""


def synthetic(seed: int, events: int, *, drift_days: float = 14.0, new_items: float = 0.015) -> DataSet:
    """Return a week of impressions. Tastes rotate once in `drift_days`, and every hour the share `new_items` of items is added.

    Tastes are uncorrelated after a quarter of that time. There are 250 events for each user, and for each of the first items.
    Another seed is another world.
    """
    return _clicks("synthetic", seed, events, drift_days * 24, new_items, drifts=True)


def stationary(seed: int, events: int) -> DataSet:
    """Return the same without drift and new items, a control: all that online training can gain is more data."""
    return _clicks("stationary", seed, events, 1e9, 0.0, drifts=False)


def _clicks(name: str, seed: int, events: int, drift_hours: float, new_items: float, *, drifts: bool) -> DataSet:
    config = ClickStreamConfig(
        seed=seed,
        batch_size=2000,
        impressions_per_second=events / WEEK_SECS,
        users=max(1, events // 250),
        items=max(1, events // 250),
        new_items_per_hour=new_items * events / 250,
        drift_hours=drift_hours,
        bias=-2.0,
    )
    stream = ClickStream(config)
    batches = [stream.batch(number) for number in range(math.ceil(events / config.batch_size))]
    chances = torch.cat([_tensor(batch, "click_probability") for batch in batches])
    examples = Examples(
        {name: _joined(batches, name) for name in ("user_id", "item_id", "category_id", "tag_ids")},
        np.zeros((len(chances), 0), np.float32),
        _joined_tensors(batches, "label"),
        _joined_tensors(batches, "event_time"),
    ).between(0, events)
    online = chances[events * 5 // 7 : events]
    about: dict[str, float | str] = {"best possible AUC": best_auc(online)}
    return DataSet(name, of_schema(examples), examples, batch_size=512, is_drawn=True, drifts=drifts, about=about)


def movielens(path: Path) -> DataSet:
    """Return ratings in the order of time: GroupLens' `u.data`, `ratings.dat` or `ratings.csv`, Parquet, or a folder with one.

    Parquet files need the columns user_id, item_id, rating and timestamp. Others in them are features too. Several Parquet files
    of a folder are read together.
    """
    needed = ("user_id", "item_id", "rating", "timestamp")
    files = _files(path, ("u.data", "ratings.dat", "ratings.csv", "*.parquet"))
    tables = [read_ratings(file, needed=needed) for file in files]
    table = pa.concat_tables(tables).sort_by([("timestamp", "ascending")])
    labels = (table["rating"].to_numpy() >= POSITIVE_RATING).astype(np.float32)
    names = [name for name in table.column_names if name not in ("rating", "timestamp", "label")]
    examples = Examples(
        {name: _ids(table[name], name) for name in names},
        np.zeros((len(table), 0), np.float32),
        labels,
        table["timestamp"].to_numpy().astype(np.int64),
    )
    return DataSet("movielens", of_schema(examples), examples, batch_size=128 if len(table) < 10**6 else 512)


def criteo(path: Path, events: int | None = None) -> DataSet:
    """Return the rows of a Parquet file, or of those in a folder by name, in the order in which they are: that of time.

    The columns are label, I1 to I13, numbers, and C1 to C26, integers or strings. Integers among the numbers are counts, of which
    the logarithm is taken. A missing number is 0, a missing category an id of its own. `events`: read only the first.
    """
    tables: list[pa.Table] = []
    for file in _files(path, ("*.parquet",)):
        schema = pa.parquet.read_schema(file)
        missing = [name for name in ("label", *NUMBERS, *CATEGORIES) if name not in schema.names]
        if missing:
            raise DataError(
                f"{file}: has no columns {', '.join(missing)}; a Criteo-like file has label, I1-I13, C1-C26"
            )
        tables.append(pa.parquet.read_table(file, columns=["label", *NUMBERS, *CATEGORIES]))
        if events is not None and sum(map(len, tables)) >= events:
            break
    table = pa.concat_tables(tables)[:events]
    examples = Examples(
        {name: _ids(table[name], name) for name in CATEGORIES},
        np.stack([_number(table[name]) for name in NUMBERS], axis=1),
        table["label"].to_numpy().astype(np.float32),
        np.arange(len(table), dtype=np.int64),
    )
    return DataSet("criteo", of_schema(examples), examples, batch_size=512, has_times=False)


def criteo_like(seed: int, events: int) -> DataSet:
    """Return rows shaped like Criteo's that do not depend on time, another control."""
    config = CriteoLikeConfig(seed=seed, batch_size=2000)
    stream = CriteoLike(config)
    batches = [stream.batch(number) for number in range(math.ceil(events / config.batch_size))]
    examples = Examples(
        {name: _joined(batches, name) for name in CATEGORIES},
        np.stack([_joined_tensors(batches, name) for name in NUMBERS], axis=1),
        _joined_tensors(batches, "label"),
        np.arange(len(batches) * config.batch_size, dtype=np.int64),
    ).between(0, events)
    chances = _joined_tensors(batches, "click_probability")[events * 5 // 7 : events]
    about: dict[str, float | str] = {"best possible AUC": best_auc(torch.from_numpy(chances))}
    schema = of_schema(examples)
    return DataSet("criteo-like", schema, examples, 512, is_drawn=True, drifts=False, has_times=False, about=about)


def _tensor(batch: Batch, name: str) -> torch.Tensor:
    column = batch[name]
    assert isinstance(column, torch.Tensor)
    return column


def _joined_tensors(batches: Sequence[Batch], name: str) -> np.ndarray:
    return torch.cat([_tensor(batch, name) for batch in batches]).numpy()


def _joined(batches: Sequence[Batch], name: str) -> Ids:
    if isinstance(batches[0][name], torch.Tensor):
        return _joined_tensors(batches, name)
    columns = [column for batch in batches if isinstance(column := batch[name], Ragged)]
    lengths = np.concatenate([np.diff(column.offsets.numpy()) for column in columns])
    return IdLists(
        np.concatenate([column.values.numpy() for column in columns]), np.concatenate([[0], np.cumsum(lengths)])
    )


def _files(path: Path, names: Sequence[str]) -> list[Path]:
    """Return `path`, or the files of the first of these names that are in the folder."""
    if path.is_file():
        return [path]
    for name in names:
        if found := sorted(path.glob(name)):
            return found
    raise DataError(f"{path}: expected a file, or a folder with one of {', '.join(names)}")


def read_ratings(path: Path, *, needed: Sequence[str]) -> pa.Table:
    """Read one file of ratings: GroupLens' `u.data`, `ratings.dat` or `ratings.csv`, or Parquet.

    Users and items are named user_id and item_id, and Parquet may call them user and item. A column of `needed` that is missing
    is a `DataError`.
    """
    if path.suffix == ".parquet":
        table = pa.parquet.read_table(path)
    elif path.suffix == ".dat":
        # "::" is no delimiter for a CSV reader. With ":" every second column is empty.
        names = ["user_id", "_1", "item_id", "_2", "rating", "_3", "timestamp"]
        table = _csv(path, ":", names).select(["user_id", "item_id", "rating", "timestamp"])
    elif path.name == "u.data":
        table = _csv(path, "\t", ["user_id", "item_id", "rating", "timestamp"])
    else:
        table = _csv(path, ",", None)
    known = {"userId": "user_id", "user": "user_id", "movieId": "item_id", "item": "item_id"}
    table = table.rename_columns([known.get(name, name) for name in table.column_names])
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        raise DataError(
            f"{path}: has no columns {', '.join(missing)}; expected ratings of GroupLens, or Parquet of them"
        )
    return table


def _csv(path: Path, delimiter: str, names: list[str] | None) -> pa.Table:
    read = pa.csv.ReadOptions(column_names=names)
    return pa.csv.read_csv(path, read_options=read, parse_options=pa.csv.ParseOptions(delimiter=delimiter))


def _ids(column: pa.ChunkedArray, name: str) -> Ids:
    """Return whole numbers as they are and strings as hashes of 63 bits."""
    whole = column.combine_chunks()
    if pa.types.is_list(whole.type) or pa.types.is_large_list(whole.type):
        lengths = pc.fill_null(pc.list_value_length(whole), 0).to_numpy().astype(np.int64)
        return IdLists(_flat_ids(whole.flatten(), name), np.concatenate([[0], np.cumsum(lengths)]))
    return _flat_ids(whole, name)


def _flat_ids(column: pa.Array, name: str) -> np.ndarray:
    if pa.types.is_integer(column.type):
        return np.array(pc.fill_null(column.cast(pa.int64()), -1))
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise DataError(f"column {name}: expected whole numbers or strings, or lists of them, got {column.type}")
    encoded = pc.fill_null(column, "").dictionary_encode()
    hashes = [_hash(value) for value in encoded.dictionary.to_pylist()]
    return np.array(hashes, dtype=np.int64)[encoded.indices.to_numpy(zero_copy_only=False)]


def _hash(value: str) -> int:
    return int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "little") >> 1


def _number(column: pa.ChunkedArray) -> np.ndarray:
    values = pc.fill_null(column, 0).to_numpy().astype(np.float32)
    if pa.types.is_integer(column.type):
        values = np.sign(values) * np.log1p(np.abs(values))
    if not np.isfinite(values).all():
        raise DataError("I1-I13: expected finite numbers, got NaN or infinity")
    return values


MAKERS: dict[str, Callable[[int, int], DataSet]] = {
    "synthetic": synthetic,
    "stationary": stationary,
    "criteo-like": criteo_like,
}
"""Data sets that need no file, made from a seed and a number of events."""
FILES = ("movielens", "criteo")
"""Those that are read from a file or a folder."""


@dataclass(frozen=True)
class Source:
    """Which data set. Called with a seed, it makes or reads it. A process of its own makes the same one from `arguments`."""

    kind: str
    """Of `MAKERS` or `FILES`."""
    events: int | None = None
    """That are made, or the first of a file."""
    path: Path | None = None

    def __call__(self, seed: int) -> DataSet:
        if self.path is None:
            assert self.events is not None
            return MAKERS[self.kind](seed, self.events)
        return _read(self)

    def at_most(self, events: int) -> Source:
        """Return the first events alone, or a world with no more of them if they are made."""
        return replace(self, events=min(events, self.events or events))

    def arguments(self) -> list[str]:
        """Return what `Source.of` reads."""
        given = {"--data": self.kind, "--events": self.events, "--path": self.path}
        return [part for name, value in given.items() if value is not None for part in (name, str(value))]

    @classmethod
    def of(cls, parser: ArgumentParser, arguments: Sequence[str]) -> tuple[Source, Namespace]:
        """Return the data set of a command line, and its other options, which `parser` has."""
        parser.add_argument("--data", choices=(*MAKERS, *FILES), required=True)
        parser.add_argument("--events", type=int)
        parser.add_argument("--path", type=Path)
        options = parser.parse_args(arguments)
        return cls(options.data, options.events, options.path), options


@cache
def _read(source: Source) -> DataSet:
    """Read a file once, whatever the seed is."""
    assert source.path is not None
    if source.kind == "criteo":
        return criteo(source.path, source.events)
    data = movielens(source.path)
    events = min(source.events or len(data.examples), len(data.examples))
    return replace(data, examples=data.examples.between(0, events))
