"""Danger: `monolith serve` that does not say where it listens, misses a newer version, or drops requests when it is stopped."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from monolith.cli import main
from monolith.serve import Client, load
from training import batch_of

WANTED = ("user", "item", "tags", "age")


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run the command until the end of the block, with its first event."""
    command = [
        sys.executable,
        "-m",
        "monolith.cli",
        "serve",
        *arguments,
        "--http-port",
        "0",
        "--grpc-port",
        "0",
        "--json",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, event_of(process)
        finally:
            process.kill()


def event_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def test_it_serves_the_newest_version_swaps_and_stops_cleanly(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "clicks" / "exported_models"
    shutil.copytree(exported, folder / exported.name)
    batch = {name: batch_of(3)[name] for name in WANTED}
    expected = load(exported).predict(batch)["click"]
    with serving(str(folder), "--poll-secs", "0.05") as (process, event):
        assert (event["event"], event["pid"]) == ("serving", process.pid)
        assert event["models"] == {"clicks": int(exported.name)}
        with Client(event["http"], timeout=20.0) as client:
            answer = client.infer(batch)
            assert answer["click"].tolist() == expected.tolist()
            newer = int(exported.name) + 1
            write_version(exported, tmp_path / "newer", newer)
            shutil.move(tmp_path / "newer", folder / str(newer))
            assert event_of(process) == {"event": "version", "model": "clicks", "version": newer}
            assert client.infer(batch).version == newer
        process.send_signal(signal.SIGTERM)
        assert event_of(process) == {"event": "stopped", "clean": True}
        assert process.wait(30) == 0


def write_version(exported: Path, folder: Path, version: int) -> None:
    """Write the same export as another version."""
    from monolith.serve.manifest import Signature, write_export_manifest

    shutil.copytree(exported, folder)
    signature = Signature.from_json((folder / "signature.json").read_text())
    (folder / "signature.json").write_text(signature.model_copy(update={"version": version}).model_dump_json())
    (folder / "manifest.json").unlink()
    write_export_manifest(folder)


def test_the_missing_extra_is_named_in_one_line(exported: Path) -> None:
    script = (
        "import sys; sys.modules['httptools'] = None\n"
        "from monolith.cli import main\n"
        f"raise SystemExit(main(['serve', {str(exported)!r}, '--http-port', '0', '--grpc-port', '0']))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: serving needs the package 'httptools'; to install it: pip install 'monolith-torch[serve]'\n"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing"], 2, "missing: expected the folder of an export"),
        (["empty"], 3, "empty: has no complete export; run monolith export first"),
        (["empty", "--name", "a", "--name", "b"], 2, "--name: expected 1, one for each PATH, got 2"),
        (["empty", "empty"], 2, "--name: 'empty' stands for empty and empty"),
        (["empty", "--host", "0.0.0.0"], 3, "empty: has no complete export"),
    ],
)
def test_wrong_usage_is_explained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["serve", *arguments]) == code
    assert message in capsys.readouterr().err
