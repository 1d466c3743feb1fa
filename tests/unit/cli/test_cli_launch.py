"""Danger: a job that is started and fails for a reason that was known before."""

from __future__ import annotations

from pathlib import Path

import pytest

from monolith.cli import main
from monolith.cluster.launch import JobRoles, Role, RoleKind
from monolith.cluster.liveness import Liveness
from monolith.testing.roles import ScriptedProcess
from monolith.transport.tokens import reveal


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere.py"], "TARGET: there is no file 'nowhere.py'; give --module for a module"),
        (["--on", "mesos", "work.py"], "--on: expected local, ray or ray=ADDRESS, got 'mesos'"),
        (["--on", "local=here", "work.py"], "--on: expected local, ray or ray=ADDRESS, got 'local=here'"),
        (
            ["--ps-args", "--folder 'x", "work.py"],
            "--ps-args: expected options as a shell takes them, No closing quotation",
        ),
        (["--ps-memory", "much", "work.py"], "--ps-memory: expected a size such as 8GiB"),
        (["--liveness", "hang_secs=3", "work.py"], "--liveness: expected JSON such as"),
        (["--liveness", '{"hang_sec": 3}', "work.py"], "Liveness.hang_sec: unknown field; did you mean 'hang_secs'?"),
        (["--min-ranks", "2", "work.py"], "--min-ranks: expected --ranks as well, got only --min-ranks 2"),
        (["--ranks", "2", "--workers", "3", "work.py"], "--workers: expected --workers or --ranks, got --workers 3"),
        (["--ranks", "2", "--min-ranks", "3", "work.py"], "--min-ranks: expected at most --ranks 2, got 3"),
        (["--grace", "5", "work.py"], "Liveness: grace_secs must be greater than lease_secs, 5 > 30"),
    ],
)
def test_wrong_usage_starts_nothing(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("work.py").write_text("print('started')")
    assert main(["launch", "--log-dir", "logs", *arguments]) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err
    assert captured.out == ""
    assert not Path("logs").exists()


@pytest.mark.parametrize("arguments", [["--ps", "0", "work.py"], ["--workers", "0", "work.py"], []])
def test_a_job_has_servers_workers_and_a_script(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *arguments]) == 2
    assert capsys.readouterr().err


class Obedient(ScriptedProcess):
    """Ends when it is asked to."""

    def ask_to_end(self) -> None:
        self.exit(0)


class FakeRoles:
    """Workers that end well at once, and servers that end when they are asked to."""

    jobs: list[tuple[JobRoles, Path]] = []

    def __init__(self, job: JobRoles, log_dir: Path, **options: object) -> None:
        self.jobs.append((job, log_dir))

    def __enter__(self) -> FakeRoles:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def start(self, role: Role) -> ScriptedProcess:
        return Obedient(code=None if role.kind is RoleKind.PS else 0)


