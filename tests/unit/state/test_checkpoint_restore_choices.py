"""Danger: a checkpoint that does not fit is forced in, or a restore that was refused has changed something."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoint_tables import new_table, rows_of, table_config, train
from comparison import int64
from monolith import EmbeddingTable, InvalidArgumentError, Segment, TableConfig
from monolith.errors import CheckpointMismatchError
from monolith.log import ChangeLog
from monolith.state import plan_restore, prepare_tables, restore_tables, write_checkpoint
from monolith.table import SGD, Adagrad, AdmissionFilter, Ones, SlidingAdmission, Zeros


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tables = [new_table("user"), new_table("item")]
    for number, table in enumerate(tables):
        train(table, range(10 + number))
    write_checkpoint(tmp_path / "model.ckpt-4", state={}, step=4, tables=tables, time=50.0)
    return tmp_path / "model.ckpt-4"


def test_a_plan_says_everything_and_changes_nothing(saved: Path) -> None:
    tables = [
        EmbeddingTable(table_config("user", dim=4)),
        EmbeddingTable(table_config("item", seed=7, optimizer=SGD())),
        new_table("new"),
    ]
    report = plan_restore(saved, tables)
    assert report.problems == (
        "table 'user': segment 0 has dim 4, saved with 3",
        "table 'item': has seed 7, saved with 0: unseen ids would read other values",
        "table 'item': segment 0 has optimizer sgd, saved with adam",
        "table 'new': is not in the checkpoint as 'new', which has 'user', 'item'; set allow_new_tables (--allow-new-tables) to "
        "start it empty, or give its old name in table_alias_map",
    )
    with pytest.raises(CheckpointMismatchError) as error:
        restore_tables(saved, tables)
    # One line with all of it, and what to do.
    assert str(error.value).splitlines() == [str(error.value)]
    assert str(error.value).startswith(f"{saved}: does not fit the model: {'; '.join(report.problems)}. To train")
    assert [len(table) for table in tables] == [0, 0, 0]


def test_when_one_table_does_not_fit_none_is_restored(saved: Path) -> None:
    user, item = new_table("user"), EmbeddingTable(table_config("item", seed=1))
    train(user, [99])
    before = rows_of(user)
    with pytest.raises(CheckpointMismatchError):
        restore_tables(saved, [user, item])
    assert rows_of(user) == before


def test_a_table_under_another_name(saved: Path) -> None:
    people, item = new_table("people"), new_table("item")
    report = restore_tables(saved, [people, item], aliases={"people": "user"})
    assert (len(people), len(item)) == (10, 11)
    assert report.tables["people"].saved_as == "user"
    assert report.notes == ("table 'people': was named 'user': ids without a row read other initial values now",)
    assert report.parent == 0
    with pytest.raises(InvalidArgumentError, match="aliases: the model has no table 'user'; it has 'people'"):
        restore_tables(saved, [people], aliases={"user": "people"})


def test_two_tables_may_start_from_one(saved: Path) -> None:
    left, right = new_table("left"), new_table("right")
    restore_tables(saved, [left, right], aliases={"left": "user", "right": "user"})
    assert rows_of(left) == rows_of(right)
    assert len(left) == 10


def test_only_some_tables(saved: Path) -> None:
    user, item = new_table("user"), new_table("item")
    train(item, [5])
    before = rows_of(item)
    report = restore_tables(saved, [user, item], only=["user"])
    assert (len(user), rows_of(item)) == (10, before)
    assert (report.tables["item"].fate, report.parent) == ("kept", 0)
    with pytest.raises(InvalidArgumentError, match="only: the model has no table 'x'"):
        restore_tables(saved, [user], only=["x"])


def test_a_table_that_is_new_starts_empty_if_that_is_allowed(saved: Path) -> None:
    user, new = new_table("user"), new_table("new")
    train(new, [1])
    report = restore_tables(saved, [user, new], allow_new_tables=True)
    assert (len(user), len(new)) == (10, 0)
    assert report.tables["new"].fate == "new"
    assert report.notes == (
        "table 'new': is not in the checkpoint: it starts empty",
        "table 'item' of the checkpoint is not used",
    )


def narrow(*, optimizer: Adagrad | None = None) -> TableConfig:
    return TableConfig(name="user", segments=(Segment(dim=2, initializer=Zeros(), optimizer=optimizer or Adagrad()),))


def wide() -> TableConfig:
    added = Segment(dim=1, initializer=Ones(), optimizer=SGD(learning_rate=1.0))
    return TableConfig(name="user", segments=(added, *narrow().segments))


@pytest.mark.parametrize("logged", [False, True])
def test_an_added_segment_is_initialised_and_the_rest_goes_on(tmp_path: Path, logged: bool) -> None:
    old, new = EmbeddingTable(narrow()), EmbeddingTable(wide())
    log = ChangeLog(tmp_path / "log", [old]) if logged else None
    train(old, range(5), step=3)
    write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[old], log=log)
    problem = "table 'user': has segments of dims [1, 2], saved with [2]; allow_new_segments fits added or removed ones"
    assert plan_restore(tmp_path / "model.ckpt-1", [new]).problems == (problem,)
    report = restore_tables(tmp_path / "model.ckpt-1", [new], allow_new_segments=True)
    assert report.notes == ("table 'user': segment 0 (dim 1) is new: initialised in every row",)
    assert (report.tables["user"].fate, report.parent) == ("converted", 0)
    before, after = old.lookup_entry(int64(range(5))), new.lookup_entry(int64(range(5)))
    assert torch.equal(after.values, torch.cat([torch.ones(5, 1), before.values], dim=1))
    assert torch.equal(after.slots["1/norm"], before.slots["0/norm"])
    assert torch.equal(after.times, before.times)
    grads = torch.ones(5, 2)
    old.apply_gradients(int64(range(5)), grads)
    new.apply_gradients(int64(range(5)), torch.cat([torch.zeros(5, 1), grads], dim=1))
    assert torch.equal(new.lookup(int64(range(5)))[:, 1:], old.lookup(int64(range(5))))
    if log is not None:
        log.close()


def test_a_removed_segment_is_dropped_and_said_so(tmp_path: Path) -> None:
    old, new = EmbeddingTable(wide()), EmbeddingTable(narrow())
    train(old, range(5))
    write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[old])
    report = restore_tables(tmp_path / "model.ckpt-1", [new], allow_new_segments=True)
    assert report.notes == ("table 'user': segment 0 (dim 1) of the checkpoint is dropped",)
    assert torch.equal(new.lookup(int64(range(5))), old.lookup(int64(range(5)))[:, 1:])
    assert torch.equal(
        new.lookup_entry(int64(range(5))).slots["0/norm"], old.lookup_entry(int64(range(5))).slots["1/norm"]
    )


def test_what_is_neither_added_nor_removed_stays_refused(tmp_path: Path) -> None:
    old = EmbeddingTable(narrow())
    train(old, range(5))
    write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[old])
    for segment in (Segment(dim=3), Segment(dim=2, optimizer=SGD())):
        changed = EmbeddingTable(TableConfig(name="user", segments=(segment,)))
        with pytest.raises(CheckpointMismatchError, match="segment 0 has"):
            restore_tables(tmp_path / "model.ckpt-1", [changed], allow_new_segments=True)


def test_hyperparameters_may_change(tmp_path: Path) -> None:
    old = EmbeddingTable(narrow())
    train(old, range(5))
    write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[old])
    new = EmbeddingTable(narrow(optimizer=Adagrad(learning_rate=9.0)))
    assert restore_tables(tmp_path / "model.ckpt-1", [new]).problems == ()
    assert rows_of(new) == rows_of(old)
    assert new.config.learning_rates == (9.0,)


def test_a_filter_of_another_size(tmp_path: Path) -> None:
    def filtered(capacity: int) -> EmbeddingTable:
        return new_table(admission=AdmissionFilter(SlidingAdmission(capacity=capacity, default_threshold=1)))

    old, new = filtered(1000), filtered(2000)
    train(old, [1])
    write_checkpoint(tmp_path / "model.ckpt-1", state={}, step=1, tables=[old])
    with pytest.raises(CheckpointMismatchError, match=r"capacity=2000.*capacity=1000.*reset_admission"):
        restore_tables(tmp_path / "model.ckpt-1", [new])
    restore_tables(tmp_path / "model.ckpt-1", [new], reset_admission=True)
    train(new, [1])
    assert 1 not in new


def test_what_is_prepared_changes_nothing_until_it_is_put_in_place(saved: Path) -> None:
    user = new_table("user")
    train(user, [99])
    report, put_in_place = prepare_tables(saved, [user], only=["user"])
    assert (report.step, report.time) == (4, 50.0)
    assert list(user) == [99]
    put_in_place()
    assert len(user) == 10
