"""Danger: a launched job loses or doubles updates, hangs, or ends well with work undone when its processes fail.

The README's launch command with four workers and two servers. A campaign outside of it kills (SIGKILL), stops (SIGSTOP),
terminates (SIGTERM) and crashes (SIGSEGV, or an exception in a worker) roles at random, and counts afterwards what is in the
rows, in the dense parameter and in the last checkpoint. The long form makes 200 faults, or MONOLITH_CAMPAIGN_FAULTS.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from jobs import launched

from launched_job import Launch, is_alive
from monolith.ps import ClientConfig, ParameterServer, ServerConfig, ServerStore, tables_of

_log = logging.getLogger(__name__)

SERVERS, WORKERS = 2, 4
ROLES = [*(f"ps {index}" for index in range(SERVERS)), *(f"worker {index}" for index in range(WORKERS))]
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "terminated": signal.SIGTERM, "crashed": signal.SIGSEGV}
LIVENESS = {
    "heartbeat_secs": 0.5,
    "lease_secs": 3.0,
    "hang_secs": 4.0,
    "startup_secs": 120.0,
    "backoff_secs": 0.1,
    "max_backoff_secs": 0.5,
    "grace_secs": 30.0,
    "restarts": 100_000,
}
AHEAD = 12
"""Batches that every worker may train around each fault."""
PATIENCE = 240.0
"""Seconds after which a job that makes no progress hangs."""


class Campaign:
    """A job, how far it may go, and what was done to it."""

    def __init__(self, folder: Path, launch: Launch, seed: int) -> None:
        self.folder, self.launch, self.chance = folder, launch, random.Random(seed)
        self.allowed = 0
        self.faults: Counter[str] = Counter()
        self.recoveries: list[float] = []

    def allow(self, more: int) -> None:
        self.allowed += more
        new = self.folder / "allowed.new"
        new.write_text(str(self.allowed))
        new.replace(self.folder / "allowed")

    def wait_for_workers(self) -> None:
        """Until every worker has trained what it may."""
        target = f"waits at {self.allowed}"
        self.until(lambda: all(self.place(f"worker {index}") == target for index in range(WORKERS)))

    def place(self, role: str) -> str:
        """Where a role that runs now waits; "" for one that does not."""
        for event in reversed(self.launch.events):
            if event.get("role") == role and event["event"] in ("started", "restarting"):
                return ""
            if event.get("role") == role and event.get("text", "").startswith("waits at"):
                return str(event["text"])
        return ""

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.launch.is_running, f"the job ended: {self.launch.end()[1]}"
            assert time.monotonic() < deadline, f"the job hangs; {self.folder}/logs has what its roles wrote"
            time.sleep(0.05)

    def fault(self, role: str, kind: str) -> None:
        """Do it to the newest process of a role that runs."""
        self.until(lambda: bool(self.launch.pids(role)) and is_alive(self.launch.pids(role)[-1]))
        _log.info("fault %d: %s %s", self.faults.total() + 1, role, kind)
        if kind == "raised":
            (self.folder / f"raise-{role.partition(' ')[2]}").touch()
        else:
            with suppress(ProcessLookupError):
                os.kill(self.launch.pids(role)[-1], SIGNALS[kind])
        self.faults[f"{role.partition(' ')[0]} {kind}"] += 1

    def any_fault(self, *but: str) -> tuple[str, str]:
        role = self.chance.choice([role for role in ROLES if role not in but])
        return role, self.chance.choice(kinds_of(role))

    def one_round(self, role: str, kind: str, *, twice: float) -> None:
        """Make a fault while all train, or by the chance `twice` two, and wait until all have trained what they may."""
        starts = {role: len(self.launch.pids(role)) for role in ROLES}
        victims = {role}
        self.allow(AHEAD)
        time.sleep(self.chance.uniform(0.0, 0.5))
        began = time.monotonic()
        self.fault(role, kind)
        if self.chance.random() < twice:
            other, its_kind = self.any_fault(role)
            victims.add(other)
            self.fault(other, its_kind)
        # A worker that finds its bomb only when it waits for the next batch is waited for too.
        self.until(lambda: all(len(self.launch.pids(one)) > starts[one] for one in victims))
        self.wait_for_workers()
        self.recoveries.append(time.monotonic() - began)

    def report(self, lost: int, doubled: int) -> str:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(self.faults.items()))
        return (
            f"{self.faults.total()} faults: {kinds}; lost {lost}, doubled {doubled}, hangs 0, exits with work undone 0; recovery "
            f"median {statistics.median(self.recoveries):.1f} s, worst {max(self.recoveries):.1f} s"
        )


def kinds_of(role: str) -> list[str]:
    return [*SIGNALS, *(["raised"] if role.startswith("worker") else [])]


@contextmanager
def campaign(folder: Path, batches: int, seed: int) -> Iterator[Campaign]:
    (folder / "allowed").write_text("0")
    arguments = ["--ps", str(SERVERS), "--workers", str(WORKERS), "--model-dir", "model"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MONOLITH_START_TIMEOUT_SECS": "120"}
    # Workers that wait for the campaign come by no barrier.
    environment["MONOLITH_MAX_PENDING_SECONDS_FOR_BARRIER"] = "1"
    launch = Launch(
        folder,
        *arguments,
        "--liveness",
        json.dumps(LIVENESS),
        str(launched.__file__),
        str(batches),
        environment=environment,
    )
    try:
        yield Campaign(folder, launch, seed)
    finally:
        launch.close()


def counted_on_servers(folder: Path) -> tuple[torch.Tensor, float]:
    """What the folders of the servers have: the rows, and the dense parameter."""
    configs = [ServerConfig(folder=folder / "model" / "ps" / str(index)) for index in range(SERVERS)]
    servers = [ParameterServer(config) for config in configs]
    try:
        features = launched.Counting().embeddings.features
        with ServerStore([server.address for server in servers], tables_of(features), config=ClientConfig()) as store:
            dense = [server._dispatcher._state.dense for server in servers]
            batches = [one.read(["batches"])[0] for one in dense if "batches" in one.declared()]
            return launched.counted(store), -float(batches[0].item())
    finally:
        for server in servers:
            server.close()


QUICK = [("ps 0", "killed"), ("worker 0", "stopped"), ("ps 1", "terminated"), ("worker 2", "killed")]


@pytest.mark.parametrize(
    ("first", "faults", "seed"),
    [
        pytest.param(QUICK, len(QUICK), 1, id="quick"),
        pytest.param([], int(os.environ.get("MONOLITH_CAMPAIGN_FAULTS", "200")), 2, id="long", marks=pytest.mark.slow),
    ],
)
def test_every_batch_counts_once_whoever_is_killed_stopped_terminated_or_crashes(
    tmp_path: Path, first: list[tuple[str, str]], faults: int, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = AHEAD * (faults + 1)
    with campaign(tmp_path, batches, seed) as job:
        # Each kind of fault hits each role first; then it is chance.
        plan = [(role, kind) for role in ROLES for kind in kinds_of(role)]
        job.chance.shuffle(plan)
        plan += reversed(first)
        job.wait_for_workers()
        while job.faults.total() < faults:
            job.one_round(*(plan.pop() if plan else job.any_fault()), twice=0.0 if first else 0.25)
        job.allow(batches)
        code, errors = job.launch.end(PATIENCE)
        assert code == 0, errors
        assert not any(map(is_alive, job.launch.all_pids()))
    wanted = launched.expected(batches, workers=WORKERS)
    on_servers, dense = counted_on_servers(tmp_path)
    off = on_servers - wanted
    lost, doubled = int(-off.clamp(max=0).sum()), int(off.clamp(min=0).sum())
    with capsys.disabled():
        print("\n" + job.report(lost, doubled))  # noqa: T201 - for docs/guarantees.md
    assert (lost, doubled, dense) == (0, 0, WORKERS * batches)
    saved, saved_dense = launched.counted_in_checkpoint(tmp_path)
    assert (saved - wanted).abs().sum() == 0, "the last checkpoint has all of it"
    assert saved_dense == WORKERS * batches
