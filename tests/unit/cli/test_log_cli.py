"""Danger: a command that hides an abandoned line, or prints what a program cannot read."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from comparison import int64
from log_tables import new_table, train
from monolith.cli import main
from monolith.log import ChangeLog, LogReader
from monolith.log.segment_format import segment_name


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    """Three commits, of which the last two are abandoned for a fourth."""
    table = new_table()
    with ChangeLog(tmp_path / "log", [table], clock=lambda: 1_700_000_000.0) as log:
        train(table, [-7, 8], event_time=50)
        log.commit(step=10, dense={"a": 1})
        train(table, [-7])
        log.commit(step=20)
        log.commit(step=30)
    with ChangeLog(tmp_path / "log", [table], parent=1, clock=lambda: 1_700_000_100.0) as log:
        table.erase(int64([-7]))
        log.commit(step=15, source={"offset": 3})
    return str(tmp_path)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["log", *arguments, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)  # type: ignore[no-any-return]


def test_list_shows_every_segment(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "list", model_dir)
    assert found["folder"] == f"{model_dir}/log"
    columns = ("sequence", "parent", "step", "rows", "erased", "dense", "source", "abandoned")
    assert [[segment[name] for name in columns] for segment in found["segments"]] == [
        [1, 0, 10, 2, 0, True, False, False],
        [2, 1, 20, 1, 0, False, False, True],
        [3, 2, 30, 0, 0, False, False, True],
        [4, 1, 15, 0, 1, False, True, False],
    ]
    first = found["segments"][0]
    assert (first["time"], first["event_time"]) == (1_700_000_000.0, 50)
    assert first["bytes"] == Path(model_dir, "log", segment_name(1)).stat().st_size
    assert answer(capsys, "list", f"{model_dir}/log") == found


def test_people_get_tables(model_dir: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["log", "list", model_dir]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    heads = ["sequence", "parent", "step", "rows", "erased", "size", "time", "notes"]
    assert heads in lines
    (first,) = (line for line in lines if line[:1] == ["1"])
    assert (first[:5], first[-3:]) == (["1", "0", "10", "2", "0"], ["2023-11-14", "22:13:20", "dense"])
    assert [line[0] for line in lines if line[-1:] == ["abandoned"]] == ["2", "3"]
    assert main(["log", "history", model_dir, "-7"]) == 0
    out = capsys.readouterr().out
    assert "id -7: 2 changes" in out
    assert out.split()[-1] == "erased"
    assert main(["log", "history", model_dir, "123456"]) == 0
    assert capsys.readouterr().out.startswith("id 123456: 0 changes in ")


def test_history_of_an_id_with_a_minus(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "history", model_dir, "-7")
    assert found["id"] == -7
    assert [(change["sequence"], change["step"], change["erased"]) for change in found["changes"]] == [
        (1, 10, False),
        (4, 15, True),
    ]
    first, last = found["changes"]
    assert (first["table"], first["event_time"], len(first["values"])) == ("user", 50, 5)
    assert first["norm"] > 0
    assert first["slots"]
    assert (last["values"], last["norm"]) == (None, None)
    assert [c["step"] for c in answer(capsys, "history", model_dir, "-7", "--to", "3")["changes"]] == [10, 20]
    assert len(answer(capsys, "history", model_dir, "-7", "--table", "user")["changes"]) == 2
    assert answer(capsys, "history", model_dir, "5", "--table", "user")["changes"] == []


def test_follow_prints_what_comes(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log", "follow", model_dir, "--since", "1", "--count", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sequence"] == 4
    assert main(["log", "follow", model_dir, "--since", "1", "--count", "1"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("sequence 4  parent 1  step 15  rows 0  erased 1  size ")
    assert line.endswith("time 2023-11-14 22:15:00  notes source\n")


def test_follow_ends_by_an_interrupt(model_dir: str) -> None:
    command = [sys.executable, "-c", "import sys; from monolith.cli import main; sys.exit(main())"]
    command += ["log", "follow", model_dir, "--since", "0", "--poll", "0.01", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert [json.loads(child.stdout.readline())["sequence"] for _ in range(2)] == [1, 4]
        with ChangeLog(Path(model_dir, "log"), []) as log:
            log.commit(step=99)
        assert json.loads(child.stdout.readline())["step"] == 99
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=60) == 130


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["list", "{}/none"], 2, "there is no such folder"),
        (["history", "{}", str(2**63)], 2, "expected an int64"),
        (["history", "{}", "x"], 2, "ID"),
        (["history", "{}", "-7", "--table", "item"], 2, "has no 'item'; it has user"),
        (["history", "{}", "1", "--to", "9"], 2, segment_name(9)),
        (["follow", "{}", "--since", "3"], 2, "start from a snapshot"),
    ],
)
def test_exit_codes(
    model_dir: str, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert main(["log", *(argument.format(model_dir) for argument in arguments)]) == code
    assert message in capsys.readouterr().err


def test_history_of_a_run_on_servers_says_where_its_rows_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ChangeLog(tmp_path / "log", []).close()
    table = new_table()
    with ChangeLog(tmp_path / "ps" / "1" / "log", [table]) as log:
        train(table, [8])
        log.commit(step=1)
    assert main(["log", "history", str(tmp_path), "8"]) == 2
    assert f"parameter servers or ranks are in {tmp_path}/ps/1" in capsys.readouterr().err
    assert len(answer(capsys, "history", f"{tmp_path}/ps/1", "8")["changes"]) == 1


def test_a_damaged_segment_ends_a_list_with_3(model_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(model_dir, "log", segment_name(3)).write_bytes(b"")
    assert main(["log", "list", model_dir]) == 3
    assert segment_name(3) in capsys.readouterr().err


def test_an_empty_log_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ChangeLog(tmp_path / "log", []).close()
    assert answer(capsys, "list", str(tmp_path))["segments"] == []
    assert main(["log", "list", str(tmp_path)]) == 0
    assert LogReader(tmp_path / "log").newest == 0
