"""Danger: exports fill the disk, or one is removed that a server still needs, or a run ends because of an export."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import pytest
import torch

from monolith.errors import CorruptFileError, InvalidArgumentError, StorageError
from monolith.original import (
    ExportSaverListener,
    StandaloneExporter,
    get_export_saver_listener_state,
    get_global_step,
    overwrite_export_saver_listener_state,
)
from monolith.original.export_hooks import EXPORT_STATE, append_export_state
from monolith.proto.export_pb2 import ServingEntry, ServingModelState
from monolith.serve import load
from monolith.state.index import with_exempt, write_monolith_checkpoint_state
from monolith.train import Estimator, RunConfig, RunnerConfig
from training import ClickModel, batch_of


def made(config: RunConfig) -> Estimator:
    model = ClickModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Estimator(model, config, optimizer=optimizer, runner=RunnerConfig(is_local=True))


def listener(folder: Path, **options: object) -> ExportSaverListener:
    exporter = StandaloneExporter(made, str(folder))
    return ExportSaverListener(f"{folder}/model.ckpt", lambda: batch_of(99), exporter, **options)


def train(folder: Path, one: ExportSaverListener, steps: int = 6, keep: int = 2) -> Estimator:
    config = RunConfig(model_dir=str(folder), save_checkpoints_secs=0, checkpoints_max_to_keep=keep)
    estimator = made(config)
    estimator.trainer.save_listeners = (one,)
    metrics: list[tuple[str, float, str]] = []
    estimator.trainer.on_save_metric = lambda name, value, tags: metrics.append(
        (name, value, tags.get("model_name", ""))
    )
    for _ in range(steps // 2):  # each saves when it ends
        estimator.train([batch_of(number) for number in range(2)])
    estimator.seen = metrics  # type: ignore[attr-defined]
    return estimator


def steps_of(folder: Path) -> list[int]:
    return [entry.global_step for entry in get_export_saver_listener_state(folder / "exported_models").entries]


def folders(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "exported_models").iterdir() if path.name.isdecimal())


def test_every_checkpoint_is_exported_and_exports_go_with_their_checkpoints(tmp_path: Path) -> None:
    estimator = train(tmp_path, listener(tmp_path))
    assert steps_of(tmp_path) == [4, 6]
    assert [load(path).signature.step for path in folders(tmp_path)] == [4, 6]
    versions = [value for name, value, model in estimator.seen if name == "export_models.latest_version"]  # type: ignore[attr-defined]
    assert len(versions) == 3
    assert str(int(versions[-1])) == folders(tmp_path)[-1].name


def test_a_run_over_servers_is_exported_from_its_checkpoints(tmp_path: Path) -> None:
    model = ClickModel()
    runner = RunnerConfig(is_local=True, num_ps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    estimator = Estimator(model, RunConfig(model_dir=str(tmp_path)), optimizer=optimizer, runner=runner)
    with closing(estimator):
        estimator.trainer.save_listeners = (listener(tmp_path),)
        estimator.train([batch_of(number) for number in range(4)])
        model.eval()
        wanted = torch.sigmoid(model(batch_of(3))["click"])
    predictor = load(tmp_path / "exported_models")
    assert predictor.signature.step == 4
    assert torch.allclose(predictor.predict(batch_of(3))["click"], wanted, atol=1e-6)


def test_exports_of_exempt_checkpoints_stay(tmp_path: Path) -> None:
    train(tmp_path, listener(tmp_path, exempt_checkpoint_paths=[f"{tmp_path}/model.ckpt-2"]), keep=1)
    assert steps_of(tmp_path) == [2, 6]


def test_checkpoints_that_monolith_checkpoint_names_are_exempt(tmp_path: Path) -> None:
    write_monolith_checkpoint_state(tmp_path, with_exempt(None, f"{tmp_path}/model.ckpt-2"))
    train(tmp_path, listener(tmp_path), keep=1)
    assert steps_of(tmp_path) == [2, 6]


def test_an_export_that_fails_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = listener(tmp_path)

    def full(*_: object) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(one.exporter, "export_saved_model", full)
    with caplog.at_level(logging.ERROR):
        assert train(tmp_path, one).global_step == 6
    assert "the checkpoint of step 4 was not exported: the disk is full" in caplog.text


def test_a_damaged_list_cannot_have_other_folders_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base, precious = tmp_path / "exported_models", tmp_path / "precious"
    precious.mkdir()
    (base / "notes").mkdir(parents=True)
    entries = [
        ServingEntry(export_dir=str(path), global_step=1) for path in (precious, base / "notes", base / ".." / "1")
    ]
    overwrite_export_saver_listener_state(base, ServingModelState(entries=entries))
    append_export_state(base, base / "1700000000", 2)
    with caplog.at_level(logging.WARNING):
        listener(tmp_path).collect_garbage(base)
    assert precious.exists()
    assert (base / "notes").exists()
    assert caplog.text.count("is not removed") == 3


def test_a_checkpoint_that_is_saved_again_has_one_export(tmp_path: Path) -> None:
    base = tmp_path / "exported_models"
    for version in ("1700000001", "1700000002"):
        (base / version).mkdir(parents=True)
        append_export_state(base, base / version, 30)
    listener(tmp_path).collect_garbage(base)
    assert [path.name for path in folders(tmp_path)] == ["1700000002"]
    assert steps_of(tmp_path) == [30]


def test_an_export_that_somebody_removed_is_forgotten(tmp_path: Path) -> None:
    base = tmp_path / "exported_models"
    for number in (1, 2):
        append_export_state(base, base / f"170000000{number}", number)
    listener(tmp_path).collect_garbage(base)
    assert steps_of(tmp_path) == [2]


def test_the_list_is_the_originals_text(tmp_path: Path) -> None:
    append_export_state(tmp_path, "/exports/1700000000", 30)
    text = (tmp_path / EXPORT_STATE).read_text()
    assert text == 'entries {\n  export_dir: "/exports/1700000000"\n  global_step: 30\n}\n'
    (tmp_path / EXPORT_STATE).write_text("entries {")
    with pytest.raises(CorruptFileError, match=EXPORT_STATE):
        get_export_saver_listener_state(tmp_path)


@pytest.mark.parametrize("path", ["runs/model.ckpt", "runs/other-3", "runs/model.ckpt-3x", "model.ckpt--3"])
def test_only_checkpoints_have_a_step(path: str) -> None:
    assert get_global_step("runs/model.ckpt-3") == 3
    with pytest.raises(InvalidArgumentError, match="checkpoint_path"):
        get_global_step(path)


def test_dense_only_exports_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="serve --run"):
        listener(tmp_path, dense_only=True)
