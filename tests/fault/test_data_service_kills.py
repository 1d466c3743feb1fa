"""Danger: a data worker, dispatcher or trainer that dies, and rows that are then trained twice or never."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from data_service_processes import Role, run_dispatcher, run_trainer, run_worker, wait_until
from forked_processes import CONTEXT
from monolith.dataservice import DatasetConfig

TRAINERS = 2


def dataset(folder: Path, rows: list[int]) -> DatasetConfig:
    """Files of so many rows, numbered through."""
    begin = 0
    for place, count in enumerate(rows):
        lines = [str(number) for number in range(begin, begin + count)]
        (folder / f"{place:02}.csv").write_text("\n".join(["x", *lines]) + "\n")
        begin += count
    fields = {"columns": [{"name": "x", "shape": []}], "batch_size": 3}
    return DatasetConfig(kind="csv", paths=(f"{folder}/*.csv",), fields=fields)


class Service:
    """All roles of a job, and how far its trainers are."""

    def __init__(self, folder: Path, data: DatasetConfig, *, workers: int) -> None:
        port = CONTEXT.Value("i", 0)
        self.steps = CONTEXT.Value("i", 0)
        self.kept = [folder / f"trainer-{trainer}.json" for trainer in range(TRAINERS)]
        self.dispatcher = Role(run_dispatcher, folder / "dispatcher", port)
        wait_until(lambda: port.value != 0)
        address = f"127.0.0.1:{port.value}"
        self.workers = [Role(run_worker, address) for _ in range(workers)]
        self.trainers = [
            Role(run_trainer, address, data, trainer, TRAINERS, kept, self.steps)
            for trainer, kept in enumerate(self.kept)
        ]

    def roles(self) -> list[Role]:
        return [self.dispatcher, *self.workers, *self.trainers]

    def rows(self) -> list[int]:
        """What the trainers trained, as of their last checkpoints, once all have ended."""
        for trainer in self.trainers:
            trainer.process.join(timeout=120)
            assert trainer.process.exitcode == 0
        return sorted(row for kept in self.kept for row in json.loads(kept.read_text())["rows"])


@contextmanager
def running(folder: Path, data: DatasetConfig, *, workers: int) -> Iterator[Service]:
    service = Service(folder, data, workers=workers)
    try:
        yield service
    finally:
        for role in service.roles():
            role.end()


def campaign(tmp_path: Path, *, seed: int, victims: Sequence[str], files: int) -> None:
    rng = random.Random(seed)
    (tmp_path / "data").mkdir()
    counts = [rng.choice([0, 1, 5, 30]) for _ in range(files)]
    total = sum(counts)
    with running(tmp_path, dataset(tmp_path / "data", counts), workers=3) as service:
        for turn, victim in enumerate(victims):
            # Somewhere in the middle, by what was done and not by the clock.
            mark = (turn + 1) * total // 3 // (len(victims) + 2) + rng.randrange(5)
            wait_until(lambda mark=mark: service.steps.value >= mark or not any(_alive(t) for t in service.trainers))
            group = {"worker": service.workers, "trainer": service.trainers, "dispatcher": [service.dispatcher]}
            role = rng.choice(group[victim.removeprefix("paused ")])
            role.pause() if victim.startswith("paused") else role.kill_and_restart()
        assert service.rows() == list(range(total))


def _alive(role: Role) -> bool:
    return role.process.is_alive()


def test_data_workers_that_are_killed_or_hang_cost_no_row_and_double_none(tmp_path: Path) -> None:
    campaign(tmp_path, seed=1, victims=["worker", "paused worker", "worker", "worker"], files=30)


@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_killed_every_row_is_trained_once(tmp_path: Path, seed: int) -> None:
    campaign(tmp_path, seed=seed, victims=["trainer", "dispatcher", "trainer", "worker", "trainer"], files=40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_whatever_is_killed_every_row_is_trained_once_campaign(tmp_path: Path, seed: int) -> None:
    victims = random.Random(seed).choices(["worker", "trainer", "dispatcher", "worker"], k=20)
    campaign(tmp_path, seed=seed, victims=victims, files=200)
