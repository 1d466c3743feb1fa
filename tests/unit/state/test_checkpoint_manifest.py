"""Danger: a manifest that was altered, cut off or made by a newer release is believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from monolith import CorruptFileError, _core
from monolith.state.manifest import Manifest, check_sizes, read_manifest, write_sealed
from monolith.state.storage import LocalFolder
from monolith.table.table_file import FileEntry
from monolith.testing import bit_flips, scrambles, truncations

MANIFEST = Manifest(step=7, time=12.5, files=(FileEntry.of("state.json", b"{}"),), config={"seed": 3})


def sealed(content: dict[str, object]) -> bytes:
    body = json.dumps(content, separators=(",", ":")).encode()[:-1]
    return body + b',"checksum":%d}\n' % _core.crc32c(body)


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    write_sealed(LocalFolder(tmp_path), MANIFEST)
    assert read_manifest(tmp_path) == MANIFEST
    assert json.loads((tmp_path / "manifest.json").read_text())["format"] == "monolith-checkpoint"


def test_every_damage_is_refused(tmp_path: Path) -> None:
    write_sealed(LocalFolder(tmp_path), MANIFEST)
    path = tmp_path / "manifest.json"
    data = path.read_bytes()
    for damages in (truncations(data, count=100), bit_flips(data, count=600), scrambles(data, count=200)):
        for what, damaged in damages:
            path.write_bytes(damaged)
            with pytest.raises(CorruptFileError):
                pytest.fail(f"{what}: believed {read_manifest(tmp_path)}")


def test_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(CorruptFileError, match=r"has no manifest\.json: .* did not finish"):
        read_manifest(tmp_path)


def test_a_newer_version_is_refused_with_the_advice_to_upgrade(tmp_path: Path) -> None:
    content = {**json.loads(MANIFEST.model_dump_json()), "version": 2, "something": "new"}
    (tmp_path / "manifest.json").write_bytes(sealed(content))
    with pytest.raises(CorruptFileError, match=r"version 2 is newer .* upgrade monolith-torch"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "monolith-snapshot"}, "expected a monolith-checkpoint, got 'monolith-snapshot'"),
        ({"version": "1"}, "expected a version number"),
        ({"step": -1}, "step"),
        ({"unknown": 1}, "unknown field"),
        ({"files": [{"name": "a", "size": 1, "checksum": "md5:00"}]}, "checksum"),
    ],
)
def test_sealed_but_wrong(tmp_path: Path, change: dict[str, object], message: str) -> None:
    (tmp_path / "manifest.json").write_bytes(sealed({**json.loads(MANIFEST.model_dump_json()), **change}))
    with pytest.raises(CorruptFileError, match=message):
        read_manifest(tmp_path)


def test_listed_names_stay_inside(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"{}")
    outside = FileEntry.of("../secret", b"{}")
    with pytest.raises(CorruptFileError, match="stays inside"):
        check_sizes(LocalFolder(tmp_path / "checkpoint"), (outside,))


def test_deep_nesting_is_an_error_and_no_crash(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b'{"format":' + b"[" * 100_000)
    with pytest.raises(CorruptFileError, match="is not a manifest"):
        read_manifest(tmp_path)
