"""Danger: a setting of ranks that changes nothing, or changes what it must not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.errors import ConfigError, DivergedError, MonolithError, RankLostError, RanksDisagreeError
from monolith.ranks.socket_mesh import SocketMesh
from monolith.train import RunnerConfig, StepResult, Trainer
from monolith.train.distributed import ranks
from monolith.train.distributed.rank_recovery import FailureRecord, RankRecovery
from monolith.train.distributed.ranks import mesh_config
from monolith.train.hooks import Hook
from rank_runs import Batches, MeanModel, RankRun, Trained, global_batches, rows_of, rows_of_model
from training import ClickModel, batch_of


def uneven(number: int) -> dict[str, Any]:
    return batch_of(number, rows=3 + 5 * (number % 3))


def test_late_updates_are_applied_after_exactly_one_step_and_all_of_them_at_the_end() -> None:
    run = RankRun(source=lambda: Batches(9, uneven), run={"enable_embedding_postpush": True})
    alone = run.trainer()
    alone.fit(global_batches(9, 2, uneven))
    rows, expected = rows_of(run.ranks(2)), rows_of_model(alone.model)
    for table, columns in expected.items():
        for name, values in columns.items():
            torch.testing.assert_close(rows[table][name], values, rtol=1e-5, atol=1e-6)


def test_late_updates_are_in_every_checkpoint(tmp_path: Path) -> None:
    def run(folder: str) -> RankRun:
        config = {
            "enable_embedding_postpush": True,
            "model_dir": str(tmp_path / folder),
            "save_checkpoints_steps": 2,
        }
        return RankRun(source=lambda: Batches(12, uneven), run=config, train={"max_steps": 3})

    run("ranks").ranks(2)
    first = rows_of(run("ranks").ranks(3))
    # A save applies what waits, in one process too.
    alone = run("alone").trainer()
    alone.fit(global_batches(6, 2, uneven))
    for table, columns in rows_of_model(alone.model).items():
        torch.testing.assert_close(first[table]["values"], columns["values"], rtol=1e-5, atol=1e-6)


def test_each_rank_clips_by_itself_if_told_so() -> None:
    """As in the original: gradients of a rank with a large norm count less than those of the others."""
    run = RankRun(
        model=MeanModel, source=lambda: Batches(2), run={"clip_norm": 1e-3}, runner={"clip_before_reduce": True}
    )
    run.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    trainers = [run.trainer() for _ in range(2)]
    before = {name: values.clone() for name, values in trainers[0].model.named_parameters()}
    expected = dict.fromkeys(before, 0.0)
    for number, trainer in enumerate(trainers):
        trainer.train_step(batch_of(number))
        for name, values in trainer.model.named_parameters():
            expected[name] = expected[name] + (values.detach() - before[name].detach()) / 2  # type: ignore[assignment]
    trained = run.ranks(2)
    for name, values in trained[0].trainer.model.named_parameters():
        torch.testing.assert_close(values.detach() - before[name].detach(), expected[name], rtol=1e-3, atol=1e-7)
    assert trained[0].losses == trained[1].losses


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_ranks_with_short_dense_gradients_stay_together(wire: str) -> None:
    run = RankRun(runner={"dense_wire": wire})
    trained, exact = run.ranks(3), RankRun().ranks(3)
    for name, values in exact[0].dense.items():
        assert all(torch.equal(one.dense[name], trained[0].dense[name]) for one in trained)
        torch.testing.assert_close(trained[0].dense[name], values, rtol=0.1, atol=0.05)


class Spoil(Hook):
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if result.step == 2 and self._rank == 1:
            next(trainer.model.parameters()).data.add_(1.0)


def test_a_save_of_ranks_with_different_dense_parameters_fails_and_names_them(tmp_path: Path) -> None:
    run = RankRun(run={"model_dir": str(tmp_path), "save_checkpoints_steps": 3}, hooks=lambda rank: [Spoil(rank)])
    with pytest.raises(
        (RanksDisagreeError, RankLostError), match=r"ranks \[1\] have other dense parameters than rank 0 after step 3"
    ):
        run.ranks(3)


def test_a_loss_of_one_rank_that_is_not_a_number_ends_all_of_them() -> None:
    def broken(number: int) -> dict[str, Any]:
        batch = batch_of(number)
        if number == 5:
            batch["age"] = torch.full_like(batch["age"], torch.nan)  # type: ignore[arg-type]
        return batch

    run = RankRun(source=lambda: Batches(8, broken))
    seen: list[BaseException] = []

    class Note(Hook):
        def end(self, trainer: Trainer, error: BaseException | None) -> None:
            seen.append(error)  # type: ignore[arg-type]

    run.hooks = lambda rank: [Note()]
    with pytest.raises(DivergedError, match=r"step 3: the loss is nan.*Not finite on rank 1$"):
        run.ranks(2)
    assert [type(error) for error in seen] == [DivergedError, DivergedError]


def test_the_error_of_one_rank_is_known_to_the_others() -> None:
    class Fail(Hook):
        def after_step(self, trainer: Trainer, result: StepResult) -> None:
            raise ValueError("a hook is wrong")

    seen: list[BaseException | None] = []

    class Note(Hook):
        def end(self, trainer: Trainer, error: BaseException | None) -> None:
            seen.append(error)

    run = RankRun(hooks=lambda rank: [Fail()] if rank else [Note()])
    with pytest.raises((ValueError, MonolithError)):
        run.ranks(2)
    (error,) = seen
    assert isinstance(error, RankLostError)
    assert "ValueError: a hook is wrong" in str(error)


@pytest.mark.parametrize(
    ("runner", "said"),
    [
        ({"merge_sync_training_ckpt": False}, "merge_sync_training_ckpt: expected true"),
        ({"min_ranks": 3}, "min_ranks: expected at most num_workers, 2, got 3"),
        ({"min_ranks": 1, "rank_transport": "gloo"}, "min_ranks: cannot be used with rank_transport='gloo'"),
        (
            {"server": {"tls_cert": Path("cert.pem"), "tls_key": Path("key.pem")}, "rank_transport": "gloo"},
            r"server\.tls_cert: cannot be used with rank_transport='gloo', which does not encrypt",
        ),
        (
            {"client": {"tls_root_certs": Path("ca.pem")}, "rank_transport": "gloo"},
            r"client\.tls_root_certs: cannot be used with rank_transport='gloo'",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(runner: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RankRun(runner=runner).ranks(2)


def test_the_time_limits_of_ranks_are_those_of_the_run() -> None:
    config = mesh_config(RunnerConfig(num_workers=2, rank_timeout_secs=1, rank_exchange_secs=2, rank_formation_secs=3))
    assert (config.rank_timeout_secs, config.exchange_timeout_secs, config.formation_secs) == (1, 2, 3)


@pytest.mark.parametrize("clips_first", [False, True])
@pytest.mark.parametrize("model", [ClickModel, MeanModel])
def test_a_batch_without_rows_changes_nothing(model: type[ClickModel], clips_first: bool) -> None:
    def some_empty(number: int) -> dict[str, Any]:
        return batch_of(number, rows=0 if number % 4 == 1 else 5)

    def trained(ranks: int, batch: Any, count: int) -> list[Trained]:  # noqa: ANN401
        runner = {"clip_before_reduce": clips_first}
        return RankRun(
            model=model, source=lambda: Batches(count, batch), run={"clip_norm": 100.0}, runner=runner
        ).ranks(ranks)

    # Batches 0 and 1 are one global batch, in which the second is empty.
    found, expected = trained(2, some_empty, 2), trained(1, some_empty, 1)
    for name, values in expected[0].dense.items():
        torch.testing.assert_close(found[1].dense[name], values)
    assert found[0].losses == pytest.approx(expected[0].losses)


class _Newcomers(SocketMesh):
    """Two ranks of three, and the third has come back."""

    def __init__(self) -> None:
        self.size = 2

    def newcomers(self) -> list[int]:
        return [2]


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_run_that_could_not_continue_does_not_stop_for_a_rank_that_joins(
    has_folder: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = RankRun(run={"model_dir": str(tmp_path) if has_folder else None}).trainer()
    hook = ranks._Joining(
        RankRecovery(FailureRecord(None, rank=0)), ranks._Limits(None, None), _Newcomers(), RunnerConfig(num_workers=3)
    )
    result = trainer.train_step(batch_of(0))
    for _ in range(2):
        hook.after_step(trainer, result)
    assert trainer.stop_reason == ("another rank joins the run: 2" if has_folder else None)
    assert caplog.text.count("ranks 2 wait until the run ends: it has no model_dir") == (0 if has_folder else 1)
