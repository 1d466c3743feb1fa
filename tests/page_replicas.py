"""Replicas for tests of the metrics and the page: real tables, and a lag that the test sets.

`python tests/page_replicas.py FOLDER` writes the screenshots of docs/guide-page.md into FOLDER.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from monolith import EmbeddingTable
from monolith.log import RowChange
from monolith.serve.metrics import ServingMetrics
from monolith.serve.replica import Lag, Replica
from monolith.serve.repository import ModelRepository
from monolith.serve.server.routing import Answered
from monolith.table import LocalStore
from monolith.testing import sgd_table_config


class SetLag:
    """A follower that is as far behind as it was told."""

    def __init__(self, **fields: object) -> None:
        self.fields: dict[str, Any] = {
            "seconds": 0.05,
            "step": 100,
            "event_time": 0,
            "sequence": 7,
            "connected": True,
            **fields,
        }

    def lag(self) -> Lag:
        return Lag(**self.fields)

    def close(self) -> None:
        pass


def replica(
    name: str = "clicks", version: int = 3, *, tables: Iterable[str] = ("user",), follower: SetLag | None = None
) -> Replica:
    made = []
    for table in tables:
        made.append(EmbeddingTable(sgd_table_config(2, name=table)))
        made[-1].assign([7], np.array([[3.0, 4.0]], np.float32), event_time=1_700_000_000)
    stub = SimpleNamespace(signature=SimpleNamespace(version=version), stores={"": LocalStore(made)})
    return Replica(name, cast(Any, stub), follower=follower)


def repository(*replicas: Replica) -> ModelRepository:
    made = ModelRepository()
    for known in replicas:
        made.add(known)
    return made


def answer(**fields: object) -> Answered:
    known = {"model": "clicks", "version": 3, "protocol": "grpc", "rows": 1, "seconds": 0.001, "status": "ok"}
    return Answered(**cast(Any, {**known, "request_id": "", **fields}))


class Clock:
    """Time that stands still until the test moves it."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def change(sequence: int, values: tuple[float, ...] | None = (3.0, 4.0), **fields: object) -> RowChange:
    known = {"step": 10 * sequence, "time": 1_700_000_000.0 + sequence, "table": "user", "event_time": 0, "slots": {}}
    return RowChange(**cast(Any, {**known, "sequence": sequence, "values": values, **fields}))


def busy_metrics(clock: Clock, seconds: int = 900) -> ServingMetrics:
    """A quarter of an hour of made-up load on two versions of a model, one of them the default."""
    rng = random.Random(7)
    tables = ("user", "item", "category")
    slow, quick = SetLag(step=48_200, sequence=18_034, event_time=int(clock.now)), SetLag(seconds=0.048)
    quick.fields |= {"step": 51_377, "sequence": 20_551, "event_time": int(clock.now)}
    served = repository(
        replica(version=41, tables=tables, follower=slow), replica(version=42, tables=tables, follower=quick)
    )
    for version in (41, 42):
        for store in served.get("clicks", version).predictor.stores.values():
            for name, table in store.tables.items():
                rows = {"user": 60_000, "item": 25_000, "category": 400}[name]
                table.assign(np.arange(rows), np.ones((rows, 2), np.float32))
    metrics = ServingMetrics(served, clock=clock, now=clock, in_flight=lambda: 3)
    for second in range(seconds):
        clock.now += 1
        wave = 1 + 0.4 * math.sin(second / 180)
        overload = 550 < second < 600
        for _ in range(int(30 * wave) * (3 if overload else 1)):
            status = "overloaded" if overload and rng.random() < 0.4 else "error" if rng.random() < 0.0004 else "ok"
            took = 0.0009 * rng.lognormvariate(0, 0.25) * (2.2 if overload else 1)
            metrics.answered(answer(version=rng.choice((42, 42, 42, 41)), status=status, seconds=took, rows=64))
        quick.fields["seconds"] = 0.045 + 0.02 * rng.random() + (0.4 if 300 < second < 306 else 0)
        slow.fields["seconds"] = 0.05 + 0.03 * rng.random()
        quick.fields |= {"sequence": 20_551 + 10 * second, "event_time": int(clock.now)}
        metrics.tick()
    return metrics


QUALITY = {
    "clicks": {
        41: {"log_loss": 0.4132, "auc": 0.7711, "calibration": 1.012, "labels": 182_344},
        42: {"log_loss": 0.4098, "auc": 0.7745, "calibration": 0.997, "labels": 546_120},
    }
}


def main(folder: Path) -> None:
    from chromium import browser
    from monolith.serve.page import Page, PageServer

    clock = Clock()
    metrics = busy_metrics(clock)
    page = Page(
        metrics,
        quality=lambda: QUALITY,
        rollback=lambda model: (True, "To version 41, or to any second of the last hour."),
        history=lambda table, id_: [
            change(29_000, (0.1153, -0.2071), time=clock.now - 55.3),
            change(29_200, (0.5012, 0.2219), time=clock.now - 35.1),
            change(29_500, (1.0, 1.0), time=clock.now - 5.2),
        ],
        now=clock,
    )
    with (
        PageServer(page.routes()) as server,
        tempfile.TemporaryDirectory() as home,
        browser(Path(home)) as shown,
    ):
        for name, dark, width, height in (("page-light", False, 1100, 1000), ("page-dark-phone", True, 390, 1000)):
            shown.show(dark=dark, width=width, height=height)
            shown.open(server.address)
            shown.until("document.querySelectorAll('.u-wrap, svg.plot').length === 3")
            shown.evaluate("document.getElementById('lookup-id').value = '7'")
            shown.evaluate("document.querySelector('#lookup-form button').click()")
            shown.until("document.querySelectorAll('#lookup-answer table').length === 2")
            shown.screenshot(folder / f"{name}.png", whole=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
