"""Danger: a run of ranks that was saved and started again continues with other rows, dense parameters or data than it had."""

from __future__ import annotations

import errno
import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from monolith.errors import RankLostError, StorageError
from monolith.log import change_log
from monolith.ps import ParameterServer, ServerConfig, ServerStore, tables_of
from monolith.state.inspect import verify
from monolith.state.model_dir import ModelDir
from monolith.state.restore_points import find_restore_point, restore_points
from monolith.table.store import Store
from monolith.testing.rank_threads import run_ranks
from monolith.train import RunConfig, StepResult, Trainer
from monolith.train.hooks import Hook
from rank_runs import Batches, RankRun, Trained, rows_of, rows_of_model
from training import FEATURES, ClickModel

BATCHES = 24


class Saved(RankRun):
    """Ranks of which only the chief has the model_dir."""

    def __init__(self, model_dir: Path | str, *, shards: int = 6, micro_batches: int | None = 6, **run: object) -> None:
        super().__init__(
            source=lambda: Batches(BATCHES),
            runner={"micro_batches": micro_batches} if micro_batches else {"data_shards": shards},
        )
        self.model_dir, self.settings = model_dir, {"seed": 3, **run}

    def ranks(self, size: int) -> list[Trained]:
        trainers = []
        for rank in range(size):
            self.run = {**self.settings, **({"model_dir": str(self.model_dir)} if rank == 0 else {})}
            trainers.append(self.trainer())
        return run_ranks(size, lambda mesh: self.on(mesh, trainers[mesh.rank]))


def same(one: dict[str, dict[str, torch.Tensor]], other: dict[str, dict[str, torch.Tensor]]) -> bool:
    return all(torch.equal(one[name][key], other[name][key]) for name in one for key in one[name])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_another_number_of_ranks_continues_exactly(tmp_path: Path, ranks: int) -> None:
    whole = Saved(tmp_path / "whole")
    undisturbed = whole.ranks(1)
    run = Saved(tmp_path / "run")
    run.train = {"max_steps": 2}
    assert run.ranks(2)[0].step == 2
    run.train = {}
    continued = run.ranks(ranks)
    assert continued[0].step == undisturbed[0].step == BATCHES // 6
    assert same(rows_of(continued), rows_of(undisturbed))
    for name, tensor in undisturbed[0].dense.items():
        assert torch.equal(continued[0].dense[name], tensor), name
    assert verify(tmp_path / "run").problems == []


class Waits(Hook):
    """Begins a step when the cut after the one before is durable."""

    def before_step(self, trainer: Trainer) -> None:
        assert trainer._saving is not None
        if (cut := trainer._saving._full._flushing) is not None:
            cut.result()


