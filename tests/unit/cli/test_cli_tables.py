"""Danger: an import or export by command line that writes half, guesses a format, or answers what a program cannot read."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from comparison import float32, int64
from dumps import adagrad, assert_same_rows, entry, write_dump, write_multi_dump
from monolith import EmbeddingTable, Segment, TableConfig
from monolith.cli import main
from monolith.cli.output import showing_progress
from monolith.original import dump_counts, import_multi_dump
from monolith.state import write_checkpoint
from monolith.table.exchange import import_parquet
from monolith.testing import sgd_table_config

CONFIG = TableConfig(name="user", segments=(Segment(dim=2),))
YAML = "name: user\nsegments:\n- dim: 2\n"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    table = EmbeddingTable(CONFIG)
    table.apply_gradients(int64([1, 2, 3]), float32([[1, 2], [3, 4], [5, 6]]), event_time=9)
    table.save(tmp_path / "user.table")
    return tmp_path / "user.table"


@pytest.fixture
def yaml(tmp_path: Path) -> str:
    (tmp_path / "user.yaml").write_text(YAML)
    return str(tmp_path / "user.yaml")


def answer(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_there_and_back(saved: Path, yaml: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = EmbeddingTable.load(saved)
    dump, parquet = str(tmp_path / "dump" / "user"), str(tmp_path / "user.parquet")
    assert main(["export-table", str(saved), dump, "--to", "dump", "--shards", "2", "--json"]) == 0
    wrote = answer(capsys)
    assert wrote["files"] == [f"{dump}-00000-of-00002", f"{dump}-00001-of-00002"]
    assert (wrote["rows"], wrote["bytes"]) == ({"user": 3}, sum(Path(f).stat().st_size for f in wrote["files"]))  # type: ignore[union-attr]
    assert main(["import-table", dump, str(tmp_path / "new" / "a.table"), "--config", yaml, "--json"]) == 0
    assert answer(capsys)["tables"]["user"]["rows"] == 3  # type: ignore[index]
    assert_same_rows(EmbeddingTable.load(tmp_path / "new" / "a.table"), table)
    assert main(["export-table", str(saved), parquet]) == 0
    assert main(["import-table", parquet, str(tmp_path / "b.table")]) == 0
    assert_same_rows(EmbeddingTable.load(tmp_path / "b.table"), table)
    assert pq.read_metadata(parquet).num_rows == 3
    assert main(["export-table", str(saved), str(tmp_path / "user.safetensors")]) == 0
    assert load_file(tmp_path / "user.safetensors")["ids"].shape == (3,)


def test_several_tables_and_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write_multi_dump(tmp_path / "ps0", {"a": [entry(1, [1, 2], adagrad(1, 1))], "b": [], "c": [entry(1, [1])]})
    second = write_multi_dump(tmp_path / "ps1", {"a": [entry(2, [3, 4])], "b": [entry(7, [5])], "c": []})
    blocks = {"a": json.loads(CONFIG.model_dump_json()), "b": {"name": "x/b", "segments": [{"dim": 1}]}}
    (tmp_path / "all.yaml").write_text(json.dumps(blocks))
    out = tmp_path / "out"
    command = ["import-table", first, str(out), "--config", str(tmp_path / "all.yaml"), "--also", second, "--json"]
    assert main(command) == 0
    assert {name: each["rows"] for name, each in answer(capsys)["tables"].items()} == {"a": 2, "b": 1}  # type: ignore[attr-defined]
    assert sorted(file.name for file in out.iterdir()) == ["user.table", "x%2Fb.table"]
    assert EmbeddingTable.load(out / "x%2Fb.table").lookup([7]).tolist() == [[5]]
    assert main(["export-table", str(out / "user.table"), str(tmp_path / "again"), "--to", "multi-dump"]) == 0
    assert len(import_multi_dump(str(tmp_path / "again"), {"user": CONFIG})["user"]) == 2


def test_a_table_of_a_checkpoint_and_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_dir, user, item = (
        str(tmp_path / "run"),
        EmbeddingTable(CONFIG),
        EmbeddingTable(sgd_table_config(1, name="item")),
    )
    for step in (1, 2):
        user.apply_gradients(int64([step, 9]), float32([[1, 2], [3, 4]]), event_time=step)
        item.reinitialize(int64([7]))
        write_checkpoint(f"{model_dir}/model.ckpt-{step}", state={}, step=step, tables=[user, item])
        if step == 1:
            user.save(tmp_path / "first.table")
    for source, expected in (
        (model_dir, user),
        (f"{model_dir}/model.ckpt-1", EmbeddingTable.load(tmp_path / "first.table")),
    ):
        target = tmp_path / Path(source).name
        assert main(["export-table", source, f"{target}.parquet", "--table", "user", "--json"]) == 0
        assert answer(capsys)["rows"] == {"user": len(expected)}
        assert_same_rows(import_parquet(f"{target}.parquet"), expected)
    assert main(["export-table", model_dir, str(tmp_path / "all"), "--to", "multi-dump"]) == 0
    assert dump_counts(str(tmp_path / "all")) == {"user": 3, "item": 1}
    capsys.readouterr()
    assert main(["export-table", model_dir, str(tmp_path / "one.parquet")]) == 2
    assert "holds one table; choose one of user, item" in capsys.readouterr().err


def test_optimizer_state_can_be_left_behind(tmp_path: Path, yaml: str) -> None:
    write_dump(tmp_path / "t", [entry(1, [1, 2], adagrad(9, 9))])
    (tmp_path / "adam.yaml").write_text(YAML + "  optimizer: {kind: adam}\n")
    command = ["import-table", str(tmp_path / "t"), str(tmp_path / "t.table"), "--config", str(tmp_path / "adam.yaml")]
    assert main(command) == 2
    assert not (tmp_path / "t.table").exists()
    assert main([*command, "--no-optimizer-state"]) == 0
    assert EmbeddingTable.load(tmp_path / "t.table").lookup_entry([1]).slots["0/m"].tolist() == [[0, 0]]


def test_exit_codes(saved: Path, yaml: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = write_dump(tmp_path / "t", [entry(1, [1, 2])])
    out = str(tmp_path / "out.table")
    (tmp_path / "wrong.yaml").write_text(YAML + "colour: red\n")
    cases = {
        ("import-table", dump, out): (2, "expected the configuration of the table"),
        ("import-table", dump, out, "--config", str(tmp_path / "wrong.yaml")): (
            2,
            "wrong.yaml: TableConfig.colour: unknown",
        ),
        ("import-table", str(tmp_path / "none"), out, "--config", yaml): (2, "no dump of that name"),
        ("import-table", str(tmp_path / "none.parquet"), out): (4, "cannot read"),
        ("import-table", "a.parquet", out, "--also", "b"): (2, "--also: only a dump"),
        ("import-table", dump, str(saved / "x"), "--config", yaml): (4, "cannot make the folder"),
        ("export-table", str(saved), str(tmp_path / "user")): (2, "does not say the format"),
        ("export-table", str(saved), dump, "--to", "dump"): (2, "there is a dump of that name"),
        ("export-table", str(saved), out, "--to", "dump", "--table", "item"): (2, "has no table 'item'; it has user"),
        ("export-table", str(tmp_path / "none"), out, "--to", "dump"): (2, "there is no such path"),
    }
    for command, (code, message) in cases.items():
        assert main(list(command)) == code, command
        assert message in capsys.readouterr().err.replace("\n", " "), command
    damaged = (tmp_path / "t-00000-of-00001").read_bytes()[:-1]
    (tmp_path / "t-00000-of-00001").write_bytes(damaged)
    assert main(["import-table", dump, out, "--config", yaml]) == 3
    assert not Path(out).exists()


@pytest.mark.parametrize("terminal", [False, True])
def test_progress(terminal: bool) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=80)
    with showing_progress("reading x", console) as report:
        for done in range(1, 101):
            report(done, 100)
    if terminal:
        assert "reading x" in written.getvalue()
    else:
        assert written.getvalue().splitlines() == [f"reading x: {tenth}0%" for tenth in range(1, 11)]
