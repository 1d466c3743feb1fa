"""Danger: a joiner that is killed writes an impression twice, or never, or with labels that are not those of its actions.

The oracle compares all actions with all impressions. Processes are killed at random moments while events come, and their units
move between one process and two.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from forked import Forked
from jobs import join_process

from join_oracle import QUIET, TYPES, Acted, Shown, config_for, join_all, joined, written
from monolith.data.join import JoinConfig
from monolith.streams import StreamWriter, open_stream

PARTITIONS = 2
DISORDER_MS = 3_000


class World:
    """Impressions and actions that come in about the order in which they happened."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 1_000_000
        self.shown: list[Shown] = []
        self.acted: list[Acted] = []
        self._writers: dict[str, StreamWriter] = {}
        for name in ("shown", "acted"):
            stream = open_stream(f"{folder}/{name}", partitions=PARTITIONS, settings=QUIET)
            self._writers[name] = stream.writer()
        self._due: list[Acted] = []

    def go_on(self, impressions: int) -> None:
        """Write so many impressions more, and the actions that have happened until then."""
        for _ in range(impressions):
            self.now += 100
            shown = Shown(f"k{len(self.shown)}", self.now - self.random.randrange(DISORDER_MS))
            copies = 1 + (self.random.random() < 0.05)
            for _ in range(copies):
                self._write("shown", shown.key, f'{{"key":"{shown.key}","time":{shown.time},"user":7}}')
            self.shown.append(shown)
            for type_ in TYPES:
                if self.random.random() < 0.2:
                    self._due.append(Acted(shown.key, shown.time + self.random.randint(-2_500, 11_000), type_))
        self.send(self.now)

    def send(self, until: int) -> None:
        """Write the actions up to an event time."""
        late = [action for action in self._due if action.time > until]
        for action in self._due:
            if action.time <= until:
                self.acted.append(action)
                value = f'{{"key":"{action.key}","time":{action.time},"action":"{action.type}"}}'
                self._write("acted", action.key, value)
        self._due = late

    def _write(self, stream: str, key: str, value: str) -> None:
        self._writers[stream].append(value.encode(), key=key.encode())

    def close(self) -> None:
        self.send(1 << 60)
        for writer in self._writers.values():
            writer.close()


def until(true: Callable[[], bool], secs: float = 60.0) -> None:
    deadline = time.monotonic() + secs
    while not true():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


def started(config: JoinConfig, count: int) -> Iterator[Forked]:
    for index in range(count):
        yield Forked(join_process.join, config.model_dump_json(), index, count)


def last_words(folder: Path, emit: str) -> dict[str, dict[str, float]]:
    """The labels of the last example of each impression. Repeats are an error, and so are several without a correction."""
    found = written(folder / "examples")
    assert len({one.origin for one in found}) == len(found), "an output is there twice"
    if emit != "fast":
        first = [one.fields["key"] for one in found if "correction" not in one.headers]
        assert len(set(first)) == len(first), "an impression is there twice"
    return {one.fields["key"]: {name: one.fields[name] for name in ("clicked", "value")} for one in found}


def kill_often(folder: Path, *, kills: int, seed: int, emit: str, spill: bool) -> None:
    config = config_for(
        folder, emit=emit, late="correction", out_of_order_secs=8, idle_secs=600, poll_records=40,
        state={"folder": f"{folder}/state", "spill": spill, "checkpoint_secs": 0.02, "memory_mb": 1},
    )  # fmt: skip
    world = World(folder, seed)
    with ExitStack() as stack:
        stack.callback(world.close)
        for number in range(kills):
            count = world.random.choice([1, 2])
            processes = list(started(config, count))
            for process in processes:
                stack.callback(process.close)
            # Killed before, at and after the start of joining, while events come.
            if number % 4:
                for process in processes:
                    assert process.receive() == "started"
            for _ in range(world.random.randint(0, 6)):
                world.go_on(20)
                time.sleep(world.random.random() * 0.03)
            for process in processes:
                process.kill()
    assert len(world.shown) > 20 * kills
    join_all(config)
    assert last_words(folder, emit) == joined(world.shown, world.acted, config)


@pytest.mark.parametrize(("emit", "spill"), [("window_end", False), ("window_end", True), ("on_positive", True)])
def test_a_joiner_that_is_killed_writes_every_impression_once(tmp_path: Path, emit: str, *, spill: bool) -> None:
    kill_often(tmp_path, kills=6, seed=len(emit) + spill, emit=emit, spill=spill)


@pytest.mark.slow
@pytest.mark.parametrize("emit", ["window_end", "on_positive", "fast"])
@pytest.mark.parametrize("spill", [False, True])
def test_a_joiner_that_is_killed_often_writes_every_impression_once(tmp_path: Path, emit: str, *, spill: bool) -> None:
    kill_often(tmp_path, kills=60, seed=random.SystemRandom().randrange(1 << 30), emit=emit, spill=spill)


def test_a_stopped_joiner_keeps_its_units_until_it_ends(tmp_path: Path) -> None:
    config = config_for(tmp_path, out_of_order_secs=8, idle_secs=600)
    world = World(tmp_path, 1)
    with ExitStack() as stack:
        stack.callback(world.close)
        first = Forked(join_process.join, config.model_dump_json(), 0, 1)
        stack.callback(first.close)
        assert first.receive() == "started"
        world.go_on(300)
        until(lambda: len(written_if_any(tmp_path)) > 0)
        assert first._process.pid is not None
        os.kill(first._process.pid, signal.SIGSTOP)
        second = Forked(join_process.join, config.model_dump_json(), 0, 1)
        stack.callback(second.close)
        assert second.receive() == "started"
        before = len(written(tmp_path / "examples"))
        world.go_on(200)
        assert len(written(tmp_path / "examples")) == before, "two joiners write one partition"
        first.kill()
        until(lambda: len(written(tmp_path / "examples")) > before)
        second.pipe.send("stop")
        assert second.receive()["impressions"] >= 500
        assert second.join() == 0
    join_all(config)
    assert last_words(tmp_path, "window_end") == joined(world.shown, world.acted, config)


def written_if_any(folder: Path) -> list[object]:
    return list(written(folder / "examples")) if (folder / "examples").exists() else []