class Dies(Hook):
    """Fails after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step == self.step:
            raise RuntimeError("this rank dies")


def died(run: Saved, ranks: int, *, rank: int, step: int) -> None:
    """Train until one rank dies."""
    run.hooks = lambda number: [Dies(step)] * (number == rank) + [Waits()] * (number == 0)
    with pytest.raises((RuntimeError, RankLostError)):
        run.ranks(ranks)
    run.hooks = lambda number: []


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("then", [1, 2, 3])
def test_a_run_whose_rank_died_continues_from_the_last_cut(tmp_path: Path, rank: int, then: int) -> None:
    undisturbed = Saved(tmp_path / "whole").ranks(1)
    run = Saved(tmp_path / "run", log_flush_secs=1e-9)
    died(run, 2, rank=rank, step=3)
    point = find_restore_point(tmp_path / "run")
    assert point.checkpoint is None
    assert point.parts == 2
    assert point.step == 2
    continued = run.ranks(then)
    assert same(rows_of(continued), rows_of(undisturbed))
    for name, tensor in undisturbed[0].dense.items():
        assert torch.equal(continued[0].dense[name], tensor), name
    assert verify(tmp_path / "run").problems == []


def plain(model_dir: Path, store: Store | None = None) -> Trainer:
    """A trainer of one process, whose rows are here or in `store`."""
    model = ClickModel()
    if store is not None:
        model.embeddings.use_store(store)
    config = RunConfig(model_dir=str(model_dir), seed=3, resume_data=False)
    return Trainer(model, torch.optim.Adam(model.parameters(), lr=0.01), config=config)


def saved_run(folder: Path, *, cut: bool) -> list[Trained]:
    """A run of two ranks that ended at step 3 with a checkpoint, or died there with a cut. Returns what it had then."""
    run = Saved(folder, **({"log_flush_secs": 1e-9} if cut else {}))
    run.train = {"max_steps": 3}
    if cut:
        died(run, 2, rank=1, step=3)
    else:
        run.ranks(2)
    like = Saved(folder / "like")
    like.train = {"max_steps": find_restore_point(folder).step}
    return like.ranks(1)


@contextmanager
def two_servers(model_dir: Path) -> Iterator[ServerStore]:
    """Servers on the folders of the ranks, as a run has that is continued with servers."""
    with ExitStack() as stack:
        configs = [ServerConfig(folder=model_dir / "ps" / str(number)) for number in range(2)]
        group = [stack.enter_context(ParameterServer(config)) for config in configs]
        yield stack.enter_context(ServerStore([server.address for server in group], tables_of(FEATURES)))


@pytest.mark.parametrize("cut", [False, True], ids=["checkpoint", "cut"])
def test_one_process_continues_ranks_and_ranks_continue_it(tmp_path: Path, cut: bool) -> None:
    expected = saved_run(tmp_path, cut=cut)
    trainer = plain(tmp_path)
    trainer.restore(training=True)
    assert same(rows_of_model(trainer.model), rows_of(expected))
    trainer.fit(Batches(BATCHES), steps=1)
    again = plain(tmp_path)
    again.restore()
    assert again.step == expected[0].step + 1
    assert same(rows_of_model(again.model), rows_of_model(trainer.model))
    run = Saved(tmp_path, resume_data=False)
    run.train = {"steps": 0}
    assert same(rows_of(run.ranks(3)), rows_of_model(trainer.model))


@pytest.mark.parametrize("cut", [False, True], ids=["checkpoint", "cut"])
def test_servers_continue_ranks_and_ranks_continue_them(tmp_path: Path, cut: bool) -> None:
    expected = saved_run(tmp_path, cut=cut)
    with two_servers(tmp_path) as store:
        trainer = plain(tmp_path, store)
        trainer.restore(training=True)
        for name, columns in rows_of(expected).items():
            found = store.lookup_entry(name, columns["ids"])
            assert found.found.all()
            assert torch.equal(found.values, columns["values"])
        trainer.fit(Batches(BATCHES), steps=1)
        rows = {name: store.lookup_entry(name, columns["ids"]) for name, columns in rows_of(expected).items()}
    run = Saved(tmp_path, resume_data=False)
    run.train = {"steps": 0}
    continued = rows_of(run.ranks(3))
    for name, entries in rows.items():
        chosen = torch.isin(continued[name]["ids"], entries.ids)
        assert torch.equal(continued[name]["values"][chosen], entries.values)


def test_a_run_goes_back_to_a_moment_on_all_ranks(tmp_path: Path) -> None:
    undisturbed = Saved(tmp_path / "whole").ranks(1)
    run = Saved(tmp_path / "run", log_flush_secs=1e-9)
    died(run, 2, rank=1, step=4)
    assert find_restore_point(tmp_path / "run").step == 3
    back = Saved(tmp_path / "run", log_flush_secs=1e-9, restore_to="step=1")
    back.train = {"max_steps": 2}
    assert back.ranks(2)[0].losses[0] == undisturbed[0].losses[1]
    # Once: what it goes on with is newer than what it has left behind.
    back.train = {}
    continued = back.ranks(2)
    assert len(continued[0].losses) == len(undisturbed[0].losses) - 2
    assert same(rows_of(continued), rows_of(undisturbed))


@pytest.mark.parametrize("ignore", [False, True])
def test_a_rank_that_cannot_write_ends_the_run_unless_errors_of_saves_are_ignored(tmp_path: Path, ignore: bool) -> None:
    run = Saved(tmp_path, save_checkpoints_steps=1, ignore_save_errors=ignore)
    real = change_log.write_segment

    def write(folder: Path, *arguments: Any) -> Any:  # noqa: ANN401 - whatever it takes
        if "/ps/1/" in str(folder):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(folder, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(change_log, "write_segment", write)
        if ignore:
            assert run.ranks(2)[0].step == BATCHES // 6
        else:
            with pytest.raises((StorageError, RankLostError), match=r"rank 1: .*No space left"):
                run.ranks(2)
    assert list(tmp_path.glob("model.ckpt-*/manifest.json")) == []


class SharedStore(MemoryFileSystem):
    """Files in memory that several threads read at once. Those of fsspec have one position for all readers."""

    protocol = "shared"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def _open(self, path: str, mode: str = "rb", **settings: Any) -> Any:  # noqa: ANN401 - as fsspec declares it
        if mode != "rb" or self._strip_protocol(path) not in self.store:
            return super()._open(path, mode, **settings)
        return io.BytesIO(self.store[self._strip_protocol(path)].getvalue())


fsspec.register_implementation("shared", SharedStore, clobber=True)


def test_a_remote_model_dir_has_checkpoints_and_no_cuts(tmp_path: Path) -> None:
    undisturbed = Saved(tmp_path / "whole").ranks(1)
    remote = "shared://rank-saves/run"
    run = Saved(remote, log_flush_secs=1e-9, save_checkpoints_steps=1)
    run.train = {"max_steps": 2}
    run.ranks(2)
    assert [(point.step, point.parts) for point in restore_points(remote)] == [(1, 2), (2, 2)]
    run.train = {}
    assert same(rows_of(run.ranks(3)), rows_of(undisturbed))


def test_gradients_that_are_applied_late_are_in_cuts_and_checkpoints(tmp_path: Path) -> None:
    run = Saved(tmp_path, micro_batches=None, enable_embedding_postpush=True, log_flush_secs=1e-9)
    died(run, 2, rank=1, step=4)
    point = find_restore_point(tmp_path)
    assert (point.step, point.checkpoint) == (3, None)
    # Every cut settles what is late, so rows that were restored from one are those of an ordinary run.
    ordinary = Saved(tmp_path / "ordinary", micro_batches=None)
    ordinary.train = {"max_steps": 3}
    trainer = plain(tmp_path)
    trainer.restore()
    assert same(rows_of_model(trainer.model), rows_of(ordinary.ranks(2)))


def test_a_second_job_is_refused_before_it_takes_the_folders_of_ranks(tmp_path: Path) -> None:
    with (
        ModelDir(tmp_path).open_log({}),
        pytest.raises((StorageError, RankLostError), match="another writer has this log open"),
    ):
        Saved(tmp_path).ranks(2)
    assert not (tmp_path / "ps").exists()
