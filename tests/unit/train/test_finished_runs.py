"""Danger: a run that had finished is started in another way, and trains its data a second time, or not at all, unnoticed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from counting_model import COUNTED, Counts
from monolith import RunConfig, Trainer
from monolith.data.synthetic import ClickStream, ClickStreamConfig
from monolith.errors import InvalidArgumentError
from monolith.features.batch import Batch
from monolith.ps import ClientConfig, ParameterServer, ServerConfig, ServerStore, tables_of
from monolith.table import Bags
from training import ClickModel, Stream


def local(folder: Path, **config: object) -> Trainer:
    model = ClickModel()
    sgd = torch.optim.SGD(model.mlp.parameters(), lr=0.1)
    return Trainer(model, sgd, config=RunConfig(model_dir=str(folder), **config))  # type: ignore[arg-type]


@contextmanager
def on_server(folder: Path, epoch: int, *, saves: bool = False, **config: object) -> Iterator[Trainer]:
    """A trainer whose rows and positions are on a server that restores itself."""
    client = ClientConfig(worker="worker-0-of-1", epoch=epoch, timeout=60.0)
    with (
        ParameterServer(ServerConfig(folder=folder / "ps" / "0", log_flush_secs=0.0)) as server,
        ServerStore([server.address], tables_of(COUNTED), config=client) as store,
    ):
        model = Counts(store)
        settings = RunConfig(model_dir=str(folder) if saves else None, clip_norm=None, **config)  # type: ignore[arg-type]
        yield Trainer(model, torch.optim.SGD([model.batches], lr=1.0), config=settings)


def clicks(batches: int = 4) -> ClickStream:
    return ClickStream(ClickStreamConfig(users=5, batches=batches, batch_size=2))


@pytest.mark.parametrize("finished", [False, True])
def test_another_number_of_workers_is_refused_because_their_shares_are_others(tmp_path: Path, finished: bool) -> None:
    local(tmp_path).fit(Stream(5), max_steps=None if finished else 3)
    again = local(tmp_path)
    again.num_workers = 2
    with pytest.raises(
        InvalidArgumentError, match=r"saved by a run of 1 worker, .* one of 2 workers: .*resume_data=False"
    ):
        again.fit(Stream(5))
    assert again.steps_made == 0
    # Who only reads is not refused.
    reader = local(tmp_path)
    reader.num_workers = 2
    assert reader.restore()
    other_data = local(tmp_path, resume_data=False)
    other_data.num_workers = 2
    assert other_data.fit(Stream(2)) == (7 if finished else 5)
    back_to_one = local(tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"saved by a run of 2 workers, .* one of 1 worker:"):
        back_to_one.fit(Stream(5))


def test_going_back_behind_the_end_trains_again(tmp_path: Path) -> None:
    local(tmp_path, save_checkpoints_steps=2).fit(Stream(5))
    again = local(tmp_path, restore_to="step=2")
    assert (again.fit(Stream(5)), again.steps_made) == (5, 3)


def test_going_back_behind_the_end_trains_again_on_servers(tmp_path: Path) -> None:
    with on_server(tmp_path, 1, saves=True, save_checkpoints_steps=2) as run:
        assert run.fit(clicks()) == 4
    with on_server(tmp_path, 2, saves=True, restore_to="step=2") as run:
        assert (run.fit(clicks()), run.steps_made) == (4, 2)
    with on_server(tmp_path, 3, saves=True) as run:
        assert (run.fit(clicks()), run.steps_made) == (4, 0)


def test_dense_parameters_that_start_again_are_trained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    local(tmp_path).fit(Stream(5))
    cleared = local(tmp_path, clear_nn=True)
    with caplog.at_level(logging.INFO):
        cleared.fit(Stream(5))
    assert cleared.steps_made == 5
    assert "is read again: dense parameters start again (clear_nn)" in caplog.text
    # Only once.
    again = local(tmp_path, clear_nn=True)
    again.fit(Stream(5))
    assert again.steps_made == 0


def test_a_run_that_adopts_one_that_has_finished_says_that_there_is_nothing_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local(tmp_path / "a").fit(Stream(5))
    adopting = local(tmp_path / "b", restore_dir=str(tmp_path / "a"))
    assert (adopting.fit(Stream(5)), adopting.steps_made) == (5, 0)
    assert "nothing to do: the run has finished" in caplog.text
    warm = local(tmp_path / "c", warm_start_from=str(tmp_path / "a"))
    assert warm.fit(Stream(5)) == 5


def test_data_that_cannot_be_resumed_is_not_read_again_once_it_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches: list[Batch] = list(clicks())
    with on_server(tmp_path, 1) as run:
        assert run.fit(batches) == 4
    with on_server(tmp_path, 2) as run:
        assert run.fit(batches, max_steps=99) == 4
        assert run.steps_made == 0
    assert "nothing to do: the run has finished" in caplog.text
    with on_server(tmp_path, 3, resume_data=False) as run:
        run.fit(batches)
        assert run.steps_made == 4
    assert "resume_data=False: this worker has trained 4 batches before" in caplog.text


def test_data_that_cannot_be_resumed_and_is_read_again_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = "has no position to resume from"
    batches = list(Stream(5))
    first = local(tmp_path / "local")
    first.fit(batches, max_steps=3)
    assert said not in caplog.text
    assert local(tmp_path / "local").fit(batches) == 8
    assert f"source: a list {said}" in caplog.text
    caplog.clear()
    with on_server(tmp_path, 1) as run:
        run.fit(list(clicks()), max_steps=3)
        assert said not in caplog.text
    with on_server(tmp_path, 2) as run:
        run.fit(list(clicks()))
        assert run.steps_made == 4
    assert f"source: a list {said}" in caplog.text
    caplog.clear()
    local(tmp_path / "local", resume_data=False).fit(batches)
    assert said not in caplog.text


def test_a_wrapper_that_has_no_place_to_tell_counts_as_one_that_cannot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrapper(list[Batch]):
        def state_dict(self) -> None:
            """As of a `ReadAhead` over a source without state."""

        def load_state_dict(self, state: object) -> None:
            raise AssertionError("there is nothing to load")

    with on_server(tmp_path, 1) as run:
        run.fit(Wrapper(clicks()), max_steps=3)
    assert caplog.text.count("the source cannot tell servers its place") == 1
    with on_server(tmp_path, 2) as run:
        run.fit(Wrapper(clicks()))
        # From the first batch, and the server leaves out those that it has had.
        assert run.steps_made == 4
        ids = torch.cat([batch["user_id"] for batch in clicks()]).unique().numpy()
        (rows,) = run.stores[0].lookup([Bags(table="user_id", ids=ids, offsets=np.arange(len(ids) + 1))])
        assert rows.sum() == -8  # 4 batches of 2
    assert "no position to resume from" in caplog.text
