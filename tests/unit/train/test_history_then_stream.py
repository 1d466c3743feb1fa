"""Danger: a run that goes from history to a stream reads the history again when it is restarted, or begins in the wrong place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet
import pytest

from monolith.data import Column, HistoryThenStream, ParquetSource, StreamSource, start_after
from monolith.data.sources.history import transformed_like
from monolith.data.sources.source import Source, SourcePosition
from monolith.data.transforms import FilterByValue
from monolith.data.transforms.compose import Shuffle, Transformed
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features.batch import Batch
from monolith.streams import Stream, open_stream
from rank_runs import RankRun
from waiting_run import IdCounts, Run, counts_of, running
from waiting_source import WaitingSource, until

COLUMNS = [Column(name="id", shape=()), Column(name="label", dtype="float32", shape=(), default=1.0)]


class History(Source):
    """The ids 0 to `count` - 1 one by one, in shards."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.reads = 0
        super().__init__()

    def _start(self) -> SourcePosition:
        return {"next": 0}

    def _read(self, position: SourcePosition) -> Iterator[tuple[Batch, SourcePosition]]:
        import torch

        for number in range(int(position["next"]), self.count):
            if number % self._shard_count == self._shard_index:
                self.reads += 1
                yield {"id": torch.tensor([number]), "label": torch.ones(1)}, {"next": number + 1}


def stream_of(folder: Path, ids: range, *, partitions: int = 1) -> Stream:
    stream = open_stream(folder / "events", partitions=partitions)
    append(stream, ids)
    return stream


def append(stream: Stream, ids: range, **fields: int) -> None:
    with stream.writer() as writer:
        for number in ids:
            writer.append(orjson.dumps({"id": number, **fields}), partition=number % len(stream.partitions()))


def live(stream: Stream, **options: Any) -> StreamSource:  # noqa: ANN401
    return StreamSource(stream, options.pop("columns", COLUMNS), batch_size=4, max_wait_secs=0.01, **options)


def test_a_run_goes_on_with_the_stream_and_never_reads_the_history_again(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, range(10, 16))
    expected = dict.fromkeys([*range(6), *range(10, 16)], 1)
    with running(HistoryThenStream(History(6), live(stream)), model_dir=str(tmp_path / "run")) as run:
        until(lambda: len(counts_of(run.trainer, range(20))) == 12)
        assert run.trainer.lag() is not None
    assert counts_of(run.trainer, range(20)) == expected
    append(stream, range(16, 18))
    again = HistoryThenStream(History(6), live(stream))
    with running(again, model_dir=str(tmp_path / "run")) as later:
        until(lambda: len(counts_of(later.trainer, range(20))) == 14)
    assert counts_of(later.trainer, range(20)) == expected | {16: 1, 17: 1}
    assert again.history.reads == 0


@pytest.mark.parametrize("steps", [3, 6])
def test_a_run_that_was_stopped_in_the_history_continues_there(tmp_path: Path, steps: int) -> None:
    stream = stream_of(tmp_path, range(10, 12))
    first = Run(HistoryThenStream(History(6), live(stream)), model_dir=str(tmp_path / "run"))
    first.trainer.fit(first.source, max_steps=steps)
    with running(HistoryThenStream(History(6), live(stream)), model_dir=str(tmp_path / "run")) as run:
        until(lambda: len(counts_of(run.trainer, range(20))) == 8)
    assert counts_of(run.trainer, range(20)) == dict.fromkeys([*range(6), 10, 11], 1)


@pytest.mark.parametrize("steps", [3, None])
def test_a_run_of_the_history_alone_goes_on_with_the_stream(tmp_path: Path, steps: int | None) -> None:
    stream = stream_of(tmp_path, range(10, 12))
    Run(WaitingSource(), model_dir=str(tmp_path / "run")).trainer.fit(History(6), max_steps=steps)
    with running(HistoryThenStream(History(6), live(stream)), model_dir=str(tmp_path / "run")) as run:
        until(lambda: len(counts_of(run.trainer, range(20))) == 8)
    assert counts_of(run.trainer, range(20)) == dict.fromkeys([*range(6), 10, 11], 1)


def test_the_history_may_be_read_several_times_and_the_stream_is_not(tmp_path: Path) -> None:
    source = HistoryThenStream(History(3), live(stream_of(tmp_path, range(10, 12))), epochs=2)
    with running(source, epochs=2) as run:
        until(lambda: len(counts_of(run.trainer, range(20))) == 5)
    assert counts_of(run.trainer, range(20)) == {0: 2, 1: 2, 2: 2, 10: 1, 11: 1}
    with pytest.raises(ConfigError, match="HistoryThenStream"):
        Run(source, epochs=3).trainer.fit(source)


def test_ranks_go_on_with_the_stream_each_when_its_history_ends(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, range(10, 20), partitions=3)

    def trained(ranks: int) -> dict[int, int]:
        run = RankRun(
            model=IdCounts,
            source=lambda: HistoryThenStream(History(7), live(stream, stop_when_idle_secs=0.5)),
            optimizer=lambda parameters: __import__("torch").optim.SGD(parameters, lr=1.0),
            run={"clip_norm": None, "save_checkpoints_secs": 0, "model_dir": str(tmp_path / "run")},
        )
        found = {}
        for one in run.ranks(ranks):
            rows = one.tables["id"].entries()
            found |= dict(zip(rows.ids.tolist(), (-rows.values[:, 0]).tolist(), strict=True))
        return found

    expected = dict.fromkeys([*range(7), *range(10, 20)], 1)
    assert trained(2) == expected
    append(stream, range(20, 26))
    assert trained(3) == expected | dict.fromkeys(range(20, 26), 1)


