"""Campaigns against a job (see `jobs`): deaths, power cuts and failing disks, and an oracle outside of the process."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from disk_shim import Disk, DiskShim, Ended, Nursery, Op, contents_of, read_journal, write_image

JOBS = ("plain_loop", "trainer", "variables")
"""The trainer is the slowest to start and restore, and writes with the code of the plain loop: quick campaigns spare it."""
CHANGES = {Op.WRITE, Op.TRUNCATE, Op.SYNC, Op.SYNC_FAILED, Op.RENAME, Op.UNLINK, Op.MKDIR, Op.RMDIR, Op.LINK, Op.MARK}


class Job(Protocol):
    """A module of `jobs`."""

    def check(self, folder: Path, least: int) -> int: ...


class Campaign:
    """One job, the folder it works in, and what it has promised so far."""

    def __init__(self, nursery: Nursery, scratch: Path) -> None:
        self.job = cast(Job, import_module(nursery.module))
        self.slow_to_restore = nursery.module == "jobs.trainer"
        self.nursery, self.scratch = nursery, scratch
        self.folder, self.journal = scratch / "folder", scratch / "journal"
        self.folder.mkdir()
        self.kept = 0

    def run(self, last: int, *, journal: bool = False, kill_after: float | None = None, **faults: int) -> Ended:
        """Let the job work until step `last` or its death; a death by another signal than SIGKILL is an error."""
        shim = DiskShim(
            library=self.nursery.library, root=self.folder, journal=self.journal if journal else None, **faults
        )
        ended = self.nursery.run(shim, str(self.folder), str(last), kill_after=kill_after)
        assert ended.returncode in (0, 1, -9), f"died of signal {-ended.returncode}: {ended.stderr}"
        self.kept = promised(ended.stdout, self.kept)
        return ended

    def check(self) -> int:
        """What is there now must be what was promised, or newer."""
        return self.job.check(self.folder, self.kept)

    def changes(self, last: int) -> int:
        """How many changes of the disk a run from nothing to step `last` makes, more or less."""
        ended = self.run(last, journal=True)
        assert ended.returncode == 0, ended.stderr
        count = sum(record.op in CHANGES for record in read_journal(self.journal))
        self.start_again()
        return count

    def start_again(self) -> None:
        """Forget everything."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.journal.unlink(missing_ok=True)
        self.kept = 0


def promised(lines: Iterable[str], before: int = 0) -> int:
    """The newest step that was reported as kept."""
    return max([before, *(int(line.split()[1]) for line in lines if line.startswith("kept "))])


def kill_often(campaign: Campaign, kills: int, *, steps: int, seed: int) -> int:
    """Kill runs at random changes of the disk and at random moments, each continuing where the one before died; how many died."""
    chance = random.Random(seed)
    usual = campaign.changes(steps)
    died = step = 0
    while died < kills:
        if chance.random() < 0.7:
            ended = campaign.run(step + steps, kill_at=chance.randint(1, usual))
        else:
            ended = campaign.run(step + steps, kill_after=chance.uniform(0, 0.3))
        assert ended.returncode in (0, -9), ended.stderr
        died += ended.returncode == -9
        found = campaign.check()
        assert found >= step, f"step {found} after a restart from {step}"
        step = found
    ended = campaign.run(step + 3)
    assert ended.returncode == 0, ended.stderr
    assert campaign.check() == step + 3
    return died


def cut_power(campaign: Campaign, cuts: int, *, steps: int, seed: int, deaths: int = 3, one_in: int = 0) -> int:
    """Record runs, the first of which are killed, then cut the power at random points and look at what is left; how many."""
    chance = random.Random(seed)
    usual = campaign.changes(steps)
    # The first ones die while they make folders: what they leave is there for the next, but its name is not durable.
    for death in [2, 3, 2, *(chance.randint(1, usual // 2) for _ in range(deaths))]:
        campaign.run(steps, journal=True, kill_at=death, one_in=one_in, seed=chance.randrange(2**32))
    ended = campaign.run(2 * steps, journal=True, one_in=one_in, seed=chance.randrange(2**32))
    assert one_in or ended.returncode == 0, ended.stderr
    records = read_journal(campaign.journal)
    points = [place for place, record in enumerate(records) if record.op in CHANGES]
    # Half of them early: what is promised first stands on less that has been synced.
    chosen = chance.choices(points[: len(points) // 4], k=cuts // 2) + chance.choices(points, k=cuts - cuts // 2)
    disk, done = Disk(), 0
    for place, record in enumerate(records):
        disk.apply(record)
        for _ in range(chosen.count(place)):
            image = campaign.scratch / "image"
            write_image(disk.image(chance.randrange(2**32)), image)
            try:
                campaign.job.check(image, promised(disk.marks()))
            except Exception as error:
                raise AssertionError(
                    f"power cut after change {place}, {record.op.name} {record.path}: {error}"
                ) from error
            shutil.rmtree(image)
            done += 1
    assert disk.contents() == contents_of(campaign.folder), "the journal does not tell all that happened"
    return done


def fail_often(campaign: Campaign, runs: int, *, steps: int, seed: int, one_in: int = 128) -> int:
    """Let one change in `one_in` fail, run after run; how many did."""
    chance = random.Random(seed)
    faults = step = 0
    for _ in range(runs):
        ended = campaign.run(step + steps, one_in=one_in, seed=chance.randrange(2**32))
        # A run may be refused as a whole, when it cannot read or write at its start; then with a typed error.
        assert ended.returncode == 0 or "monolith.errors.StorageError" in ended.stderr, ended.stderr
        faults += ended.faults
        step = campaign.check()
    assert campaign.run(step + 3).returncode == 0
    assert campaign.check() == step + 3
    return faults
