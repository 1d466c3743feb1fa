"""Danger: the fault that is measured is not the one that is reported, or a run after it is not the run without it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monolith.table.buckets import bucket_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401 - a module that is found at run time
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("freshbench.faults")


def _data(seed: int, events: int = 6000) -> Any:  # noqa: ANN401 - a DataSet
    return importlib.import_module("freshbench.datasets").synthetic(seed, events)


def test_only_the_rows_of_one_server_become_what_they_were(faults: Any) -> None:  # noqa: ANN401 - a module
    data = _data(0, 100_000)  # with so many ids that each batch has new ones
    system = faults.MonolithSystem(data.schema, 0)
    faults.train(system, data.examples.between(0, 1000), 500)
    buckets = range(1024, 2048)
    old = faults.State.of(system, buckets).rows
    faults.train(system, data.examples.between(1000, 2000), 500)
    now = faults.State.of(system)
    removed = faults.replace_rows(system.tables(), old, buckets)
    after = faults.State.of(system)
    for name in system.tables():
        in_old = np.isin(now.rows[name].ids, old[name].ids)
        of_server = (bucket_of(now.rows[name].ids) >= 1024) & (bucket_of(now.rows[name].ids) < 2048)
        kept = {int(one): bytes(row) for one, row in zip(after.rows[name].ids, after.rows[name].rows, strict=True)}
        assert set(kept) == set(now.rows[name].ids[in_old | ~of_server].tolist())
        for one, row in zip(old[name].ids, old[name].rows, strict=True):
            assert kept[int(one)] == bytes(row)
        for one, row in zip(now.rows[name].ids[~of_server], now.rows[name].rows[~of_server], strict=True):
            assert kept[int(one)] == bytes(row)
    assert removed > 0
    now.put_back(system)
    for name, rows in faults.State.of(system).rows.items():
        assert sorted(map(bytes, rows.rows)) == sorted(map(bytes, now.rows[name].rows))


def test_a_run_that_is_put_back_goes_on_as_the_first_time(
    faults: Any,  # noqa: ANN401 - a module that is found at run time
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(faults, "AGES", (0.0, None))
    report = faults.lose_a_server(partial(_data, events=4000), seeds=2)
    assert (report.after["0 s ago"] == report.without).all()
    assert report.recovered_after("0 s ago") == 0
    assert report.removed["0 s ago"] == 0
    assert report.removed[faults.LOST] > 0
    assert report.cost(faults.LOST, 0, 24).mean < 0
    assert "| 0 s ago | 0 |" in report.markdown()


@pytest.mark.slow  # six processes, for what test_ps_kill and others show too
def test_a_killed_server_loses_nothing_unless_its_folder_is_replaced(faults: Any) -> None:  # noqa: ANN401 - a module
    report = faults.kill_servers(_data(0, 3000))
    calm, own, old = report.differ.values()
    assert (calm, own) == (0, 0)
    assert old > 0


def test_the_ages_of_data_without_times_are_shares_of_it(faults: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401
    def without_times(seed: int) -> Any:  # noqa: ANN401 - a DataSet
        return replace(_data(seed, events=4000), has_times=False)

    monkeypatch.setattr(faults, "AGES", (0.25, 0.5))
    report = faults.lose_a_server(without_times, seeds=1)
    assert list(report.after) == ["0.25 of the online part ago", "0.5 of the online part ago"]
    assert "| 0 to 0.021 of the online part |" in report.markdown()
