"""Danger: `monolith verify` calls a model_dir whole whose restore would fail or lose something, or blames a healthy one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint_tables import new_table, train
from monolith.cli import main
from monolith.errors import InvalidArgumentError
from monolith.log import ChangeLog, prune
from monolith.log.bounds import HEAD
from monolith.log.segment_format import segment_name
from monolith.ps import ParameterServer, ServerConfig
from monolith.state import verify, write_checkpoint, write_snapshot
from monolith.state.index import CheckpointState, write_checkpoint_state
from monolith.state.manifest import MANIFEST


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, one with a snapshot, segments after both, tables without a log, and the folders of two servers."""
    model_dir, table = tmp_path_factory.mktemp("run"), new_table()
    with ChangeLog(model_dir / "log", [table]) as log:
        for step in (1, 2, 3):
            train(table, range(step * 10), step=step)
            if step < 3:
                path = model_dir / f"model.ckpt-{step}"
                write_checkpoint(path, state={"w": step}, step=step, tables=[table], log=log, full=step == 2)
        log.commit(step=3, dense={"w": 3})
    write_checkpoint(model_dir / "model.ckpt-4", state={"w": 4}, step=4, tables=[table])
    for index in range(2):
        with ParameterServer(ServerConfig(folder=model_dir / "ps" / str(index), log_flush_secs=0)) as server:
            server._dispatcher.commit()
    return model_dir


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "run")


def files(run: Path) -> Iterator[Path]:
    for path in sorted(run.rglob("*")):
        if path.is_file() and path.stat().st_size and path.name not in ("writer.lock", "server"):
            yield path


def test_a_whole_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in files(run)}
    assert main(["verify", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "checkpoints": 3,
        "snapshots": 1,
        "segments": 5,
        "servers": 2,
        "ranks": 0,
        "unfinished": [],
        "problems": [],
    }
    assert main(["verify", str(run)]) == 0
    assert "3 checkpoints, 1 snapshot, 5 segments, 2 servers: 0 problems" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in files(run)} == before


def test_every_missing_file_is_a_problem(run: Path) -> None:
    tried = 0
    for path in files(run):
        # Without its manifest a checkpoint is one that was never finished, and without a head a log of one segment is new.
        if path.name == "manifest.json" or (path.name == HEAD and len([*path.parent.glob("*")]) < 4):
            continue
        data = path.read_bytes()
        path.unlink()
        assert any(path.name in problem.error for problem in verify(run).problems), path
        path.write_bytes(data)
        tried += 1
    assert tried > 10
    assert verify(run).problems == []


def test_a_flipped_bit_anywhere_is_a_problem(run: Path) -> None:
    tried = 0
    for path in files(run):
        data = path.read_bytes()
        for position in {0, len(data) // 3, len(data) // 2, len(data) - 1}:
            if path.name == HEAD:
                continue  # two records, of which one is enough; most of it is not used
            damaged = bytearray(data)
            damaged[position] ^= 4
            path.write_bytes(damaged)
            assert verify(run).problems, f"{path} at {position}"
            tried += 1
        path.write_bytes(data)
    assert tried > 50
    assert verify(run).problems == []


def test_a_lost_segment_of_a_server_and_a_lost_server(run: Path) -> None:
    (run / "ps" / "1" / "log" / segment_name(1)).unlink()
    (problem,) = verify(run).problems
    assert problem.path == str(run / "ps" / "1" / "log")
    assert segment_name(1) in problem.error


def test_the_checkpoint_that_the_index_names_must_be_there(run: Path) -> None:
    paths = tuple(f"{run}/model.ckpt-{step}" for step in (1, 2, 4))
    write_checkpoint_state(run, CheckpointState(model_checkpoint_path=paths[-1], all_model_checkpoint_paths=paths))
    assert verify(run).problems == []
    (run / "model.ckpt-4" / "manifest.json").unlink()
    (problem,) = verify(run).problems
    assert "model.ckpt-4: has no manifest.json" in problem.error


def test_what_a_crash_leaves_is_no_problem(run: Path) -> None:
    (run / "model.ckpt-9").mkdir()
    (run / "model.ckpt-9" / ".writing").write_bytes(b"")
    table = new_table()
    with ChangeLog(run / "log", [table]) as log:
        open_one = write_snapshot(run, [table], log)
        found = verify(run)
        assert (len(found.unfinished), found.problems) == (2, [])
        open_one.abandon()


def test_parts_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(run / "model.ckpt-2").checkpoints == 1
    assert verify(run / "log").segments == 3
    prune(run / "log", [(1, 3)])
    assert verify(run / "log").problems == []
    with pytest.raises(InvalidArgumentError, match="there is nothing"):
        verify(run / "none")
    assert main(["verify", str(run / "none")]) == 2
    assert "there is nothing" in capsys.readouterr().err
    with pytest.raises(InvalidArgumentError, match="got a file"):
        verify(run / "model.ckpt-2" / MANIFEST)


def test_a_remote_run(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    write_checkpoint(f"{url}/model.ckpt-4", state={"w": 1}, step=4, tables=[new_table()])
    assert (verify(url).checkpoints, verify(url).problems) == (1, [])
