"""Danger: a save or a restore that reads the same manifests and segments again and again, slower with every checkpoint.

tests/unit/test_structure.py counts the opens of a whole save and a whole restore of a trainer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from monolith import EmbeddingTable
from monolith.state import ModelDir, find_restore_point, restore_tables, write_snapshot
from monolith.state.save import begin_checkpoint
from monolith.testing import sgd_table_config


def test_a_model_dir_reads_nothing_back_that_it_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = Path.read_bytes

    def counting(path: Path) -> bytes:
        read.append(path.name)
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", counting)
    home, table = ModelDir(tmp_path), EmbeddingTable(sgd_table_config(1))
    with home.open_log([table]) as log:
        for step in (1, 2):
            table.reinitialize([step])
            snapshot = write_snapshot(home, [table], log) if step == 2 else None
            begin_checkpoint(
                tmp_path / f"model.ckpt-{step}",
                state={},
                step=step,
                tables=[table],
                log=log,
                snapshot=snapshot,
                model_dir=home,
            ).finish()
    assert "manifest.json" not in read
    point = find_restore_point(home)
    assert "manifest.json" not in read
    copy = EmbeddingTable(sgd_table_config(1))
    restore_tables(point, [copy])
    assert sorted(copy) == [1, 2]
    assert read.count("manifest.json") == 0


def test_a_manifest_that_another_process_replaced_is_read_again(tmp_path: Path) -> None:
    home, other = ModelDir(tmp_path), ModelDir(tmp_path)
    for step in (1, 2):
        begin_checkpoint(tmp_path / "model.ckpt", state={"step": step}, step=step, model_dir=other).finish()
        assert home.manifest("model.ckpt").step == step
        assert home.state("model.ckpt") == {"step": step}
    other.remove("model.ckpt")
    assert not home.checkpoints()
