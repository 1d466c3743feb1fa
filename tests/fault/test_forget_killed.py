"""Danger: a row was forgotten, the receipt was given, and a crash right after it brings the row back from a log or checkpoint of
one of the servers or ranks."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
import torch
from test_follow_killed_run import PROBE, launched, processes_of

import followed_job
from followed_tables import until
from monolith.cli import main
from monolith.errors import MonolithError
from monolith.follow import Writer
from monolith.follow.calls import Confirm, Confirmed, FollowCall
from monolith.serve import export_model, load
from monolith.serve.follow import RunWriters, TrainingFollower
from monolith.table import EmbeddingTable
from monolith.train.control_server import ControlClient

FIRST = list(itertools.islice(followed_job.data(), 4))
USERS, ITEMS = (torch.cat([batch[name] for batch in FIRST]).unique()[:10].tolist() for name in followed_job.COLUMNS)
IDS = (*USERS, *ITEMS)
OTHERS = [one for name in followed_job.COLUMNS for one in FIRST[0][name].tolist() if one not in IDS]
SECONDS = 120.0


@contextmanager
def stopped(folder: Path, *options: str) -> Iterator[tuple[int, ControlClient]]:
    """A launched run that has trained some steps and is held. Yields the launcher's process id, and a client."""
    launcher = launched(folder, *options)
    try:
        until(lambda: _steps(folder) > 10, "the run")
        with ControlClient.of_run(str(folder), timeout=SECONDS) as client:
            client.stop()
            until(lambda: not client.block_status().unblocked)
            yield launcher.pid, client
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()


def _steps(folder: Path) -> int:
    try:
        with ControlClient.of_run(str(folder), timeout=SECONDS) as client:
            return client.status().step
    except MonolithError:
        return 0


def rows(client: ControlClient) -> int:
    """How many of the ids have rows."""
    return sum(int(one.entries.found.sum()) for one in client.features(followed_job.COLUMNS, IDS).values())


def copied(tables: Mapping[str, EmbeddingTable]) -> int:
    return sum(int(tables[name].contains(list(IDS)).sum()) for name in followed_job.COLUMNS)


def has_follower(writer: Writer) -> bool:
    """Whether the writer knows of a replica, which counts once it has asked for changes."""
    with closing(writer.connect()) as link:
        answer = link.call(FollowCall.CONFIRM, Confirm(wait=0.0).model_dump_json())
    return Confirmed.from_json(answer.text).followers == 1


def saved(folder: Path) -> dict[str, EmbeddingTable]:
    """The newest state on disk, read by another process than the run."""
    trainer = followed_job.estimator(str(folder)).trainer
    assert trainer.restore()
    return {name: shards[0] for name, shards in trainer.tables().items()}


@pytest.mark.parametrize(
    ("options", "holders"),
    [(["--workers", "2", "--ps", "2"], 3), (["--ranks", "2"], 2)],
    ids=["servers", "ranks"],
)
def test_forgotten_rows_stay_forgotten(
    tmp_path: Path, options: Sequence[str], holders: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    predictor = load(export_model(followed_job.Clicks(), PROBE, tmp_path / "export", heads=[followed_job.CLICK]))
    with stopped(folder, *options) as (launcher, client):
        assert rows(client) == 20
        follower = TrainingFollower.of_run(predictor, RunWriters(str(folder)))
        try:
            assert follower.wait_until_read(SECONDS), follower.describe()
            (store,) = predictor.stores.values()
            assert copied(store.tables) == 20
            run, servers = RunWriters(str(folder)), client.describe().servers
            until(lambda: all(map(has_follower, [*run.writers(), *map(run.server, servers)])), "the follower")
            capsys.readouterr()
            assert main(["forget", str(folder), *map(str, IDS), "--json"]) == 0
            receipt = json.loads(capsys.readouterr().out)
            # The whole run is killed before anything else can be written.
            os.killpg(launcher, signal.SIGKILL)
            assert receipt["removed"] == 20
            assert len(receipt["replicas"]) == holders
            assert [one["confirmed"] for one in receipt["replicas"].values()] == [1] * holders
            assert copied(store.tables) == 0
            # Rows that were there before are in the logs of the servers or ranks, and named.
            assert {Path(one["path"]).parents[2].name for one in receipt["files"]} == {"ps"}
            assert receipt["unread"] == []
        finally:
            follower.close()
    assert copied(saved(folder)) == 0
    assert all(len(table) > 20 for table in saved(folder).values())


def test_a_server_that_is_killed_after_the_answer_restores_itself_without_the_row(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with stopped(folder, "--workers", "1", "--ps", "2") as (launcher, client):
        servers = [pid for pid in processes_of(launcher) if " ps" in command_of(pid)]
        assert len(servers) == 2
        held = {name: one.entries.found.sum() for name, one in client.features(followed_job.COLUMNS, OTHERS).items()}
        assert sum(one.removed for one in client.forget(IDS).tables.values()) == 20
        for pid in servers:
            os.kill(pid, signal.SIGKILL)
        # The launcher starts them again, and they restore themselves.
        assert rows(client) == 0
        left = {name: one.entries.found.sum() for name, one in client.features(followed_job.COLUMNS, OTHERS).items()}
        assert left == held
        assert any(left.values())


def command_of(pid: int) -> str:
    return subprocess.run(["ps", "-o", "args=", "-p", str(pid)], capture_output=True, text=True).stdout
