"""Danger: an export of another checkpoint than the one that was asked for, or a model that believes it is always exported."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from monolith.errors import CheckpointMismatchError, InvalidArgumentError
from monolith.original import (
    BaseExporter,
    DistributedExporter,
    ExportMode,
    StandaloneExporter,
    create_exporter,
    enter_export_mode,
    get_current_export_ctx,
    is_exporting,
    is_exporting_distributed,
    is_exporting_standalone,
)
from monolith.original.exporters import ServingParams
from monolith.serve import load
from monolith.train import Estimator, RunConfig, RunnerConfig
from training import ClickModel, batch_of


def made(config: RunConfig) -> Estimator:
    model = ClickModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Estimator(model, config, optimizer=optimizer, runner=RunnerConfig(is_local=True))


@pytest.fixture
def run(tmp_path: Path) -> Estimator:
    estimator = made(RunConfig(model_dir=str(tmp_path), save_checkpoints_secs=0))
    for _ in range(3):  # each saves when it ends
        estimator.train([batch_of(number) for number in range(2)])
    return estimator


def example() -> dict[str, object]:
    return batch_of(99)


def test_the_newest_checkpoint_is_exported(run: Estimator, tmp_path: Path) -> None:
    found = StandaloneExporter(made, str(tmp_path)).export_saved_model(example)
    assert list(found) == ["entry"]
    assert found["entry"].parent == tmp_path / "exported_models"
    predictor = load(found["entry"])
    assert predictor.signature.step == 6
    run.model.eval()
    wanted = torch.sigmoid(run.model(batch_of(3))["click"])
    assert torch.allclose(predictor.predict(batch_of(3))["click"], wanted, atol=1e-6)


def test_an_earlier_checkpoint_can_be_exported(run: Estimator, tmp_path: Path) -> None:
    found = StandaloneExporter(made, str(tmp_path)).export_saved_model(example, f"{tmp_path}/model.ckpt-4")
    assert load(found["entry"]).signature.step == 4


def test_a_model_fn_that_exports_something_else_is_found_out(run: Estimator, tmp_path: Path) -> None:
    def ignores(config: RunConfig) -> Estimator:
        return made(config.model_copy(update={"restore_ckpt": None}))

    with pytest.raises(CheckpointMismatchError, match="expected step 4 in the export, got 6"):
        StandaloneExporter(ignores, str(tmp_path)).export_saved_model(example, f"{tmp_path}/model.ckpt-4")
    assert list((tmp_path / "exported_models").iterdir()) == []


def test_front_ends_and_shards_load_one_folder(run: Estimator, tmp_path: Path) -> None:
    found = DistributedExporter(made, str(tmp_path), num_ps=2).export_saved_model(example)
    assert list(found) == ["entry", "ps_0", "ps_1"]
    assert len(set(found.values())) == 1


def test_the_model_knows_that_it_is_exported(run: Estimator, tmp_path: Path) -> None:
    seen: list[tuple[bool, bool, bool]] = []

    def watched(config: RunConfig) -> Estimator:
        seen.append((is_exporting(), is_exporting_standalone(), is_exporting_distributed()))
        return made(config)

    DistributedExporter(watched, str(tmp_path)).export_saved_model(example)
    assert seen == [(True, False, True)]
    assert not is_exporting()


def test_contexts_are_entered_during_the_export(run: Estimator, tmp_path: Path) -> None:
    lines = []

    @contextmanager
    def context() -> Iterator[None]:
        lines.append("in")
        yield
        lines.append("out")

    StandaloneExporter(made, str(tmp_path), export_context_list=[context]).export_saved_model(example)
    assert lines == ["in", "out"]


def test_modes_end_after_an_error_and_cannot_be_nested() -> None:
    def nest() -> None:
        with enter_export_mode(ExportMode.STANDALONE):
            assert get_current_export_ctx() is not None
            with enter_export_mode(ExportMode.DISTRIBUTED):
                pass

    with pytest.raises(InvalidArgumentError, match="cannot be nested"):
        nest()
    assert get_current_export_ctx() is None


def test_another_thread_that_trains_does_not_export() -> None:
    found: list[bool] = []
    with enter_export_mode(ExportMode.STANDALONE):
        thread = threading.Thread(target=lambda: found.append(is_exporting()))
        thread.start()
        thread.join()
    assert found == [False]


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (None, DistributedExporter),
        (ServingParams(export_mode=ExportMode.STANDALONE, export_dir_base="/exports"), StandaloneExporter),
    ],
)
def test_the_factory_makes_what_params_say(params: ServingParams | None, kind: type[BaseExporter]) -> None:
    exporter = create_exporter(made, "runs/clicks", params)
    assert type(exporter) is kind
    assert str(exporter.export_dir_base) == ("runs/clicks/exported_models" if params is None else "/exports")


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="export_mode"):
        create_exporter(made, "runs/clicks", ServingParams(export_mode=ExportMode.NONE))
    with pytest.raises(InvalidArgumentError, match="serve --run"):
        DistributedExporter(made, "runs/clicks", dense_only=True)
    with pytest.raises(InvalidArgumentError, match="num_ps"):
        DistributedExporter(made, "runs/clicks", num_ps=0)
    with pytest.raises(InvalidArgumentError, match="no checkpoint"):
        StandaloneExporter(made, str(tmp_path)).export_saved_model(example)
