"""Danger: a folder that was altered, copied by half or tampered with, and is taken for a whole one: wrong rows, an older state
silently, or a crash. What is wrong is refused with an error of ours, and what is restored is exact.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from campaigns import Campaign, Job
from disk_shim import Nursery

from monolith import _core
from monolith.errors import CorruptFileError, MonolithError
from monolith.state.manifest import read_manifest
from monolith.testing import bit_flips, scrambles, truncations

LAST = 33


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that has ended at step `LAST`, and another one, of the same job, that ended before."""

    job: Job
    folder: Path
    shorter: Path
    slow_to_restore: bool


@pytest.fixture(scope="module")
def originals(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folders = []
    for last in (LAST, LAST - 5):
        campaign = Campaign(nursery, tmp_path_factory.mktemp("runs"))
        assert campaign.run(last).returncode == 0
        assert campaign.check() == last
        folders.append(campaign.folder)
    return Finished(job=campaign.job, folder=folders[0], shorter=folders[1], slow_to_restore=campaign.slow_to_restore)


@pytest.fixture
def finished(originals: Finished, tmp_path: Path) -> Finished:
    """Copies that a test may ruin."""
    folder, shorter = (
        shutil.copytree(source, tmp_path / name)
        for name, source in (("folder", originals.folder), ("shorter", originals.shorter))
    )
    return replace(originals, folder=folder, shorter=shorter)


def outcome(job: Job, folder: Path, what: str) -> int | None:
    """The step restored, exactly, or None if it was refused."""
    try:
        return job.check(folder, 0)
    except MonolithError:
        return None
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def damaged(data: bytes, seed: int, *, flips: int) -> Iterator[tuple[str, bytes]]:
    yield from bit_flips(data, count=flips, seed=seed)
    yield from truncations(data, count=flips // 8, seed=seed)
    yield from scrambles(data, count=flips // 8, seed=seed)


def damage_files(run: Finished, *, flips: int, seed: int) -> dict[str, int]:
    """Damage all files in many ways, one at a time; how often that was refused, noticed by nobody, or led elsewhere."""
    seen = {"refused": 0, "unharmed": 0, "another step": 0}
    files = files_of(run.folder)
    for path in files:
        pristine, name = path.read_bytes(), path.relative_to(run.folder)
        for what, data in damaged(pristine, seed, flips=flips // len(files) + 1):
            path.write_bytes(data)
            step = outcome(run.job, run.folder, f"{name}: {what}")
            # The index is text for people, without a checksum: it may lose its newest line, or name another checkpoint.
            assert step in (None, LAST) or path.name == "checkpoint", f"{name}: {what}: silently back at step {step}"
            seen["refused" if step is None else "unharmed" if step == LAST else "another step"] += 1
        path.write_bytes(pristine)
    assert run.job.check(run.folder, LAST) == LAST
    return seen


def test_hundreds_of_flipped_bits(finished: Finished) -> None:
    flips = 60 if finished.slow_to_restore else 400
    seen = damage_files(finished, flips=flips, seed=1)
    assert sum(seen.values()) > flips
    assert seen["refused"] > flips / 8


@pytest.mark.slow
def test_ten_thousand_flipped_bits(finished: Finished) -> None:
    damage_files(finished, flips=3_000 if finished.slow_to_restore else 10_000, seed=2)


def test_a_copy_that_stopped_midway(finished: Finished, tmp_path: Path) -> None:
    chance, copy = random.Random(1), tmp_path / "copy"
    for _ in range(60):
        files = files_of(finished.folder)
        chance.shuffle(files)
        for path in files[: chance.randrange(len(files))]:
            target = copy / path.relative_to(finished.folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes()
            target.write_bytes(data if chance.random() < 0.9 else data[: chance.randrange(len(data))])
        outcome(finished.job, copy, "half a copy")
        shutil.rmtree(copy, ignore_errors=True)


def test_a_whole_copy_elsewhere_is_as_good(finished: Finished, tmp_path: Path) -> None:
    moved = finished.folder.rename(tmp_path / "moved")
    assert finished.job.check(moved, LAST) == LAST


def test_files_of_two_runs_do_not_mix(finished: Finished) -> None:
    # The same names, the same formats, valid checksums.
    for path in files_of(finished.shorter):
        target = finished.folder / path.relative_to(finished.shorter)
        if target.exists() and path.name != "checkpoint":
            pristine = target.read_bytes()
            shutil.copy(path, target)
            step = outcome(finished.job, finished.folder, f"{target} of another run")
            assert step in (None, LAST), f"{target} of another run: silently back at step {step}"
            target.write_bytes(pristine)


TAMPERING: dict[str, Callable[[dict[str, object]], object]] = {
    "an absolute name": lambda entry: entry.update(name="/etc/passwd"),
    "a name outside": lambda entry: entry.update(name="../../outside"),
    "a huge size": lambda entry: entry.update(size=2**63 - 1),
    "a negative size": lambda entry: entry.update(size=-1),
    "another checksum": lambda entry: entry.update(checksum="sha256:" + 64 * "0"),
}


def forge(path: Path, change: Callable[[dict[str, object]], object]) -> bool:
    """Alter the entries of a manifest and seal it again, as one can who knows the format; False if it has none."""
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    snapshot = manifest.get("snapshot")
    entries = [*manifest.get("files", []), *manifest.get("segments", []), *([snapshot] if snapshot else [])]
    for entry in entries:
        change(entry)
    body = json.dumps(manifest, separators=(",", ":")).encode()[:-1]
    path.write_bytes(body + b',"checksum":%d}\n' % _core.crc32c(body))
    return bool(entries)


@pytest.mark.parametrize("what", TAMPERING)
def test_a_forged_manifest_leads_nowhere(finished: Finished, what: str) -> None:
    (finished.folder.parent / "outside").write_bytes(b"not yours")
    (newest,) = finished.folder.rglob(f"model.ckpt-{LAST}/manifest.json")
    assert forge(newest, lambda entry: None)
    assert finished.job.check(finished.folder, LAST) == LAST, "the forger does not know the format"
    assert forge(newest, TAMPERING[what])
    assert outcome(finished.job, finished.folder, what) is None


def test_a_manifest_of_a_newer_release_is_refused_politely(finished: Finished) -> None:
    (newest,) = finished.folder.rglob(f"model.ckpt-{LAST}/manifest.json")
    newest.write_bytes(newest.read_bytes().replace(b'"version":1', b'"version":99', 1))
    assert outcome(finished.job, finished.folder, "a newer version") is None
    with pytest.raises(CorruptFileError, match="upgrade"):
        read_manifest(newest.parent)
