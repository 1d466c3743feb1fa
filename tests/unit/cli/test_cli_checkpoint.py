"""Danger: a command that removes the checkpoint a run needs, or restores another moment than requested."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from monolith.cli import main


@pytest.fixture
def model_dir(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """A run with checkpoints at steps 2, 4 and 6."""
    folder = str(tmp_path / "run")
    for last in ("2", "4", "6"):
        assert main(["train", "cli_job:Model", "--max-steps", last, "--model-dir", folder]) == 0
    capsys.readouterr()
    return folder


def points(model_dir: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main(["checkpoint", "list", model_dir, "--json"]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)["restore_points"]
    return found


def trained(model_dir: str, capsys: pytest.CaptureFixture[str], *flags: str) -> int:
    capsys.readouterr()
    assert main(["train", "cli_job:Model", "--json", "--steps", "1", "--model-dir", model_dir, *flags]) == 0
    end = json.loads(capsys.readouterr().out.splitlines()[-1])
    return int(end["step"])


def test_a_folder_without_a_run_is_not_listed_as_an_empty_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "list", str(tmp_path / "misspelt")]) == 2
    assert "expected the model_dir of a saved run" in capsys.readouterr().err
    tmp_path.joinpath("job.yaml").touch()
    assert main(["checkpoint", "list", str(tmp_path / "job.yaml")]) == 2
    assert "job.yaml: expected the model_dir of a saved run, got a file" in capsys.readouterr().err


def test_list(model_dir: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = points(model_dir, capsys)
    assert [(point["checkpoint"], point["step"], point["newest"]) for point in found] == [
        ("model.ckpt-2", 2, False),
        ("model.ckpt-4", 4, False),
        ("model.ckpt-6", 6, True),
    ]
    assert main(["checkpoint", "list", model_dir]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "model.ckpt-4" in line)
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line)  # the time is on one line


@pytest.mark.parametrize("moment", ["step=5", "sequence=2"])
def test_train_goes_back_to_a_moment_once(model_dir: str, moment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(model_dir, capsys, "--restore-to", moment) == 5
    assert trained(model_dir, capsys, "--restore-to", moment) == 6


def test_train_goes_back_to_a_checkpoint(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(model_dir, capsys, "--restore-ckpt", "model.ckpt-2") == 3


def test_train_goes_back_to_a_time(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    time = points(model_dir, capsys)[1]["time"]
    assert trained(model_dir, capsys, "--restore-to", f"time={time}") == 5


@pytest.mark.parametrize("moment", ["step=1", "yesterday", "step=-1"])
def test_a_wrong_moment_is_wrong_usage(model_dir: str, moment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "cli_job:Model", "--model-dir", model_dir, "--restore-to", moment]) == 2
    assert "restore_to" in capsys.readouterr().err


@pytest.mark.parametrize("moment", ["step=99999", "sequence=99999"])
def test_a_moment_that_was_never_reached_is_refused(
    model_dir: str, moment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "cli_job:Model", "--model-dir", model_dir, "--restore-to", moment]) == 2
    assert "is beyond" in (said := capsys.readouterr().err)
    assert "the newest restore point" in said


def test_a_moment_between_two_says_which_one_was_taken(
    model_dir: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert trained(model_dir, capsys, "--restore-to", "step=5") == 5
    assert "restore_to step=5: restored step 4" in caplog.text


def test_remove(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "remove", model_dir, "model.ckpt-2"]) == 0
    assert [point["step"] for point in points(model_dir, capsys)] == [4, 6]
    assert "model.ckpt-2" not in (Path(model_dir) / "checkpoint").read_text()
    # What is left is still whole.
    assert trained(model_dir, capsys, "--restore-ckpt", "model.ckpt-4") == 5


def test_what_is_kept_or_newest_is_not_removed(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "keep", model_dir, "model.ckpt-2"]) == 0
    assert [point["kept"] for point in points(model_dir, capsys)] == [True, False, False]
    for name, reason in (("model.ckpt-2", "kept"), ("model.ckpt-6", "starts from"), ("model.ckpt-5", "no such")):
        assert main(["checkpoint", "remove", model_dir, name]) == 2
        assert reason in capsys.readouterr().err
    assert trained(model_dir, capsys, "--checkpoints-max-to-keep", "1") == 7
    assert [point["step"] for point in points(model_dir, capsys)] == [2, 7]
