"""Danger: a job that is started and fails for a reason that was known before."""

from __future__ import annotations

from pathlib import Path

import pytest

from monolith.cli import main


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere.py"], "TARGET: there is no file 'nowhere.py'; for a module give --module"),
        (["--on", "mesos", "work.py"], "--on: expected local, ray or ray=ADDRESS, got 'mesos'"),
        (["--on", "local=here", "work.py"], "--on: expected local, ray or ray=ADDRESS, got 'local=here'"),
        (
            ["--ps-args", "--folder 'x", "work.py"],
            "--ps-args: expected options as a shell takes them, No closing quotation",
        ),
        (["--ps-memory", "much", "work.py"], "--ps-memory: expected a size as 8GiB"),
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
