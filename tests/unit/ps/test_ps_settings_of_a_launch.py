"""Danger: two workers of one job that run different code or configuration, and train with the settings that were declared
last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from monolith import ConfigError, Segment, TableConfig
from monolith.errors import CheckpointMismatchError
from monolith.ps import ClientConfig, DenseOptimizer, ParameterServer, ServerParameters, ServerStore
from monolith.ps.protocol.messages import DeclaredTable
from monolith.ps.server.served_tables import ServedTables
from monolith.table import SGD, Zeros
from monolith.train.distributed.config import RunnerConfig
from monolith.train.distributed.worker import client_config


def table(rate: float) -> TableConfig:
    segment = Segment(dim=1, initializer=Zeros(), optimizer=SGD(learning_rate=rate))
    return TableConfig(name="item", segments=(segment,))


def worker(server: ParameterServer, index: int, run: str, epoch: int = 1, rate: float = 1.0) -> ServerStore:
    config = ClientConfig(worker=f"worker-{index}-of-2", epoch=epoch, run=run)
    return ServerStore([server.address], [table(rate)], config=config)


def place(store: ServerStore, rate: float, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> ServerParameters:
    clear = kind is not torch.optim.SGD
    return ServerParameters(store, {"w": torch.zeros(1)}, DenseOptimizer.of(kind, lr=rate), replace_other=clear)


def test_the_settings_of_another_table_are_refused_within_a_launch() -> None:
    with ParameterServer() as server, worker(server, 0, "launch-1") as first:
        with pytest.raises(
            ConfigError, match=r"learning_rate was 1.0, is now 0.5: two workers of the launch 'launch-1'"
        ):
            worker(server, 1, "launch-1", rate=0.5)
        assert first.configs()["item"] == table(1.0)
        # A worker that is started again, with the same settings, is welcome.
        worker(server, 0, "launch-1", epoch=2).close()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda store: place(store, 0.5), "its optimizer: lr = 1.0 and 0.5; run the same code"),
        (lambda store: place(store, 1.0, torch.optim.Adam), "its optimizer: torch.optim.SGD and torch.optim.Adam; run"),
    ],
)
def test_so_are_those_of_a_dense_optimizer(make: Callable[[ServerStore], ServerParameters], said: str) -> None:
    with ParameterServer() as server, worker(server, 0, "launch-1") as first, worker(server, 1, "launch-1") as second:
        origin = place(first, 1.0)
        with pytest.raises(ConfigError, match=said):
            make(second)
        assert origin.settings()["w"].declared.settings["lr"] == 1.0
        assert not place(second, 1.0).created


def test_the_next_launch_may_declare_others_and_is_then_one_itself(caplog: pytest.LogCaptureFixture) -> None:
    with ParameterServer() as server:
        with worker(server, 0, "launch-1") as first:
            place(first, 1.0)
        with worker(server, 1, "launch-2", epoch=2, rate=0.5) as first:
            assert place(first, 0.5).settings()["w"].current.settings["lr"] == 0.5
            assert "lr was declared as 1.0, a worker now declares 0.5" in caplog.text
            with pytest.raises(ConfigError, match="launch 'launch-2' declare different settings"):
                worker(server, 0, "launch-2", epoch=2, rate=1.0)
            with (
                worker(server, 0, "launch-2", epoch=3, rate=0.5) as second,
                pytest.raises(ConfigError, match="two workers"),
            ):
                place(second, 1.0)


def test_a_launch_that_declares_what_was_there_is_held_to_it() -> None:
    with ParameterServer() as server:
        with worker(server, 0, "launch-1") as first:
            place(first, 1.0)
        with worker(server, 0, "launch-2", epoch=2) as first:
            place(first, 1.0)
            with pytest.raises(ConfigError, match="launch 'launch-2'"):
                worker(server, 1, "launch-2", rate=0.5)
            with (
                worker(server, 1, "launch-2", epoch=2) as second,
                pytest.raises(ConfigError, match="launch 'launch-2'"),
            ):
                place(second, 0.5)


def test_another_class_in_the_next_launch_is_still_refused_with_its_ways_out() -> None:
    with ParameterServer() as server:
        with worker(server, 0, "launch-1") as first:
            place(first, 1.0)
        adam = DenseOptimizer.of(torch.optim.Adam)
        with worker(server, 0, "launch-2", epoch=2) as second, pytest.raises(CheckpointMismatchError, match="clear_nn"):
            ServerParameters(second, {"w": torch.zeros(1)}, adam)


def test_settings_of_a_table_that_another_worker_makes_meanwhile_are_not_ignored() -> None:
    with ParameterServer() as server:
        real = ServedTables.declare

        def declare(tables: ServedTables, wanted: Sequence[DeclaredTable], *, run: str = "") -> None:
            # As by a worker that comes between.
            real(tables, [DeclaredTable(config=table(1.0))])
            real(tables, wanted, run=run)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ServedTables, "declare", declare)
            with worker(server, 1, "", rate=0.5) as second:
                assert second.configs()["item"] == table(0.5)


def test_the_workers_of_a_runner_say_which_launch_they_belong_to() -> None:
    assert client_config(RunnerConfig(uuid="launch-7"), epoch=1).run == "launch-7"
