"""Danger: a person who cannot see what is on a stream, or copies records that arrive changed."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from monolith.cli import main
from monolith.state import write_checkpoint
from monolith.streams import open_stream
from stream_kinds import KINDS, kind_of_streams


class Input:
    """Standard input with these bytes."""

    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)


def written(monkeypatch: pytest.MonkeyPatch, data: bytes, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", Input(data))
    return main(["stream", "write", *arguments])


def lines(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main(["stream", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("name", KINDS)
def test_records_are_written_looked_at_and_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with kind_of_streams(name, tmp_path) as kind:
        url = kind.new(partitions=2, topic="clicks").url
        assert main(["stream", "create", url, "--partitions", "2"]) == 0
        assert written(monkeypatch, b'{"user":7}\n\n{"user":8}\n{"user":7,"x":1}\n', url, "--key", "user") == 0
        assert "3 records written" in capsys.readouterr().err
        (info,) = lines(capsys, "info", url, "--json")
        partitions = {str(row["partition"]): row for row in info["partitions"]}  # type: ignore[attr-defined]
        assert set(partitions) == {"clicks/0", "clicks/1"}
        for row in partitions.values():
            assert (row["newest"] is None) == (row["start"] == row["end"])
        found = lines(capsys, "read", url)
        assert sorted(json.dumps(line["value"]) for line in found) == [
            '{"user": 7, "x": 1}',
            '{"user": 7}',
            '{"user": 8}',
        ]
        sevens = [line for line in found if line["key"] == "7"]
        assert [line["value"] for line in sevens] == [{"user": 7}, {"user": 7, "x": 1}]
        assert len({line["partition"] for line in sevens}) == 1
        assert len(lines(capsys, "read", url, "--limit", "2")) == 2
        assert lines(capsys, "read", url, "--from", "end") == []
        assert main(["stream", "info", url]) == 0
        assert "clicks/1" in capsys.readouterr().out


def test_a_copy_has_the_same_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (open_stream(tmp_path / name, partitions=1) for name in ("one", "other"))
    given = [
        (b"text", None, 5, ()),
        (b'{"a":1}', b"k", 6, (("origin", b"\xff"),)),
        (b'{"a": 1}', None, 6, ()),
        (b'{"a":1e999}', b"\xff", 7, ()),
        (b'{"a":1,"a":2}', b"", 8, ()),
        (b"\xff\x00", None, 9, (("x", b""),)),
        (b"[1, 2]", None, 10, ()),
        (b'["\\u00fc"]', None, 11, ()),
        (b"", None, 12, ()),
        (b"null", None, 13, ()),
    ]
    with one.writer() as writer:
        for value, key, timestamp, headers in given:
            writer.append(value, key=key, timestamp=timestamp, headers=headers)
    assert main(["stream", "read", str(one.url)]) == 0
    assert written(monkeypatch, capsys.readouterr().out.encode(), str(other.url), "--records") == 0
    with other.reader() as reader:
        reader.assign({"other/0": "start"})
        (records,) = reader.poll(100, 10)
    headers = records.headers or []
    assert list(zip(records.values, records.keys, records.timestamps, headers, strict=True)) == given


def test_reading_begins_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = open_stream(tmp_path / "clicks", partitions=1)
    noon = 1_769_860_800_000
    with stream.writer() as writer:
        for number in range(4):
            writer.append(b"%d" % number, timestamp=noon + 1000 * number)
    for where in (str(noon + 2000), "2026-01-31T12:00:02", "2026-01-31T12:00:02+00:00", "2026-01-31T13:00:02+01:00"):
        assert [line["value"] for line in lines(capsys, "read", stream.url, "--from", where)] == ["2", "3"]
    assert main(["stream", "read", stream.url, "--from", "yesterday"]) == 2
    assert "--from: expected start, end" in capsys.readouterr().err


def test_the_saved_position_of_a_run_is_shown_and_how_far_behind_it_is_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = open_stream(tmp_path / "clicks", partitions=2)
    with stream.writer() as writer:
        for number in range(10):
            writer.append(b"%d" % number, partition=0)
    run = tmp_path / "run"
    state = {"source": {"workers": [{"partitions": '{"clicks/0": [7, 2], "clicks/1": "start"}', "event_times": "{}"}]}}
    write_checkpoint(f"{run}/model.ckpt-5", state=state, step=5)
    (info,) = lines(capsys, "info", stream.url, "--run", str(run), "--json")
    saved = [(row["saved"], row["after_saved"]) for row in info["partitions"]]  # type: ignore[attr-defined]
    assert saved == [(7, 3), (None, None)]
    assert info["run"] is None
    live: dict[str, object] = {"state": "training", "lag_records": 1, "lag_seconds": 0.5, "step": 9}
    monkeypatch.setattr("monolith.cli.stream.live_status", lambda folder: live if folder == run else None)
    (info,) = lines(capsys, "info", stream.url, "--run", str(run), "--json")
    assert info["run"] == {"state": "training", "lag_records": 1, "lag_seconds": 0.5}
    assert main(["stream", "info", stream.url, "--run", str(run)]) == 0
    assert "is training, and 1 records behind now" in " ".join(capsys.readouterr().out.split())
    live.clear()
    live["problem"] = "it hangs"
    assert lines(capsys, "info", stream.url, "--run", str(run), "--json")[0]["run"] == {"problem": "it hangs"}
    assert main(["stream", "info", stream.url, "--run", str(run)]) == 0
    assert "does not answer: it hangs" in " ".join(capsys.readouterr().out.split())
    assert main(["stream", "info", stream.url, "--run", str(tmp_path / "nothing")]) == 2


def test_streams_are_listed_and_partitions_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b/c"):
        assert (
            main(["stream", "create", str(tmp_path / name), "--partitions", "2", "--set", "retention_bytes=5000"]) == 0
        )
    assert main(["stream", "add-partitions", str(tmp_path / "a"), "1"]) == 0
    (listed,) = lines(capsys, "list", str(tmp_path), "--json")
    assert [(Path(str(row["stream"])).name, row["partitions"]) for row in listed["streams"]] == [("a", 3), ("c", 2)]  # type: ignore[attr-defined]
    stream = open_stream(tmp_path / "a")
    assert stream.settings.retention_bytes == 5000  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        (b"{", ["--key", "user"], "line 1: expected a JSON object"),
        (b"\n[1]", ["--key", "user"], "line 2: expected a JSON object, got"),
        (b'{"item": 1}', ["--key", "user"], "line 1: has no field 'user', which --key names"),
        (b'{"item": 1}', ["--records"], "line 1: has no value or value_base64"),
        (b'{"value_base64": "?"}', ["--records"], "line 1: value_base64 is not base64"),
        (b"", ["--set", "fsync"], "--set: expected NAME=VALUE, got 'fsync'"),
        (b"", ["--set", "fsinc=false"], "fsync"),
        (b"", ["--partition", "7"], "expected some of 0 to 0"),
    ],
)
def test_a_wrong_line_or_option_is_named(
    data: bytes,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = open_stream(tmp_path / "clicks", partitions=1)
    assert written(monkeypatch, data, stream.url, *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_stream_that_does_not_exist_says_how_to_make_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stream", "info", str(tmp_path / "clicks")]) == 2
    assert "monolith stream create" in capsys.readouterr().err
