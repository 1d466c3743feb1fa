"""Danger: servers that end while a worker still asks them; it would then wait for them without an end."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster_threads import BATCH, Cluster
from monolith.cluster.coordination import Members
from monolith.errors import DeadlineExceededError, StalePushError
from monolith.ps import ClientConfig, ServerStore
from monolith.ps.client.server_group import link_to
from monolith.train import Trainer
from monolith.train.hooks import Hook
from monolith.transport.calls import Call

SECONDS = 120


def phases(address: str) -> dict[int, str]:
    """How far the workers of a run are, as its first server knows it."""
    link = link_to(address, ClientConfig())
    try:
        members = Members.from_json(link.call(Call.MEMBERS).text).members
    finally:
        link.close()
    return {member.index: member.phase for member in members}


class Look(Hook):
    """What the first server says at the end; first raises `error`, once, if there is one."""

    address = ""

    def __init__(self, error: Exception | None = None) -> None:
        self.seen: list[dict[int, str]] = []
        self._error = error

    def end(self, trainer: Trainer, error: BaseException | None) -> None:
        (store,) = trainer.stores
        assert isinstance(store, ServerStore)
        self.address = store.addresses[0]
        self.seen.append(phases(self.address))
        raised, self._error = self._error, None
        if raised is not None:
            raise raised


def test_a_worker_has_finished_when_its_last_hook_has(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=2)
    cluster.servers()
    looks = [Look(), Look()]
    for worker in [cluster.start("worker", index, [BATCH], [looks[index]]) for index in range(2)]:
        worker.result(SECONDS)
    assert [seen[1] for seen in looks[1].seen] == ["running"]
    assert [seen[1] for seen in looks[0].seen] == ["finished"]


def test_a_worker_that_comes_back_has_not_finished(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=2)
    cluster.servers()
    look, between = Look(DeadlineExceededError("too slow")), []
    worker = cluster.start("worker", 1, [BATCH], [look])
    # Told between two attempts; the first cannot end before the chief has begun.
    cluster.trainers[1].on_save_metric = lambda name, value, tags: between.append(phases(look.address)[1])
    chief = cluster.start("worker", 0, [BATCH])
    assert worker.result(SECONDS) == chief.result(SECONDS) == 2
    assert between == ["running"]


def test_a_worker_that_broke_is_not_waited_for(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, num_ps=1, num_workers=2)
    cluster.servers()
    look = Look()
    worker = cluster.start("worker", 1, [BATCH], [Look(StalePushError("replaced"))])
    cluster.start("worker", 0, [BATCH], [look]).result(SECONDS)
    assert look.seen[0][1] == "finished"
    with pytest.raises(StalePushError, match="replaced"):
        worker.result(SECONDS)
