"""Danger: batches of a data service that trainers get twice or never, or not again after a restart from a checkpoint."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from monolith import RunConfig, Trainer
from monolith.data import CsvSource, IteratorSource
from monolith.data.transforms import Transformed
from monolith.dataservice import (
    DataClientConfig,
    DataDispatcher,
    DataServiceSource,
    DatasetConfig,
    DataWorker,
    DataWorkerConfig,
    DispatcherConfig,
    Split,
    TransformConfig,
    open_split,
)
from monolith.dataservice.dataset import Kinds
from monolith.errors import (
    ConfigError,
    CorruptFileError,
    InvalidArgumentError,
    SchemaError,
    ServerRestartedError,
    StalePushError,
    UnavailableError,
)
from monolith.features import Batch

COLUMNS = [{"name": "x", "shape": []}, {"name": "tags"}]


@contextmanager
def service(workers: int = 2, *, kinds: Kinds | None = None) -> Iterator[str]:
    """The address of a dispatcher that has data workers."""
    with ExitStack() as stack:
        dispatcher = stack.enter_context(DataDispatcher())
        for _ in range(workers):
            stack.enter_context(DataWorker(DataWorkerConfig(dispatcher=dispatcher.address), kinds))
        yield dispatcher.address


@pytest.fixture
def dataset(tmp_path: Path) -> DatasetConfig:
    """Files of 7, 0, 13, 1 and 30 rows, numbered through."""
    numbers = itertools.count()
    for place, rows in enumerate((7, 0, 13, 1, 30)):
        lines = [f"{number},{'|'.join(['5'] * (number % 3))}" for number in itertools.islice(numbers, rows)]
        (tmp_path / f"{place}.csv").write_text("\n".join(["x,tags", *lines]) + "\n")
    return DatasetConfig(kind="csv", paths=(f"{tmp_path}/*.csv",), fields={"columns": COLUMNS, "batch_size": 3})


ALL = list(range(51))


def rows(batches: Iterator[Batch]) -> list[int]:
    return [x for batch in batches for x in batch["x"].tolist()]


@pytest.mark.parametrize("sharding", ["dynamic", "static"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("data_workers", [True, False])
def test_trainers_that_read_side_by_side_share_out_every_row_once(
    dataset: DatasetConfig, sharding: str, splits: int, data_workers: bool
) -> None:
    dataset = dataset.model_copy(update={"sharding": sharding, "splits": splits})
    got: list[list[int]] = [[] for _ in range(3)]
    with service(workers=2 if data_workers else 0) as address:
        source = DataServiceSource(address, dataset, data_workers=data_workers)

        def train(trainer: int) -> None:
            got[trainer] = rows(iter(source.shard(trainer, 3)))

        threads = [threading.Thread(target=train, args=(trainer,)) for trainer in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert sorted(itertools.chain(*got)) == ALL


def test_batches_are_those_the_source_itself_would_give(dataset: DatasetConfig, tmp_path: Path) -> None:
    with service() as address:
        batches = list(DataServiceSource(address, dataset, parallel=1))
    files = [list(CsvSource(str(path), _columns(), batch_size=3)) for path in sorted(tmp_path.glob("*.csv"))]
    expected = list(itertools.chain(*files))
    assert [batch["x"].tolist() for batch in batches] == [batch["x"].tolist() for batch in expected]
    assert [batch["tags"].to_lists() for batch in batches] == [batch["tags"].to_lists() for batch in expected]


def _columns() -> list[Any]:
    from monolith.data import Column

    return [Column(name="x", shape=()), Column(name="tags")]


def test_splits_that_are_open_at_the_same_time_take_turns(dataset: DatasetConfig) -> None:
    with service() as address:
        firsts = [batch["x"][0].item() for batch in DataServiceSource(address, dataset, parallel=2)]
    # Files begin with rows 0, 7 (13 rows, after an empty one), 20 (one row) and 21; a file is begun when another ends.
    assert firsts == [0, 3, 7, 6, 10, 13, 20, 16, 19, *range(21, 51, 3)]


def test_every_split_draws_random_numbers_of_its_own_the_same_for_every_reader(dataset: DatasetConfig) -> None:
    sample = TransformConfig(
        kind="NegativeSample", fields={"drop_rate": 0.5, "label": "x", "threshold": 1e9, "seed": 4}
    )
    file = dataset.paths[0].replace("*", "4")

    def read(number: int) -> list[int]:
        return rows(
            iter(open_split(dataset.model_copy(update={"transforms": (sample,)}), Split(number=number, file=file)))
        )

    assert 0 < len(read(0)) < 30
    assert read(0) == read(0) != read(1)


@pytest.mark.parametrize("data_workers", [True, False])
def test_a_successor_continues_with_exactly_what_followed_its_checkpoint(
    dataset: DatasetConfig, data_workers: bool
) -> None:
    transforms = (TransformConfig(kind="NegativeSample", fields={"drop_rate": 0.3, "label": "x", "threshold": 1e9}),)
    dataset = dataset.model_copy(update={"transforms": transforms})
    with service() as address:

        def source(job: str) -> DataServiceSource:
            return DataServiceSource(address, dataset, job=job, data_workers=data_workers)

        expected = [batch["x"].tolist() for batch in source("whole")]
        assert 10 < len(list(itertools.chain(*expected))) < 51
        for stop in range(0, len(expected) + 1, 2):
            first = source(f"stopped at {stop}")
            begun = iter(first)
            got = [next(begun)["x"].tolist() for _ in range(stop)]
            state = first.state_dict()
            for _ in range(3):
                next(begun, None)  # trained on, but after the checkpoint
            second = source(f"stopped at {stop}")
            second.load_state_dict(state)
            assert got + [batch["x"].tolist() for batch in second] == expected


def test_one_loop_is_one_epoch(dataset: DatasetConfig) -> None:
    with service() as address:
        source = DataServiceSource(address, dataset)
        assert [sorted(rows(iter(source))) for _ in range(3)] == [ALL] * 3
        other = DataServiceSource(address, dataset)
        other.load_state_dict(source.state_dict())
        assert sorted(rows(iter(other))) == ALL
        assert other.state_dict()["epoch"] == 4


def test_a_trainer_that_reads_ahead_resumes_from_its_own_checkpoint(dataset: DatasetConfig, tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, batch: Batch) -> torch.Tensor:
            self.seen += batch["x"].tolist()
            return self.weight.expand(len(batch["x"]))

    def fit(steps: int | None) -> list[int]:
        model = Model()
        config = RunConfig(model_dir=str(tmp_path / "run"), embedding_prefetch_capacity=3)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config)
        trainer.fit(Transformed(DataServiceSource(address, dataset), labelled), steps=steps)
        return model.seen

    def labelled(batch: Batch) -> Batch:
        return {**batch, "label": torch.zeros(len(batch["x"]))}

    with service() as address:
        seen = fit(4)
        assert len(seen) <= 12
        seen += fit(None)
    assert sorted(seen) == ALL


def test_an_older_process_of_the_same_trainer_is_turned_away(dataset: DatasetConfig) -> None:
    with service() as address:
        old = iter(DataServiceSource(address, dataset))
        next(old)
        source = DataServiceSource(address, dataset)
        new = iter(source)
        taken = rows(itertools.islice(new, 1))
        with pytest.raises(StalePushError, match="started again elsewhere"):
            # It may finish splits it reads until the data workers hear of its successor, but gets no other one.
            deque_all(old)
        assert sorted(taken + rows(new)) == ALL


def deque_all(batches: Iterator[Batch]) -> None:
    for _ in batches:
        pass


def test_no_file_no_row_and_no_data_worker_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("x,tags\n")
    fields = {"columns": COLUMNS, "batch_size": 3}
    with service() as address:
        empty = DatasetConfig(kind="csv", paths=(f"{tmp_path}/*.csv",), fields=fields)
        assert list(DataServiceSource(address, empty, job="empty")) == []
        missing = DatasetConfig(kind="csv", paths=(f"{tmp_path}/*.tsv",), fields=fields)
        with pytest.raises(InvalidArgumentError, match=r"no file matches '.*\.tsv'"):
            list(DataServiceSource(address, missing, job="missing"))
        with pytest.raises(InvalidArgumentError, match="job: 'unheard' is not registered"):
            list(DataServiceSource(address, job="unheard"))
    with service(workers=0) as address, pytest.raises(UnavailableError, match="no data worker is alive"):
        list(DataServiceSource(address, empty, config=DataClientConfig(timeout=2)))


@pytest.mark.parametrize("data_workers", [True, False])
def test_bad_records_are_skipped_or_raised_as_if_they_were_read_here(tmp_path: Path, data_workers: bool) -> None:
    (tmp_path / "a.csv").write_text("x,tags\n1,\nsomeone,\n2,\n3,4,5\n")
    (tmp_path / "b.csv").write_text("y,tags\n1,\n")

    def read(address: str, name: str, bad: int) -> list[int]:
        fields = {"columns": COLUMNS, "batch_size": 3, "max_corrupt": bad}
        dataset = DatasetConfig(kind="csv", paths=(f"{tmp_path}/{name}.csv",), fields=fields)
        return rows(iter(DataServiceSource(address, dataset, job=f"{name} {bad}", data_workers=data_workers)))

    with service() as address:
        assert read(address, "a", 2) == [1, 2]
        with pytest.raises((SchemaError, CorruptFileError), match=r"a\.csv"):
            read(address, "a", 1)
        with pytest.raises(SchemaError, match=r"b\.csv"):
            read(address, "b", 9)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"kind": "cvs"}, "kind: 'cvs' is not known; did you mean 'csv'"),
        ({"fields": {"columns": COLUMNS, "batchsize": 3}}, "csv: fields: .*batch"),
        ({"fields": {"columns": COLUMNS, "batch_size": 0}}, "batch_size: expected 1 or more"),
        ({"transforms": (TransformConfig(kind="FilterByLable"),)}, "did you mean 'FilterByLabel'"),
        ({"transforms": (TransformConfig(kind="FilterByLabel", fields={"threshold": [1]}),)}, "thresholds"),
        ({"transforms": (TransformConfig(kind="os"),)}, "transforms: 'os' is not known"),
    ],
)
def test_a_dataset_that_cannot_be_made_is_said_to_the_trainer(
    dataset: DatasetConfig, changes: dict[str, Any], complaint: str
) -> None:
    with service(workers=1) as address, pytest.raises((ConfigError, InvalidArgumentError), match=complaint):
        list(DataServiceSource(address, dataset.model_copy(update=changes)))


def test_a_kind_of_the_operator_is_a_function_of_files_and_fields() -> None:
    def numbers(paths: list[str], *, count: int) -> IteratorSource:
        assert paths == []
        return IteratorSource([{"x": torch.tensor([number])} for number in range(count)])

    with service(kinds={"numbers": numbers}) as address:
        dataset = DatasetConfig(kind="numbers", fields={"count": 10}, splits=3)
        assert sorted(rows(iter(DataServiceSource(address, dataset)))) == list(range(10))


def test_files_outside_the_folders_of_a_data_worker_are_not_read(dataset: DatasetConfig, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    with DataDispatcher() as dispatcher:
        config = DataWorkerConfig(dispatcher=dispatcher.address, roots=(f"{tmp_path}/open",))
        for place, path in enumerate([f"{tmp_path}/0.csv", f"{tmp_path}/open/../0.csv", f"file://{tmp_path}/0.csv"]):
            forbidden = dataset.model_copy(update={"paths": (path,)})
            source = DataServiceSource(dispatcher.address, forbidden, job=str(place))
            with DataWorker(config), pytest.raises(InvalidArgumentError, match="where this server may read"):
                list(source)


def test_a_dispatcher_without_a_journal_that_was_started_again_is_noticed(dataset: DatasetConfig) -> None:
    with DataDispatcher() as dispatcher, DataWorker(DataWorkerConfig(dispatcher=dispatcher.address)):
        batches = iter(DataServiceSource(dispatcher.address, dataset, parallel=1))
        next(batches)
        dispatcher.close()
        with DataDispatcher(DispatcherConfig(port=dispatcher.port)) as _, pytest.raises(ServerRestartedError):
            deque_all(batches)


def test_a_dispatcher_that_goes_on_from_its_journal_is_not_noticed(dataset: DatasetConfig, tmp_path: Path) -> None:
    config = DispatcherConfig(folder=tmp_path / "dispatcher")
    dispatcher = DataDispatcher(config)
    with DataWorker(DataWorkerConfig(dispatcher=dispatcher.address)):
        batches = iter(DataServiceSource(dispatcher.address, dataset, parallel=1))
        got = rows(itertools.islice(batches, 2))
        dispatcher.close()
        with DataDispatcher(config.model_copy(update={"port": dispatcher.port})):
            assert got + rows(batches) == ALL


@pytest.mark.parametrize("opened", ["", "3", "[[1]]", '[[-1, ""]]', "[[1, 2]]", "[" * 9999])
def test_a_state_of_something_else_is_refused(opened: str) -> None:
    source = DataServiceSource("127.0.0.1:1")
    with pytest.raises(InvalidArgumentError, match=r"state\['open'\]"):
        source.load_state_dict({**source.state_dict(), "open": opened})
