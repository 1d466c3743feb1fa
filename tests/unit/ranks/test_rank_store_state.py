"""Danger: a store over ranks saves or restores the rows of one rank only, or replaces rows that are to be kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from monolith.errors import CheckpointMismatchError, CorruptFileError
from monolith.log import LogReader
from monolith.ranks import Agreement, RankStore
from monolith.ranks.mesh import Mesh
from monolith.state import write_checkpoint
from monolith.state.save import begin_checkpoint
from monolith.table import EmbeddingTable, LocalStore
from monolith.testing import sgd_table_config
from monolith.testing.rank_threads import run_ranks

T = TypeVar("T")
IDS = torch.arange(100)


def on_ranks(ranks: int, chief: Callable[[RankStore], T], *, name: str = "item") -> T:
    """Call `chief` with the store of rank 0, while the others serve it."""

    def rank(mesh: Mesh) -> list[T]:
        agreement = Agreement(mesh)
        store = RankStore(agreement, [sgd_table_config(2, name=name)])
        found = []
        try:
            if mesh.rank == 0:
                found.append(chief(store))
                agreement.release("end")
            else:
                agreement.serve("end")
        finally:
            store.close()
        return found

    return run_ranks(ranks, rank)[0][0]


def values(store: RankStore) -> torch.Tensor:
    return store.lookup_entry("item", IDS).values


def fill(store: RankStore, factor: float = 1.0) -> torch.Tensor:
    rows = factor * torch.stack([IDS, -IDS], dim=1).float()
    store.assign("item", IDS, rows)
    return rows


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_saved_store_is_restored_by_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    def save(store: RankStore) -> torch.Tensor:
        rows = fill(store)
        store.save(tmp_path / "rows")
        return rows

    rows = on_ranks(2, save)

    def restore(store: RankStore) -> torch.Tensor:
        fill(store, 5.0)
        store.restore(tmp_path / "rows")
        return values(store)

    assert torch.equal(on_ranks(ranks, restore), rows)


def test_ranks_restore_what_one_process_has_saved(tmp_path: Path) -> None:
    table = EmbeddingTable(sgd_table_config(2, name="item"))
    rows = torch.stack([IDS, -IDS], dim=1).float()
    LocalStore([table]).assign("item", IDS, rows)
    write_checkpoint(tmp_path / "model.ckpt-3", state={}, step=3, tables=[table])

    def restore(store: RankStore) -> tuple[torch.Tensor, int]:
        store.restore(tmp_path / "model.ckpt-3")
        return values(store), store.stats()["item"].rows

    found, count = on_ranks(3, restore)
    assert torch.equal(found, rows)
    assert count == len(IDS)


def test_rows_that_are_to_be_kept_are_kept(tmp_path: Path) -> None:
    def run(store: RankStore) -> None:
        rows = fill(store)
        assert not store.is_initialised()
        store.save(tmp_path / "rows")
        newer = fill(store, 5.0)
        store.mark_initialised()
        store.prepare_restore(tmp_path / "rows", only_fresh=True)()
        assert torch.equal(values(store), newer)
        store.prepare_restore(tmp_path / "rows")()
        assert torch.equal(values(store), rows)
        assert store.is_initialised()

    on_ranks(2, run)


def test_what_one_rank_cannot_read_changes_nothing_on_any(tmp_path: Path) -> None:
    def run(store: RankStore) -> None:
        fill(store)
        store.save(tmp_path / "rows")
        newer = fill(store, 5.0)
        part = next((tmp_path / "ps" / "1").glob("rows.*/tables/*/*.table"))
        part.write_bytes(part.read_bytes()[:-1])
        with pytest.raises(CorruptFileError, match=r"rank 0: .*ps/1"):  # it knows all files by their sizes
            store.restore(tmp_path / "rows")
        data = bytearray(part.read_bytes() + b"?")
        data[-20] ^= 1
        part.write_bytes(data)
        with pytest.raises(CorruptFileError, match="rank 1: "):
            store.restore(tmp_path / "rows")
        assert torch.equal(values(store), newer)

    on_ranks(2, run)


def test_tables_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    on_ranks(2, lambda store: (fill(store), store.save(tmp_path / "rows")))
    with pytest.raises(CheckpointMismatchError, match="'other'"):
        on_ranks(2, lambda store: store.restore(tmp_path / "rows"), name="other")


def test_every_rank_logs_its_own_rows(tmp_path: Path) -> None:
    def run(store: RankStore) -> None:
        store.open_log(str(tmp_path))
        fill(store)
        begun = store.begin_cut(step=1)
        assert begun is not None
        begun.finish()
        assert sum(LogReader(tmp_path / "ps" / rank / "log").info(1).rows for rank in "01") == len(IDS)

    on_ranks(2, run)


def test_rows_written_between_a_restore_and_the_log_are_in_the_log(tmp_path: Path) -> None:
    def save(store: RankStore) -> None:
        fill(store)
        parts = store.begin_save(str(tmp_path / "model.ckpt-1"), step=1)
        begin_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, servers=parts.finish).finish()

    on_ranks(2, save)

    def change(store: RankStore) -> torch.Tensor:
        store.restore(tmp_path / "model.ckpt-1")
        newer = fill(store, 5.0)
        store.open_log(str(tmp_path))
        parts = store.begin_save(str(tmp_path / "model.ckpt-2"), step=2)
        begin_checkpoint(tmp_path / "model.ckpt-2", state={}, step=2, servers=parts.finish).finish()
        return newer

    newer = on_ranks(2, change)

    def read(store: RankStore) -> torch.Tensor:
        store.restore(tmp_path / "model.ckpt-2")
        return values(store)

    assert torch.equal(on_ranks(1, read), newer)
