"""Danger: a record of a stream that is trained twice or not at all after a reader was killed, whatever else goes wrong meanwhile.

Readers are killed at random moments. Each writes what it trained on and the state of its source in one line, as a checkpoint has
both. Meanwhile records are written, some of them bad, partitions are added, and the number of readers changes.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from forked import Forked

from monolith.data import Column, MessageEncoder, StreamSource
from monolith.data.messages import StreamFormat
from monolith.streams import FolderStream, open_stream

COLUMNS = [Column(name="id", shape=()), Column(name="label", dtype="float32", shape=(), default=0.0)]
PARTITIONS_AT_MOST = 6


def source_of(folder: Path, format: StreamFormat, **options: Any) -> StreamSource:  # noqa: A002, ANN401 - any option
    # A folder of dead letters for each number of shards would do, one for all shards of all lives has to exist before.
    return StreamSource(
        str(folder / "events"), COLUMNS, batch_size=7, max_wait_secs=0.001, format=format, refresh_secs=0.05,
        dead_letters=open_stream(folder / "dead", settings={"fsync": "false"}), **options,
    )  # fmt: skip


def life(
    pipe: Connection,
    folder: Path,
    format: StreamFormat,  # noqa: A002
    shard: tuple[int, int],
    state: dict[str, Any] | None,
    checkpoint: Path,
    last: bool,
) -> None:
    """Train until killed, or in the `last` life until nothing is left."""
    source = source_of(folder, format, stop_when_idle_secs=1.0 if last else None).shard(*shard)
    if state is not None:
        source.load_state_dict(state)
    with checkpoint.open("a", buffering=1) as file:
        pipe.send("ready")
        for batch in source:
            ids = batch["id"].tolist()  # type: ignore[union-attr]
            file.write(json.dumps({"ids": ids, "state": source.state_dict()}) + "\n")


class Run:
    """Readers that are killed, and what they had saved when they were."""

    def __init__(self, folder: Path, format: StreamFormat, chance: random.Random) -> None:  # noqa: A002
        self.folder, self.format, self.chance = folder, format, chance
        self.stream = open_stream(folder / "events", partitions=2, settings={"fsync": "false"})
        open_stream(folder / "dead", partitions=4, settings={"fsync": "false"})
        self.writer = self.stream.writer()
        self.encoder = MessageEncoder(COLUMNS, format=format)
        self.trained: Counter[int] = Counter()
        self.good: set[int] = set()
        self.bad = 0
        self.number = 0
        self.state: dict[str, Any] | None = None
        self.lives = 0

    def write(self, records: int) -> None:
        """Append records of one to three rows, one in a hundred of them bad."""
        assert isinstance(self.stream, FolderStream)
        if self.chance.random() < 0.1 and len(self.stream.partitions()) < PARTITIONS_AT_MOST:
            self.writer.close()
            self.stream.add_partitions(1)
            self.writer = self.stream.writer()
        for _ in range(records):
            rows = self.chance.randrange(1, 4) if self.format == "arrow" else 1
            ids = list(range(self.number, self.number + rows))
            self.number += rows
            (value,) = self.encoder.encode_rows([{"id": each, "label": 1.0} for each in ids])
            timestamp = None
            if self.chance.random() < 0.01:
                self.bad += 1
                match self.chance.randrange(3):
                    case 0:
                        value = value[:-3]
                    case 1:
                        value += b" " * (9 << 20)
                    case _:
                        timestamp = 2**50
            else:
                self.good.update(ids)
            self.writer.append(value, timestamp=timestamp)

    def live(self, *, last: bool = False) -> None:
        """Let readers train, kill them one after the other, and take what they saved."""
        count = self.chance.randrange(1, 4)
        checkpoints = [self.folder / f"{self.lives}-{index}" for index in range(count)]
        self.lives += 1
        readers = [
            Forked(life, self.folder, self.format, (index, count), self.state, checkpoint, last)
            for index, checkpoint in enumerate(checkpoints)
        ]
        for reader in readers:
            assert reader.receive() == "ready"
        if last:
            assert [reader.join() for reader in readers] == [0] * count
        else:
            for reader in self.chance.sample(readers, count):
                for _ in range(self.chance.randrange(4)):
                    self.write(self.chance.randrange(1, 30))
                reader.kill()
        states = [self._take(path, index, count) for index, path in enumerate(checkpoints)]
        self.state = source_of(self.folder, self.format).join_state_dicts(states)

    def _take(self, checkpoint: Path, index: int, count: int) -> dict[str, Any]:
        shard = source_of(self.folder, self.format).shard(index, count)
        if self.state is not None:
            shard.load_state_dict(self.state)
        saved: dict[str, Any] = shard.state_dict()
        text = checkpoint.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():  # the last line may be torn
            entry = json.loads(line)
            self.trained.update(entry["ids"])
            saved = entry["state"]
        return saved

    def check(self) -> None:
        """Raise unless every good row was trained once, and every bad record is a dead letter at least once."""
        self.writer.close()
        assert [each for each, times in self.trained.items() if times > 1] == []
        assert set(self.trained) == self.good
        origins = {(facts["partition"], facts["offset"]) for facts in self._dead_letters()}
        assert len(origins) == self.bad

    def _dead_letters(self) -> Iterator[dict[str, bytes]]:
        dead = open_stream(self.folder / "dead")
        with dead.reader() as reader:
            reader.assign(dict.fromkeys(dead.partitions(), "start"))
            while found := reader.poll(1000, 0.1):
                for records in found:
                    assert records.headers is not None
                    for headers in records.headers:
                        yield {name.removeprefix("dead-letter."): value for name, value in headers}


def run(folder: Path, format: StreamFormat, seed: int, lives: int) -> None:  # noqa: A002
    chance = random.Random(seed)
    campaign = Run(folder, format, chance)
    campaign.write(50)
    for _ in range(lives):
        campaign.live()
    campaign.writer.flush()
    campaign.live(last=True)
    campaign.check()
    shutil.rmtree(folder)


@pytest.mark.parametrize("format", ["json", "arrow"])
def test_killed_readers_train_every_record_once(tmp_path: Path, format: StreamFormat) -> None:  # noqa: A002
    run(tmp_path / "run", format, seed=1, lives=8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("format", ["json", "arrow", "example", "instance"])
def test_killed_readers_train_every_record_once_many_times(tmp_path: Path, format: StreamFormat, seed: int) -> None:  # noqa: A002
    run(tmp_path / "run", format, seed, lives=30)
