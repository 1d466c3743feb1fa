"""Danger: a job is restarted with other settings of its tables, and servers continue with the old ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from monolith import ConfigError, Segment, TableConfig
from monolith.ps import ClientConfig, ParameterServer, ServerConfig, ServerStore
from monolith.ps.protocol.messages import DeclaredTable
from monolith.table import SGD, Adagrad, Bags, Expiry, Gradient, SlidingAdmission, Zeros


def declared(
    rate: float = 1.0, days: float = 100, admission: SlidingAdmission | None = None, dim: int = 1
) -> DeclaredTable:
    segment = Segment(dim=dim, initializer=Zeros(), optimizer=SGD(learning_rate=rate))
    config = TableConfig(name="item", segments=(segment,), expiry=Expiry.days(default=days))
    return DeclaredTable(config=config, admission=admission)


def push(store: ServerStore, id_: int = 1) -> None:
    bags = Bags(table="item", ids=np.array([id_]), offsets=np.array([0, 1]))
    store.apply([Gradient(bags=bags, values=torch.ones(1, 1))], event_time=1000)


def read(store: ServerStore, id_: int = 1) -> float:
    (rows,) = store.lookup([Bags(table="item", ids=np.array([id_]), offsets=np.array([0, 1]))])
    return rows.item()


def job(server: ParameterServer, table: DeclaredTable, epoch: int) -> ServerStore:
    return ServerStore([server.address], [table], config=ClientConfig(worker="w", epoch=epoch))


def test_another_rate_and_expiry_take_effect_and_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = ServerConfig(folder=tmp_path, log_flush_secs=0)
    with ParameterServer(kept) as server, job(server, declared(), 1) as store:
        push(store)
    # Another process of the server has the rows, and then another job comes.
    with ParameterServer(kept) as server, job(server, declared(rate=0.25, days=1), 2) as store:
        assert read(store) == -1.0
        push(store)
        assert read(store) == -1.25
    assert "segments.0.optimizer.learning_rate was 1.0, is now 0.25: the code's value is used" in caplog.text
    caplog.clear()
    with ParameterServer(kept) as server, job(server, declared(rate=0.25, days=1), 3) as store:
        assert read(store) == -1.25
        assert store.evict(now=1000 + 2 * 86400) == {"item": 1}
    assert "learning_rate" not in caplog.text


def test_thresholds_change_and_counts_stay() -> None:
    def seen(threshold: int) -> DeclaredTable:
        return declared(admission=SlidingAdmission(capacity=300, default_threshold=threshold))

    with ParameterServer() as server:
        with job(server, seen(5), 1) as store:
            for _ in range(3):
                push(store)
            assert read(store) == 0.0
        with job(server, seen(3), 2) as store:
            push(store)
            assert read(store) == -1.0
        with pytest.raises(ConfigError, match="cannot continue from; keep its capacity"):
            job(server, declared(admission=SlidingAdmission(capacity=999_999)), 3)


@pytest.mark.parametrize(
    "other",
    [
        declared(dim=2),
        DeclaredTable(config=TableConfig(name="item", segments=(Segment(dim=1, optimizer=Adagrad()),))),
        DeclaredTable(config=declared().config.model_copy(update={"seed": 5})),
    ],
)
def test_rows_that_do_not_fit_are_refused(other: DeclaredTable) -> None:
    with ParameterServer() as server, job(server, declared(), 1) as store:
        push(store)
        with pytest.raises(ConfigError, match="table 'item': the server has it with other rows: "):
            job(server, other, 2)
        assert read(store) == -1.0
