"""Danger: a file that is no JSON becomes records that every reader refuses, and the command says that all is well."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from monolith.cli import main
from monolith.streams import open_stream


def write(monkeypatch: pytest.MonkeyPatch, data: bytes, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    return main(["stream", "write", *arguments])


def values(folder: Path) -> list[bytes]:
    stream = open_stream(folder)
    with stream.reader() as reader:
        reader.assign(dict.fromkeys(stream.partitions(), "start"))
        return [value for records in reader.poll(100, 1.0) for value in records.values]


@pytest.mark.parametrize("line", [b"not json", b"[1]", b"7", b'"text"', b"\xff"])
def test_a_line_that_is_no_object_is_refused(
    line: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = str(open_stream(tmp_path / "events", partitions=1).url)
    assert write(monkeypatch, b'{"a":1}\n\n' + line + b'\n{"a":2}\n', url) == 2
    said = capsys.readouterr().err
    assert "line 3: expected a JSON object, got" in said
    assert "--raw writes any lines" in said
    assert "1 records, of the lines before it, were written: go on with line 3" in said
    assert values(tmp_path / "events") == [b'{"a":1}']


def test_raw_lines_are_written_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(open_stream(tmp_path / "events", partitions=1).url)
    assert write(monkeypatch, b"not json\n[1]\n", url, "--raw") == 0
    assert values(tmp_path / "events") == [b"not json", b"[1]"]
    assert write(monkeypatch, b"{}\n", url, "--raw", "--records") == 2
