"""Danger: a run on a stream is killed or stopped, and afterwards a record has been trained twice, or never.

Each record's id counts in a row. The run is killed at random, in the middle of steps, flushes and checkpoints, while records come
in bursts, and its last life must have counted what was written, whatever was lost of the lives before.
"""

from __future__ import annotations

import random
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import orjson
import pytest
import torch
from forked import Forked

from monolith import RunConfig, Trainer
from monolith.data import Column, HistoryThenStream, StreamSource
from monolith.data.transforms import FilterByValue, Transformed
from monolith.streams import Stream, open_stream
from monolith.train import StepResult
from monolith.train.hooks import Hook
from waiting_run import IdCounts, counts_of

COLUMNS = [Column(name="id", shape=()), Column(name="label", dtype="float32", shape=(), default=1.0)]
IDS = 50


class Told(Hook):
    """Says which step was made, or that nothing comes, and stops when it is asked to."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def after_start(self, trainer: Trainer) -> None:
        self.pipe.send("started")

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self.pipe.send(result.step)
        self.heed(trainer)

    def while_waiting(self, trainer: Trainer) -> None:
        self.heed(trainer)

    def heed(self, trainer: Trainer) -> None:
        if self.pipe.poll():
            trainer.interrupt(str(self.pipe.recv()))


def trainer_of(folder: Path, *hooks: Hook, postpush: bool) -> Trainer:
    model = IdCounts()
    config = RunConfig(
        model_dir=str(folder / "run"),
        clip_norm=None,
        threads=1,
        log_flush_secs=0.01,
        save_checkpoints_secs=0.2,
        enable_embedding_postpush=postpush,
    )
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), config=config, hooks=hooks)


def source_of(folder: Path, **options: float) -> HistoryThenStream:
    stream = StreamSource(
        str(folder / "events"), COLUMNS, batch_size=7, max_wait_secs=0.005, refresh_secs=0.05, **options
    )
    history = StreamSource(str(folder / "history"), COLUMNS, batch_size=7, until_end=True)
    return HistoryThenStream(history, stream)


def life(pipe: Connection, folder: Path, postpush: bool) -> None:
    trainer_of(folder, Told(pipe), postpush=postpush).fit(source_of(folder))


def write(stream: Stream, ids: list[int]) -> None:
    with stream.writer() as writer:
        for number in ids:
            writer.append(orjson.dumps({"id": number}))


@pytest.mark.parametrize(
    ("rounds", "seed"), [pytest.param(6, 5, id="quick"), pytest.param(60, 6, id="long", marks=pytest.mark.slow)]
)
def test_each_record_counts_once_whenever_the_run_is_killed(tmp_path: Path, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    history = [chance.randrange(IDS) for _ in range(60)]
    write(open_stream(tmp_path / "history", partitions=2), history)
    written, stream = list(history), open_stream(tmp_path / "events", partitions=2)
    for number in range(rounds):
        with ExitStack() as stack:
            worker = Forked(life, tmp_path, bool(number % 2))
            stack.callback(worker.close)
            assert worker.receive() == "started"
            for _ in range(chance.randrange(4)):
                burst = [chance.randrange(IDS) for _ in range(chance.choice([1, 5, 200]))]
                write(stream, burst)
                written += burst
                worker.receive()  # a step: of these records, or of some before them
            if number % 3 == 2:
                worker.pipe.send("stop")
                with suppress(EOFError):
                    while True:
                        worker.receive()
                assert worker.join() == 0
            else:
                # Wherever it is by now: it may have trained nothing, some, or all, and be in the middle of a save.
                worker.kill()
    last = trainer_of(tmp_path, postpush=False)
    last.fit(source_of(tmp_path, stop_when_idle_secs=0.5))
    assert counts_of(last, range(IDS)) == {one: written.count(one) for one in sorted(set(written))}


class Waits(Hook):
    """Says when nothing has come yet."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def while_waiting(self, trainer: Trainer) -> None:
        self.pipe.send("waits")


def source_from_end(folder: Path, kind: str, **options: float) -> StreamSource | HistoryThenStream | Transformed:
    stream = StreamSource(str(folder / "events"), COLUMNS, batch_size=7, start="end", **options)
    if kind == "transformed":
        return Transformed(stream, FilterByValue(column="id", op="ge", operand=0))
    history = StreamSource(str(folder / "history"), COLUMNS, batch_size=7, until_end=True)
    return HistoryThenStream(history, stream) if kind == "history" else stream


def life_from_end(pipe: Connection, folder: Path, kind: str) -> None:
    trainer_of(folder, Waits(pipe), postpush=False).fit(source_from_end(folder, kind))


@pytest.mark.parametrize("kind", ["stream", "history", "transformed"])
def test_a_run_killed_before_its_first_batch_does_not_begin_at_a_later_end(tmp_path: Path, kind: str) -> None:
    for name in ("history", "events"):
        write(open_stream(tmp_path / name, partitions=2), [1, 2, 3])
    with ExitStack() as stack:
        worker = Forked(life_from_end, tmp_path, kind)
        stack.callback(worker.close)
        assert worker.receive() == "waits"
        # It is stopped, so that it cannot train these records.
        worker.stop()
        write(open_stream(tmp_path / "events"), [7, 8, 8, 9])
        worker.kill()
    last = trainer_of(tmp_path, postpush=False)
    last.fit(source_from_end(tmp_path, kind, stop_when_idle_secs=0.3))
    # Those of the history once, and none of the stream that were there when the run began.
    assert counts_of(last, range(IDS)) == {**({1: 1, 2: 1, 3: 1} if kind == "history" else {}), 7: 1, 8: 2, 9: 1}
