"""Danger: `monolith train --then` reads the stream with other columns than the files, from another place, or the files again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml

from monolith.cli import main
from monolith.state import inspect_checkpoint
from monolith.streams import Stream, open_stream

OPTIONS = {"stop_when_idle_secs": 0.3, "max_wait_secs": 0.01}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    table = pa.table({"id": list(range(8)), "label": pa.array([1.0] * 8, pa.float32())})
    end = {"partition": "events/0", "first_offset": 0, "next_offset": 8}
    table = table.replace_schema_metadata({b"monolith.stream": json.dumps(end).encode()})
    pa.parquet.write_table(table, tmp_path / "data" / "a.parquet")
    append(open_stream(tmp_path / "events", partitions=1), range(12))
    return tmp_path


def append(stream: Stream, ids: range) -> None:
    with stream.writer() as writer:
        for number in ids:
            writer.append(orjson.dumps({"id": number, "label": 1.0}))


@pytest.fixture
def train(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def run(*flags: str, **job: Any) -> dict[str, Any]:  # noqa: ANN401
        settings = {
            "model": "waiting_run:IdCounts",
            "input": "waiting_run:parquet_input",
            "input_args": {"folder": str(folder / "data")},
            "run": {"model_dir": str(folder / "run"), "clip_norm": None},
            **job,
        }
        (folder / "job.yaml").write_text(yaml.safe_dump(settings))
        code = main(["train", str(folder / "job.yaml"), "--json", *flags])
        printed = capsys.readouterr()
        if code:
            return {"error": " ".join(printed.err.split())}
        end: dict[str, Any] = json.loads(printed.out.splitlines()[-1])
        return end

    return run


Train = Callable[..., dict[str, Any]]


def test_the_stream_continues_behind_the_files_and_a_restart_behind_the_stream(folder: Path, train: Train) -> None:
    flags = ("--then", f"stream:{folder / 'events'}")
    assert train(*flags, then=dict(OPTIONS))["steps_made"] == 3  # 4 + 4 rows of files, 4 of the stream
    append(open_stream(folder / "events"), range(12, 15))
    end = train(*flags, then=dict(OPTIONS))
    assert (end["steps_made"], end["step"], end["reason"]) == (1, 4, "the data ended")


def test_flags_say_where_the_stream_begins(folder: Path, train: Train) -> None:
    then = {"stream": str(folder / "events"), **OPTIONS}
    assert train("--then-from", "start", then=then)["steps_made"] == 5
    assert train("--then-from", "end", "--model-dir", str(folder / "other"), then=then)["steps_made"] == 2


@pytest.mark.parametrize(
    ("flags", "then", "message"),
    [
        (["--then-from", "end"], None, "--then-from: there is no stream"),
        ([], {"start": "end", "stream": "x"}, "JobConfig.then.start: say it as then_from"),
        ([], {"batchsize": 3, "stream": "x"}, "StreamInput.batchsize: unknown field"),
        ([], {}, "JobConfig.then.stream: missing"),
        (["--then-from", "tomorrow"], "events", "start: expected"),
        ([], {"stream": "x", "transforms": [{"HashTxt": {}}]}, "there is no 'HashTxt'; did you mean 'HashText'?"),
        ([], {"stream": "x", "transforms": [{"HashText": {"column": "id"}}]}, "HashText.column: unknown field"),
    ],
)
def test_what_is_missing_or_wrong_is_said(
    folder: Path,
    train: Train,
    flags: list[str],
    then: object,
    message: str,
) -> None:
    job = {} if then is None else {"then": str(folder / then) if then == "events" else then}
    assert message in train(*flags, **job)["error"]


def test_the_stream_may_have_its_own_transforms(folder: Path, train: Train) -> None:
    kept = [{"FilterByExpression": {"expression": "id < 9"}}]
    then = {"stream": str(folder / "events"), **OPTIONS, "transforms": kept}
    assert train(then=then)["steps_made"] == 3
    assert train("--model-dir", str(folder / "other"), then={**then, "transforms": []})["steps_made"] == 3
    rows = {name: answer_rows(folder / name) for name in ("run", "other")}
    assert rows == {"run": 9, "other": 12}


def answer_rows(model_dir: Path) -> int:
    ((_, table),) = inspect_checkpoint(str(max(model_dir.glob("model.ckpt-*[0-9]")))).tables.items()
    return table.rows
