"""Danger: texts in a file that silently become other ids than the writer of the file meant, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from monolith.data import Column, CsvSource
from monolith.data.transforms import Compose, FilterByExpression, HashText
from monolith.features import Batch, Ragged, hash_strings

ROWS = "user,topics\nann,news|jazz\n,|jazz\nbob,\n"
USER, TOPICS = Column(name="user", dtype="bytes"), Column(name="topics", dtype="bytes", nested=True)


def only_batch(tmp_path: Path, *columns: Column, text: str = ROWS, separator: str = "|") -> Batch:
    (tmp_path / "rows.csv").write_text(text)
    (batch,) = CsvSource(f"{tmp_path}/rows.csv", columns, batch_size=10, list_separator=separator)
    return batch


def ids(*texts: str) -> list[int]:
    found: list[int] = hash_strings(texts).tolist()
    return found


def test_a_separator_in_a_column_of_one_text_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    only_batch(tmp_path, Column(name="topics", dtype="bytes"))
    (record,) = caplog.records
    assert "rows.csv: line 2: column 'topics': 'news|jazz' is read as one text" in record.getMessage()
    assert "nested=True" in record.getMessage()


def test_no_separator_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    only_batch(tmp_path, USER, TOPICS)
    only_batch(tmp_path, Column(name="topics", dtype="bytes"), separator=";")
    assert not caplog.records


def test_an_empty_text_has_an_id_unless_it_is_skipped(tmp_path: Path) -> None:
    batch = only_batch(tmp_path, USER, TOPICS)
    kept = HashText(columns=("user", "topics"))(batch)
    assert kept["user"].tolist() == ids("ann", "", "bob")
    skipped = HashText(columns=("user", "topics"), skip_empty=True)(batch)
    assert isinstance(skipped["user"], Ragged)
    assert isinstance(skipped["topics"], Ragged)
    assert skipped["user"].to_lists() == [ids("ann"), [], ids("bob")]
    assert skipped["topics"].to_lists() == [ids("news", "jazz"), ids("jazz"), []]


def test_a_filter_leaves_out_rows_without_a_text(tmp_path: Path) -> None:
    batch = only_batch(tmp_path, USER)
    both = Compose([FilterByExpression(expression="len(user) > 0"), HashText(columns=("user",))])
    assert both(batch)["user"].tolist() == ids("ann", "bob")
