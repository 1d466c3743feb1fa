"""Danger: the running loop loses events, or calls an event served that the replica does not have yet."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from monolith.data import StreamSource
from monolith.streams import open_stream

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401 - a module that is found at run time
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("freshbench.live")


def test_examples_come_back_from_the_stream_as_they_were(live: Any, tmp_path: Path) -> None:  # noqa: ANN401 - a module
    run = importlib.import_module("freshbench.live_run")
    data = importlib.import_module("freshbench.datasets").synthetic(0, 1000)
    examples = data.examples.between(0, 50)
    stream = open_stream(str(tmp_path / "events"), partitions=1)
    with stream.writer() as writer:
        for value in live.records(examples, 7):
            writer.append(value)
    (batch,) = StreamSource(stream, run.columns(data.schema), batch_size=100, until_end=True)
    for name, column in importlib.import_module("freshbench.adapters.monolith_system").batch_of(examples).items():
        if name == "numbers":
            continue
        if isinstance(column, torch.Tensor):
            assert torch.equal(batch[name], column)
        else:
            assert batch[name].to_lists() == column.to_lists()
    assert batch[run.PROBE].tolist() == [0] * 49 + [7]
    assert orjson.loads(next(live.records(examples, 7)))["label"] in (0.0, 1.0)


@pytest.mark.slow  # four processes, and the time that passes
def test_every_event_is_served_sooner_with_a_shorter_interval(live: Any) -> None:  # noqa: ANN401 - a module
    report = live.run_live(importlib.import_module("freshbench.datasets").Source("synthetic", 20_000), 10.0, (0.1, 3.0))
    often, seldom = report.points
    assert often.unserved == seldom.unserved == 0
    assert (often.latencies > 0).all()
    assert np.median(often.latencies) < np.median(seldom.latencies)
    assert often.frozen == pytest.approx(seldom.frozen, abs=1e-3)  # portions of other sizes round otherwise
    assert often.gain.mean > 0
    assert "| 0.1 |" in report.markdown()