@pytest.mark.parametrize(
    ("arguments", "python_args"),
    [
        (["work.py", "--ps", "x"], ("work.py", "--ps", "x")),
        (["work.py", "--", "--ps", "--", "x"], ("work.py", "--ps", "--", "x")),
        (["--module", "package.work", "-m"], ("-m", "package.work", "-m")),
        (["job.yaml", "--steps", "3"], ("-m", "monolith.cli", "train", "job.yaml", "--steps", "3")),
    ],
)
def test_a_worker_runs_a_script_a_module_or_a_job(
    arguments: list[str], python_args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("monolith.cli.launch.LocalRoles", FakeRoles)
    monkeypatch.setattr(FakeRoles, "jobs", [])
    for name in ("work.py", "job.yaml"):
        Path(name).touch()
    for _ in range(2):
        assert (
            main(["launch", "--ps", "2", "--model-dir", "run", "--ps-args", "--memory-limit '8 GiB'", *arguments]) == 0
        )
    (job, logs), (again, _) = FakeRoles.jobs
    assert job.worker_args == python_args
    assert job.python_args(job.roles[1]) == ["-m", "monolith.cli", "ps", "--memory-limit", "8 GiB"]
    assert job.environment(job.roles[1])["MONOLITH_MODEL_DIR"] == str(tmp_path / "run")
    assert logs == tmp_path / "run" / "logs"
    assert job.uuid != again.uuid, "nobody is found at the addresses of another launch"


def launched(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> JobRoles:
    monkeypatch.setattr("monolith.cli.launch.LocalRoles", FakeRoles)
    monkeypatch.setattr(FakeRoles, "jobs", [])
    assert main(["launch", *arguments, "--log-dir", "logs", "work.py"]) == 0
    return FakeRoles.jobs[0][0]


def test_each_job_has_a_token_of_its_own_unless_one_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MONOLITH_PS_TOKEN", raising=False)
    Path("work.py").touch()
    drawn = {reveal(launched(monkeypatch).token) for _ in range(3)}
    assert len(drawn) == 3
    assert all(token is not None and len(token) >= 32 for token in drawn)
    output = "".join(capsys.readouterr())
    assert not any(str(token) in output for token in drawn)
    Path("token").write_text("a-token-in-a-file\n")
    Path("token").chmod(0o600)
    for ps_args in ("--token-file token", "--port 0 --token-file=token"):
        assert reveal(launched(monkeypatch, "--ps-args", ps_args).token) == "a-token-in-a-file"
    monkeypatch.setenv("MONOLITH_PS_TOKEN", "a-token-of-the-environment")
    assert reveal(launched(monkeypatch).token) == "a-token-of-the-environment"


def test_time_limits_come_from_flags_then_the_option_then_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("monolith.cli.launch.LocalRoles", FakeRoles)
    monkeypatch.setattr(FakeRoles, "jobs", [])
    monkeypatch.setenv("MONOLITH_LIVENESS", '{"hang_secs": 77, "restarts": 9}')
    Path("work.py").touch()
    assert main(["launch", "--restarts", "3", "--restart-window", "60", "work.py"]) == 0
    assert main(["launch", "--restarts", "3", "--liveness", '{"startup_secs": 5, "restarts": 2}', "work.py"]) == 0
    (from_environment, _), (from_option, _) = FakeRoles.jobs
    assert from_environment.liveness == Liveness(hang_secs=77.0, restarts=3, restart_window_secs=60.0)
    assert from_option.liveness == Liveness(startup_secs=5.0, restarts=3)
    told = from_option.environment(from_option.roles[0])
    assert Liveness.from_json(told["MONOLITH_LIVENESS"]) == from_option.liveness
    assert told["MONOLITH_SUPERVISED"] == "true"


@pytest.mark.parametrize("flags", [[], ["--restarts", "5"], ["--accept-loss"]])
def test_only_who_says_so_goes_on_after_a_server_lost_its_rows(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("monolith.cli.launch.LocalRoles", FakeRoles)
    monkeypatch.setattr(FakeRoles, "jobs", [])
    Path("work.py").touch()
    assert main(["launch", *flags, "work.py"]) == 0
    ((job, _),) = FakeRoles.jobs
    accepts = job.environment(job.roles[0]).get("MONOLITH_PARTIAL_RECOVERY")
    assert accepts == ("true" if flags == ["--accept-loss"] else None)


def test_ranks_take_the_place_of_workers_and_need_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("work.py").touch()
    job = launched(monkeypatch, "--ranks", "2", "--min-ranks", "1")
    assert [str(role) for role in job.roles] == ["rank 0", "rank 1"]
    assert job.liveness.restarts == 3, "a rank that is lost stops all others"
    environment = job.environment(job.roles[1])
    expected = {
        "MONOLITH_SERVER_TYPE": "worker",
        "MONOLITH_INDEX": "1",
        "MONOLITH_NUM_WORKERS": "2",
        "MONOLITH_NUM_PS": "0",
        "MONOLITH_ENABLE_SYNC_TRAINING": "true",
        "MONOLITH_MIN_RANKS": "1",
    }
    assert {name: environment.get(name) for name in expected} == expected


def test_ranks_with_servers_exchange_dense_gradients_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("work.py").touch()
    job = launched(monkeypatch, "--ranks", "2", "--ps", "1", "--restarts", "0")
    assert [str(role) for role in job.roles] == ["ps 0", "rank 0", "rank 1"]
    assert job.liveness.restarts == 0
    environment = job.environment(job.roles[1])
    assert environment["MONOLITH_ENABLE_PARTIAL_SYNC_TRAINING"] == "true"
    assert "MONOLITH_ENABLE_SYNC_TRAINING" not in environment
