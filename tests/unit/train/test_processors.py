"""Threads and processors. The danger: a container with two processors of a large machine runs a thread for each of the
machine's, or a run crawls because others use its processors, without a message.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import monolith
from monolith.train import RunConfig, Trainer
from monolith.train.processors import (
    StarvationHook,
    _is_bound,
    _seconds_waited,
    available_processors,
    use_threads,
)
from training import ClickModel, Stream


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads(), monolith.get_num_threads()
    yield
    torch.set_num_threads(before[0])
    monolith.set_num_threads(before[1])


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 64),
        ({"sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        ({"proc/self/cgroup": "0::/job/a\n", "sys/fs/cgroup/job/cpu.max": "300000 100000\n"}, 3),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n",
                "sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
            64,
        ),
    ],
)
def test_the_quota_of_a_container_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert available_processors(write(tmp_path, files)) == expected


def test_the_affinity_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5, 7})
    assert available_processors(write(tmp_path, {"sys/fs/cgroup/cpu.max": "900000 100000"})) == 3


def test_a_run_uses_the_threads_it_is_told_to() -> None:
    Trainer(ClickModel(), torch.optim.SGD(ClickModel().parameters()), config=RunConfig(threads=1)).fit(Stream(1))
    assert (torch.get_num_threads(), monolith.get_num_threads()) == (1, 1)


def test_without_a_word_no_more_threads_than_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    monkeypatch.setattr("monolith.train.processors.available_processors", lambda: 1)
    assert use_threads(None) == 1
    assert (torch.get_num_threads(), monolith.get_num_threads()) == (1, 1)


@pytest.mark.parametrize(("ranks", "bound", "expected"), [(2, False, 2), (8, False, 1), (2, True, 4), (1, False, 4)])
def test_ranks_of_a_machine_share_its_processors(
    monkeypatch: pytest.MonkeyPatch, ranks: int, bound: bool, expected: int
) -> None:
    torch.set_num_threads(4)
    monkeypatch.setattr("monolith.train.processors.available_processors", lambda: 4)
    monkeypatch.setattr("monolith.train.processors._is_bound", lambda: bound)
    monkeypatch.setenv("MONOLITH_LOCAL_SIZE", str(ranks))
    assert use_threads(None) == expected
    assert torch.get_num_threads() == expected
    assert monolith.get_num_threads() <= expected
    assert use_threads(3) == 3, "what a person asks for is not shared"


@pytest.mark.parametrize(("cpuset", "expected"), [("0-3,8\n", True), ("0-1\n", False), ("", None)])
def test_a_process_is_bound_if_its_container_has_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpuset: str, expected: bool | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    root = write(tmp_path, {"sys/fs/cgroup/cpuset.cpus.effective": cpuset})
    assert _is_bound(root) is (True if expected is None else expected)


def test_more_threads_than_processors_are_used_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("monolith.train.processors.available_processors", lambda: 1)
    assert use_threads(2) == 2
    assert "2 asked for, but this process may use only 1 processors" in caplog.text


@pytest.mark.parametrize(("waited", "lines"), [(0.1, 0), (0.6, 1)])
def test_a_run_that_waits_for_a_processor_says_so_once(
    caplog: pytest.LogCaptureFixture, waited: float, lines: int
) -> None:
    now = iter(range(0, 1000, 5))
    seconds = iter(range(1000))
    model = ClickModel()
    hook = StarvationHook(every_secs=10.0, clock=lambda: float(next(now)), waited=lambda: next(seconds) * waited * 15.0)
    run = Trainer(model, torch.optim.SGD(model.parameters()), hooks=[hook])
    with caplog.at_level(logging.WARNING):
        run.fit(Stream(12))
    assert caplog.text.count("this run waited for a processor") == lines


@pytest.mark.parametrize(("threads", "advice"), [(1, "it has 1 thread on"), (2, "or fewer `threads`")])
def test_one_thread_is_not_told_to_use_fewer(threads: int, advice: str, caplog: pytest.LogCaptureFixture) -> None:
    hook, model = (
        StarvationHook(clock=iter([0.0, 60.0, 60.0]).__next__, waited=iter([0.0, 59.0]).__next__),
        ClickModel(),
    )
    run = Trainer(model, torch.optim.SGD(model.parameters()), config=RunConfig(threads=threads), hooks=[hook])
    with caplog.at_level(logging.WARNING):
        run.fit(Stream(1))
    assert advice in caplog.text
    assert ("fewer" in caplog.text) is (threads > 1)


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="needs the scheduler's counters of Linux")
def test_a_thread_without_a_processor_is_seen_to_wait() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    rival = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # inherits the one processor
    try:
        before, deadline = _seconds_waited(), time.monotonic() + 60
        while _seconds_waited() - before < 0.05:
            assert time.monotonic() < deadline, "two busy threads on one processor, and none has waited"
    finally:
        rival.kill()
        rival.wait()
        os.sched_setaffinity(0, allowed)
