"""Danger: servers that run out of memory while nobody looks, or a run that stands still because of it."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith.errors import MemoryLimitError, UnavailableError
from monolith.ps import ParameterServer, ServerConfig, ServerStore
from monolith.state.restore_points import restore_points
from monolith.testing import sgd_table_config
from monolith.train import RunConfig, Trainer
from monolith.train.distributed.health import ServerHealthHook
from monolith.train.hooks import Hook
from training import ClickModel, batch_of

HEALTHY = {"bytes": 10, "memory_limit": 100, "out_of_memory": ""}
FULL = {"bytes": 95, "memory_limit": 100, "out_of_memory": "it holds 95 bytes; raise --memory-limit"}


def test_a_server_says_that_it_is_full_before_it_refuses_a_row() -> None:
    with (
        ParameterServer(ServerConfig(memory_limit=2**23)) as server,
        ServerStore([server.address], [sgd_table_config(64, name="item")]) as store,
    ):
        (health,) = store.health()
        assert (health["memory_limit"], health["out_of_memory"]) == (2**23, "")
        with suppress(MemoryLimitError):
            for number in itertools.count():
                store.assign("item", np.arange(1000) + 1000 * number, np.ones((1000, 64), dtype=np.float32))
        (health,) = store.health()
        assert "raise --memory-limit" in str(health["out_of_memory"])
        # A server that is full still answers and is still asked.
        with pytest.raises(MemoryLimitError):
            store.assign("item", np.array([-1]), np.ones((1, 64), dtype=np.float32))


def test_a_server_without_a_limit_is_never_full() -> None:
    with ParameterServer() as server, ServerStore([server.address]) as store:
        (health,) = store.health()
        assert (health["memory_limit"], health["out_of_memory"]) == (None, "")
        ServerHealthHook(store.health).check()


def test_a_run_ends_with_a_checkpoint_and_names_the_server(tmp_path: Path) -> None:
    told: list[Mapping[int, str]] = []
    reported = threading.Event()

    def report(servers: Mapping[int, str]) -> None:
        told.append(servers)
        reported.set()

    class Wait(Hook):
        def before_step(self, trainer: Trainer) -> None:
            assert trainer.step < 3 or reported.wait(60)

    model = ClickModel()
    health = iter([[HEALTHY, HEALTHY], [HEALTHY, FULL]])
    watch = ServerHealthHook(lambda: next(health), report=report, every_secs=0.001)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        config=RunConfig(model_dir=str(tmp_path)),
        hooks=[Wait(), watch],
    )
    with pytest.raises(MemoryLimitError, match="parameter server 1 is out of memory: it holds 95 bytes; raise"):
        trainer.fit(batch_of(number) for number in range(1000))
    assert told == [{1: FULL["out_of_memory"]}]
    assert [point.step for point in restore_points(str(tmp_path))] == [trainer.step]


def test_a_server_that_is_nearly_full_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="monolith")
    nearly = {"bytes": 81, "memory_limit": 100, "out_of_memory": ""}
    hook = ServerHealthHook(lambda: [HEALTHY, nearly])
    hook.check()
    hook.check()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "parameter server 1 holds 81 of 100 bytes"
    ]


def test_servers_that_do_not_answer_are_left_to_the_workers(caplog: pytest.LogCaptureFixture) -> None:
    asked = threading.Event()
    calls = itertools.count()

    def health() -> list[Mapping[str, object]]:
        if next(calls):
            asked.set()
        raise UnavailableError("nobody is there")

    class Wait(Hook):
        def before_step(self, trainer: Trainer) -> None:
            assert trainer.step < 2 or asked.wait(60)

    model = ClickModel()
    hooks = [Wait(), ServerHealthHook(health, every_secs=0.001)]
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), hooks=hooks)
    assert trainer.fit([batch_of(number) for number in range(4)]) == 4
    assert "the memory of the parameter servers is not known: nobody is there" in caplog.text