def test_other_shards_cannot_continue_a_history() -> None:
    source = HistoryThenStream(History(6), WaitingSource())
    states = [source.shard(index, 2).state_dict() for index in range(2)]
    with pytest.raises(InvalidArgumentError, match=r"shards \[0, 1\] of 2 still read the history"):
        source.join_state_dicts(states)


def test_interrupted_batches_are_replayed_across_the_change() -> None:
    stream = WaitingSource(batch_size=1, ends=True)
    stream.append(10, 11, 12)
    source = HistoryThenStream(History(4), stream)
    begin, positions = source.state_dict(), []
    for batch in source:
        positions.append((batch["id"].tolist(), source.state_dict()))
    for number, (_, until_there) in enumerate(positions):
        again = HistoryThenStream(History(4), stream.shard(0, 1))
        again.load_state_dict(begin)
        replayed = [one for batch in again.replay(until_there) for one in batch["id"].tolist()]
        assert replayed == [one for ids, _ in positions[: number + 1] for one in ids]
        assert again.state_dict() == until_there


def archive(path: Path, ids: range, covered: dict[str, Any] | None, **columns: list[int]) -> str:
    table = pa.table({"id": list(ids), **columns})
    if covered is not None:
        table = table.replace_schema_metadata({b"monolith.stream": json.dumps(covered).encode()})
    pa.parquet.write_table(table, path)
    return str(path)


def covered(partition: int, first: int, end: int) -> dict[str, Any]:
    return {"partition": f"events/{partition}", "first_offset": first, "next_offset": end}


def test_files_of_the_joiner_say_where_the_stream_continues(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, range(20), partitions=2)
    files = [
        archive(tmp_path / "c.parquet", range(8, 14, 2), covered(0, 4, 7)),
        archive(tmp_path / "b.parquet", range(1, 6, 2), covered(1, 0, 3)),
        archive(tmp_path / "a.parquet", range(0, 8, 2), covered(0, 0, 4)),
    ]
    history = ParquetSource(files, ["id"], batch_size=4)
    source = live(stream, stop_when_idle_secs=0.3)
    start = start_after(Shuffle(history, buffer_rows=8, batch_size=4), source)
    assert start == {"events/0": 7, "events/1": 3}
    both = HistoryThenStream(history, source.starting_at(start))
    assert sorted(one for batch in both for one in batch["id"].tolist()) == list(range(20))
    lacking = ParquetSource([*files, _gap(tmp_path)], ["id"], batch_size=4)
    with pytest.raises(InvalidArgumentError, match="events/0 has files up to offset 7 and from 9 on: one is missing"):
        start_after(lacking, source)


def _gap(folder: Path) -> str:
    return archive(folder / "d.parquet", range(2), covered(0, 9, 11))


def test_without_offsets_the_newest_event_time_of_the_files_counts(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, range(2))
    times = [Column(name="time", shape=()), Column(name="id", shape=())]
    file = archive(tmp_path / "a.parquet", range(3), None, time=[100, 300, 200])
    history = ParquetSource(file, ["id", "time"], batch_size=4)
    assert start_after(history, live(stream, columns=times, event_time="time")) == 300_000
    assert start_after(history, live(stream, columns=times, event_time="time", event_time_unit="ms")) == 300


@pytest.mark.parametrize(
    ("history", "why"),
    [
        (lambda folder: History(3), "a History, which does not say where it ends"),
        (lambda folder: _files(folder, None), "name no offsets, and the stream has no event_time column"),
        (lambda folder: _files(folder, None, covered(0, 0, 3)), "a.parquet does not say which records it has"),
        (lambda folder: _files(folder, covered(7, 0, 3)), "of partition events/7, which .* does not have"),
    ],
)
def test_where_an_unknown_history_ends_is_asked_for(tmp_path: Path, history: Any, why: str) -> None:  # noqa: ANN401
    with pytest.raises(InvalidArgumentError, match=f"{why}.*start, end, a time such as"):
        start_after(history(tmp_path), live(stream_of(tmp_path, range(2))))


def _files(folder: Path, *ranges: dict[str, Any] | None) -> ParquetSource:
    files = [archive(folder / f"{name}.parquet", range(3), one) for name, one in zip("ab", ranges, strict=False)]
    return ParquetSource(files, ["id"], batch_size=4)


def test_the_stream_has_the_transforms_of_the_history(tmp_path: Path) -> None:
    keep = FilterByValue(column="id", op="ge", operand=3)
    history = Transformed(Shuffle(History(6), buffer_rows=4, batch_size=2), keep)
    stream = transformed_like(live(stream_of(tmp_path, range(6)), until_end=True), history)
    assert [one for batch in stream for one in batch["id"].tolist()] == [3, 4, 5]


def test_a_source_without_a_position_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="history: expected a source with a position"):
        HistoryThenStream([], WaitingSource())
    with pytest.raises(InvalidArgumentError, match="history: expected a source with an end"):
        HistoryThenStream(WaitingSource(), WaitingSource())


def test_the_log_names_the_stream_that_a_run_goes_on_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stream = stream_of(tmp_path, range(10, 12))
    only = FilterByValue(column="id", op="ge", operand=0)
    source = HistoryThenStream(History(1), Transformed(live(stream, until_end=True), only))
    with caplog.at_level("INFO", "monolith"):
        assert len(list(source)) == 2
    assert f"the history ended, the run goes on with {stream.url}" in caplog.messages
