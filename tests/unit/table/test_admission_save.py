"""Danger: a filter is restored with other counts, or from a damaged file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from monolith import CorruptFileError, StorageError
from monolith.table.admission import AdmissionFilter, ProbabilisticAdmission, SlidingAdmission
from monolith.testing import bit_flips, scrambles, truncations

SLIDING = SlidingAdmission(capacity=3000, default_threshold=3)
PROBABILISTIC = ProbabilisticAdmission(default_threshold=4, seed=9)


def used(config: SlidingAdmission | ProbabilisticAdmission, rounds: int = 5) -> AdmissionFilter:
    admission, random = AdmissionFilter(config), torch.Generator().manual_seed(1)
    for _ in range(rounds):
        admission.admit(torch.randint(0, 2000, (1500,), generator=random))
    return admission


@pytest.mark.parametrize("config", [SLIDING, PROBABILISTIC])
def test_a_restored_filter_answers_like_the_saved_one(
    config: SlidingAdmission | ProbabilisticAdmission, tmp_path: Path
) -> None:
    saved, restored = used(config), used(config, rounds=1)
    saved.save(tmp_path / "filter")
    restored.load(tmp_path / "filter")
    random = torch.Generator().manual_seed(2)
    for _ in range(20):
        ids = torch.randint(0, 3000, (500,), generator=random)
        assert torch.equal(restored.admit(ids), saved.admit(ids))
    assert restored.core.serialize() == saved.core.serialize()


def test_thresholds_may_change_between_runs_and_nothing_else(tmp_path: Path) -> None:
    used(SLIDING).save(tmp_path / "filter")
    AdmissionFilter(SlidingAdmission(capacity=3000, default_threshold=9)).load(tmp_path / "filter")
    for other, field in (
        (SlidingAdmission(capacity=3001), "capacity 3000, this filter has 3001"),
        (SlidingAdmission(capacity=3000, split_num=8), "split_num 7, this filter has 8"),
        (PROBABILISTIC, "kind"),
    ):
        with pytest.raises(CorruptFileError, match=f"saved with {field}"):
            AdmissionFilter(other).load(tmp_path / "filter")
    used(PROBABILISTIC).save(tmp_path / "filter")
    with pytest.raises(CorruptFileError, match="saved with seed 9, this filter has 8"):
        AdmissionFilter(ProbabilisticAdmission(seed=8)).load(tmp_path / "filter")


@pytest.mark.parametrize("config", [SLIDING, PROBABILISTIC])
def test_damaged_files_are_refused_and_change_nothing(
    config: SlidingAdmission | ProbabilisticAdmission, tmp_path: Path
) -> None:
    admission, path = used(config), tmp_path / "filter"
    good = admission.core.serialize()
    damages = [
        *truncations(good, count=300),
        *bit_flips(good, count=1500),
        *scrambles(good, count=700),
        ("something else", b"PK\x03\x04" * 100),
    ]
    for what, damaged in damages:
        path.write_bytes(damaged)
        with pytest.raises(CorruptFileError):
            admission.load(path)
        assert admission.core.serialize() == good, what


def test_a_failed_save_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "filter"
    used(SLIDING, rounds=1).save(path)
    before = path.read_bytes()

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, full_disk)
            if step == "replace":
                patch.setattr(Path, "replace", full_disk)
            with pytest.raises(StorageError, match="No space left on device"):
                used(SLIDING).save(path)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_flushed_before_it_is_renamed_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def watched_fsync(descriptor: int) -> None:
        steps.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")  # noqa: PTH112
        fsync(descriptor)

    def watched_replace(self: Path, target: Path) -> Path:
        steps.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    used(SLIDING).save(tmp_path / "filter")
    assert steps == ["file", "rename", "folder"]


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"nowhere.*No such file"):
        used(SLIDING).save(tmp_path / "nowhere" / "filter")
    with pytest.raises(StorageError, match=r"nothing.*No such file"):
        used(SLIDING).load(tmp_path / "nothing")
