"""Danger: a command that exits with 0 after a failure, ignores a misspelt setting, or prints what a program cannot read."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import monolith
from monolith.cli import main
from monolith.cli.job import load_job
from monolith.errors import ConfigError, RunInterruptedError, StorageError
from monolith.train import Estimator, RunConfig
from training import batch_of


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def model_dir(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    folder = str(tmp_path / "run")
    assert main(["train", "cli_job:Model", "--steps", "6", "--model-dir", folder]) == 0
    capsys.readouterr()
    return folder


def test_train_reports_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "cli_job:Model", "--json", "--model-dir", str(tmp_path), "--log-step-count-steps", "4"]
    assert main([*command, "--steps", "6"]) == 0
    first = lines(capsys)
    assert [line["step"] for line in first] == [4, 6, 6]
    end = {"event": "end", "step": 6, "steps_made": 6, "reason": "step 6 is reached", "model_dir": str(tmp_path)}
    assert first[-1] == end
    assert main([*command, "--max-steps", "9"]) == 0
    assert [line["step"] for line in lines(capsys)] == [8, 9, 9]
    assert main([*command, "--max-steps", "9"]) == 0
    assert [(line["step"], line["steps_made"]) for line in lines(capsys)] == [(9, 0)]


def test_a_worker_that_was_interrupted_without_a_signal_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: object, **__: object) -> int:
        raise RunInterruptedError("worker 1 stopped at step 3 before its work was done")

    monkeypatch.setattr(Estimator, "train", train)
    assert main(["train", "cli_job:Model", "--steps", "6"]) != 0


def test_people_get_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "cli_job:Model", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "examples/s" in out
    assert "ended at step 2: step 2 is reached, not saved" in out


def test_evaluate_each_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--model-dir", str(tmp_path)]
    assert main(["evaluate", "cli_job:Model", *where, "--each-checkpoint"]) == 2
    assert "has no checkpoint" in capsys.readouterr().err
    for steps in (3, 6):
        assert main(["train", "cli_job:Model", *where, "--set", f"max_steps={steps}"]) == 0
    capsys.readouterr()
    assert main(["evaluate", "cli_job:Model", *where, "--each-checkpoint", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["global_step"] for line in lines] == [3, 6]
    assert main(["evaluate", "cli_job:Model", *where, "--each-checkpoint", "--set", "max_steps=3"]) == 0
    assert "step 3" in (out := capsys.readouterr().out)
    assert "step 6" not in out


def test_evaluate_predict_export_inspect(model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--model-dir", model_dir]
    assert main(["evaluate", "cli_job:Model", *where, "--json"]) == 0
    (metrics,) = lines(capsys)
    assert (metrics["global_step"], metrics["click/examples"]) == (6, 24)

    assert main(["predict", "cli_job:Model", *where, "--limit", "9", "--keys", "click,user"]) == 0
    by_model = lines(capsys)
    assert [row["user"] for row in by_model[:8]] == batch_of(0)["user"].tolist()  # type: ignore[union-attr]
    assert len(by_model) == 9

    exports = str(tmp_path / "exports")
    assert main(["export", "cli_job:Model", *where, "--output", exports, "--json"]) == 0
    (export,) = lines(capsys)
    assert export["step"] == 6

    command = ["predict", "cli_job:Model", "--export", exports, "--limit", "9", "--keys", "click,user"]
    assert main(command) == 0
    by_export = lines(capsys)
    assert [row["click"] for row in by_export] == pytest.approx([row["click"] for row in by_model], abs=1e-6)

    for path, kind in ((model_dir, "run"), (f"{model_dir}/model.ckpt-6", "checkpoint"), (exports, "export")):
        assert main(["inspect", path, "--json"]) == 0
        (found,) = lines(capsys)
        assert found["kind"] == kind
        assert found["tables"]["user"]["rows"] > 0  # type: ignore[index, call-overload]


def test_inspect_shows_a_table_its_slots_and_one_id(
    model_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "cli_job:Model", "--model-dir", model_dir, "--output", str(tmp_path / "exports")]) == 0
    capsys.readouterr()
    (table,) = (tmp_path / "exports").rglob("slots*.table")
    item = (1 << 48) + int(batch_of(0)["item"][0])  # type: ignore[index]
    assert main(["inspect", str(table), "--id", str(item), "--json"]) == 0
    (found,) = lines(capsys)
    (described,) = found["tables"].values()  # type: ignore[attr-defined]
    assert set(described["rows_by_slot"]) == {"1", "2"}
    assert sum(described["rows_by_slot"].values()) == described["rows"]
    assert len(described["id"]["values"]) == described["dim"] == 5
    assert main(["inspect", str(table), "--id", str(2**60)]) == 0
    assert "id.values" not in capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"monolith {monolith.__version__}\n"
    assert monolith.__version__ == importlib.metadata.version("monolith-torch")


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ("model_args.dmi=3", "JobConfig.model_args: cli_job:Model: got an unexpected keyword argument 'dmi'; it takes"),
        (
            "input_args.flie=x",
            "JobConfig.input_args: cli_job:batches: got an unexpected keyword argument 'flie'; it takes",
        ),
    ],
)
def test_a_typo_in_arguments_is_one_line(capsys: pytest.CaptureFixture[str], sets: str, message: str) -> None:
    command = ["train", "cli_job:Model", "--set", "input=cli_job:batches", "--set", sets, "--steps", "1"]
    assert main(command) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_env_names_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    (found,) = lines(capsys)
    assert found["packages"]["torch"].startswith("2.")  # type: ignore[index, call-overload, union-attr]


def test_a_file_sets_everything_and_sets_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: cli_job:Model\n"
        "model_args: {seed: 3}\n"
        "input: cli_job:batches\n"
        "input_args: {first: 2}\n"
        "max_steps: 100\n"
        "run: {clip_norm: 5, seed: 1, event_time: time}\n"
    )
    job = load_job(
        str(path), ["run.seed=2", "run.clip_norm=6", "model_args.batches=7"], {"clip_norm": 7.0, "seed": None}
    )
    assert job.run == RunConfig(clip_norm=7.0, seed=2, event_time="time")
    assert job.model_args == {"seed": 3, "batches": 7}
    assert (job.input, job.input_args, job.max_steps) == ("cli_job:batches", {"first": 2}, 100)
    assert main(["train", str(path), "--set", "max_steps=3"]) == 0


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["run.clip_nrom=1"], r"RunConfig\.clip_nrom: unknown field; did you mean 'clip_norm'"),
        (["modle_args.seed=1"], r"JobConfig\.modle_args: unknown field; did you mean 'model_args'"),
        (["run.clip_norm=-1"], r"RunConfig\.clip_norm: .* got -1"),
        (["run.clip_norm=[1"], "the value is not YAML"),
        (["run"], r"expected key\.key=value, got 'run'"),
        (["model.x=1"], "'model' is a value"),
        (["run=3"], r"JobConfig\.run: expected the fields of RunConfig, got 3"),
        (["model=os"], r"JobConfig\.model"),
    ],
)
def test_wrong_settings_are_refused_with_the_nearest_right_one(sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_job("cli_job:Model", sets)


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read"):
        load_job(str(tmp_path / "none.yaml"))
    for text in ("- a\n", "a: [", "!!python/object/apply:os.system ['true']"):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError):
            load_job(str(tmp_path / "bad.yaml"))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "cli_job:Model", "--set", "run.clip_nrom=1"], 2, "did you mean 'clip_norm'"),
        (
            ["train", "cli_job:Modell"],
            2,
            "JobConfig.model: 'cli_job:Modell': there is no 'Modell' in cli_job; did you mean 'Model'?",
        ),
        (["train", "no_such_module:Model"], 2, "there is no module 'no_such_module'"),
        (["train", "cli_job:Model", "--set", "input=cli_job:broken"], 2, "the batch has no column 'clicked'"),
        (["train", "cli_job:Model", "--set", "input=cli_job:nothing"], 2, "cli_job:nothing('train') returned None"),
        (["train", "cli_job:Model", "--set", "input=cli_job:misread"], 2, "give delimiter=';'"),
        (["train", "cli_job:Model", "--clip-norm", "much"], 2, "--clip-norm"),
        (["tarin"], 2, "tarin"),
        (["inspect", "no_such_path"], 2, "there is no such path"),
        (["inspect", "damaged.table"], 3, "damaged.table"),
        (["evaluate", "no_such_file.yaml"], 4, "no_such_file.yaml"),
        (
            ["evaluate", "cli_job:Model", "--model-dir", "never"],
            2,
            "'never' has no checkpoint, so the model was never trained",
        ),
        (["export", "cli_job:Model", "--model-dir", "never"], 2, "pass --untrained"),
        (["predict", "cli_job:Model"], 2, "RunConfig.model_dir: none is given"),
        (["evaluate", "cli_job:Model", "--untrained"], 0, ""),
        (["train", "cli_job:Model", "--steps", "1", "--model-dir", "damaged.table/x"], 4, "damaged.table"),
    ],
)
def test_exit_codes(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("damaged.table").write_bytes(b"not a table")
    assert main(arguments) == code
    assert message in capsys.readouterr().err


def test_a_run_that_goes_on_and_has_saved_nothing_is_to_be_saved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("monolith.cli.job.live_status", lambda folder: {"step": 3})
    assert main(["export", "cli_job:Model", "--model-dir", "young"]) == 2
    assert "'young' has saved nothing yet; save it with `monolith control save young`" in capsys.readouterr().err


def start(*arguments: str) -> subprocess.Popen[str]:
    script = "import sys; from monolith.cli import main; sys.exit(main())"
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


def test_an_interrupted_run_is_saved_and_a_stack_can_be_asked_for(tmp_path: Path) -> None:
    process = start(
        "train", "cli_job:Model", "--set", "model_args.batches=1000000000", "--model-dir", str(tmp_path), "--json",
        "--log-step-count-steps", "1",
    )  # fmt: skip
    assert process.stdout is not None
    try:
        process.stdout.readline()  # the first step is made
        process.send_signal(signal.SIGUSR1)
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, err
    end = json.loads(out.splitlines()[-1])
    assert end["reason"] == "received SIGTERM"
    assert "train_step" in err or "_loop" in err, "SIGUSR1 printed the stack"
    assert main(["evaluate", "cli_job:Model", "--model-dir", str(tmp_path)]) == 0
