"""Danger: a label that is joined with the wrong prediction, counted twice, or lost without being counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from monolith.errors import InvalidArgumentError, SchemaError, StorageError
from monolith.serve.rollout.labels import PredictionMemory, ServedLabel, parse_labels, read_label_file
from rollout_models import Clock


def label(request_id: str, value: float | tuple[float, ...] = 1.0, **fields: object) -> ServedLabel:
    return ServedLabel(request_id=request_id, label=value, **fields)  # type: ignore[arg-type]


def remember(
    memory: PredictionMemory,
    request_id: str,
    *rows: float,
    version: int = 7,
    model: str = "clicks",
    shadow: bool = False,
) -> dict[int, float]:
    """Remember an answer. Returns the largest distance of each shadow that can be compared."""
    values = np.array([rows], dtype=np.float32)
    compared = memory.add(model, version, request_id, ("click",), values, shadow=shadow)
    return {version: round(float(distances.max()), 4) for version, distances in compared}


@pytest.mark.parametrize(
    "body",
    [
        b'{"request_id": "a", "label": 1}\n{"request_id": "b", "label": 0.5, "row": 2}',
        b'\n{"request_id": "a", "label": 1}\r\n\r\n{"request_id": "b", "label": 0.5, "row": 2}\n',
        b'[{"request_id": "a", "label": 1}, {"request_id": "b", "label": 0.5, "row": 2}]',
        b' [\n {"request_id": "a",\n "label": 1}, {"request_id": "b", "label": 0.5, "row": 2}\n]\n',
    ],
)
def test_lines_and_arrays_mean_the_same(body: bytes) -> None:
    assert parse_labels(body) == [label("a"), label("b", 0.5, row=2)]


def test_one_object_may_have_several_lines() -> None:
    assert parse_labels(b'{\n"request_id": "a",\n"label": [0, 1]\n}') == [label("a", (0.0, 1.0))]
    assert parse_labels(b"") == []
    assert parse_labels(b"[]") == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"nonsense", "Invalid JSON"),
        (b'{"request_id": "b"}', "label 2.label: Field required"),
        (b'{"request_id": "b", "label": 2}', "label 2.label"),
        (b'{"request_id": "b", "label": NaN}', "label"),
        (b'{"request_id": "b", "label": "1"}', "label 2.label"),
        (b'{"request_id": "", "label": 1}', "label 2.request_id"),
        (b'{"request_id": "b", "label": 1, "row": -1}', "label 2.row"),
        (b'{"request_id": "b", "label": 1, "rows": 1}', "label 2.rows"),
        (b"7", "label 2"),
        (b"\xff", "Invalid JSON"),
    ],
)
def test_one_wrong_label_refuses_all(line: bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_labels(b'{"request_id": "a", "label": 1}\n' + line)
    assert message in str(caught.value)
    assert "nothing was taken" in str(caught.value)


def test_files_of_lines_and_of_parquet(tmp_path: Path) -> None:
    lines = tmp_path / "labels.jsonl"
    lines.write_text("".join(f'{{"request_id": "r{number}", "label": {number % 2}}}\n' for number in range(25_000)))
    table = tmp_path / "labels.parquet"
    ids = [f"r{number}" for number in range(25_000)]
    pq.write_table(
        pa.table({"request_id": ids, "label": [number % 2 for number in range(25_000)], "other": ids}), table
    )
    read = [[one for batch in read_label_file(path) for one in batch] for path in (lines, table)]
    assert read[0] == read[1]
    assert len(read[0]) == 25_000
    assert read[0][3] == label("r3")


def test_files_that_are_not_labels(tmp_path: Path) -> None:
    pq.write_table(pa.table({"request_id": ["a"], "clicked": [1.0]}), tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match="has no column 'label'; it has request_id, clicked"):
        list(read_label_file(tmp_path / "a.parquet"))
    pq.write_table(pa.table({"request_id": ["a"], "label": [3.0]}), tmp_path / "b.parquet")
    with pytest.raises(InvalidArgumentError, match=r"b\.parquet: ServedLabel.label"):
        list(read_label_file(tmp_path / "b.parquet"))
    (tmp_path / "c.parquet").write_text("nonsense")
    with pytest.raises(SchemaError, match="is not a Parquet file"):
        list(read_label_file(tmp_path / "c.parquet"))
    with pytest.raises(StorageError, match="cannot be read"):
        list(read_label_file(tmp_path / "missing.jsonl"))


def test_a_label_meets_its_row() -> None:
    memory = PredictionMemory()
    remember(memory, "a", 0.1, 0.2, 0.3)
    remember(memory, "b", 0.4)
    (found,), counts = memory.join([label("a", 1.0, row=2), label("b", 0.0), label("a", 0.0, row=0)])
    assert found.predictions == pytest.approx([0.3, 0.4, 0.1])
    assert found.labels.tolist() == [1.0, 0.0, 0.0]
    assert counts == {"joined": 3}


def test_several_labels_are_those_of_all_rows() -> None:
    memory = PredictionMemory()
    remember(memory, "a", 0.1, 0.2, 0.3)
    (found,), _ = memory.join([label("a", (1.0, 0.0, 0.5))])
    assert found.predictions == pytest.approx([0.1, 0.2, 0.3])
    assert found.labels.tolist() == [1.0, 0.0, 0.5]


def test_a_repeated_label_counts_once() -> None:
    memory = PredictionMemory()
    remember(memory, "a", 0.1)
    assert memory.join([label("a"), label("a", 0.0)])[1] == {"joined": 1, "repeated": 1}
    assert memory.join([label("a")]) == ([], {"repeated": 1})


@pytest.mark.parametrize(
    "wrong",
    [
        label("a"),
        label("a", row=3),
        label("a", (1.0, 0.0)),
        label("a", row=0, head="buy"),
        label("a", (1.0,) * 3, row=0),
    ],
)
def test_a_label_of_no_prediction_is_invalid(wrong: ServedLabel) -> None:
    memory = PredictionMemory()
    remember(memory, "a", 0.1, 0.2, 0.3)
    assert memory.join([wrong]) == ([], {"invalid": 1})


def test_a_head_must_be_named_if_there_are_several() -> None:
    memory = PredictionMemory()
    memory.add("clicks", 7, "a", ("click", "buy"), np.array([[0.1], [0.9]], dtype=np.float32))
    (found,), counts = memory.join([label("a"), label("a", head="buy")])
    assert (found.head, found.predictions[0]) == ("buy", pytest.approx(0.9))
    assert counts == {"invalid": 1, "joined": 1}


def test_models_that_share_a_request_id_must_be_named() -> None:
    memory = PredictionMemory()
    remember(memory, "a", 0.1, model="clicks")
    remember(memory, "a", 0.2, model="buys")
    (found,), counts = memory.join([label("a"), label("a", model="buys")])
    assert (found.model, counts) == ("buys", {"invalid": 1, "joined": 1})


def test_the_versions_that_answered_a_request_share_its_label() -> None:
    memory = PredictionMemory()
    assert remember(memory, "a", 0.1, version=7) == {}
    assert remember(memory, "a", 0.2, version=8, shadow=True) == {8: 0.1}
    found, counts = memory.join([label("a")])
    assert {one.version: round(float(one.predictions[0]), 3) for one in found} == {7: 0.1, 8: 0.2}
    assert counts == {"joined": 1}


def test_a_shadow_that_is_quicker_than_the_answer_is_compared_too() -> None:
    memory = PredictionMemory()
    assert remember(memory, "a", 0.2, version=8, shadow=True) == {}
    assert remember(memory, "a", 0.1, version=7) == {8: 0.1}
    assert remember(memory, "a", 0.4, version=9, shadow=True) == {9: 0.3}
    assert memory.counts == {}


def test_an_id_that_is_used_again_means_the_newer_request() -> None:
    memory = PredictionMemory()
    remember(memory, "a", 0.1)
    memory.join([label("a")])
    remember(memory, "a", 0.2)
    ((found,), _) = memory.join([label("a")])
    assert found.predictions == pytest.approx([0.2])
    assert memory.counts["reused_id"] == 1


def test_memory_is_bounded_and_what_is_dropped_is_counted() -> None:
    clock = Clock(0.0)
    memory = PredictionMemory(max_requests=3, max_predictions=10, max_age_secs=60, clock=clock)
    for number in range(5):
        remember(memory, str(number), 0.5)
    assert len(memory) == 3
    assert memory.join([label("0"), label("never"), label("4")])[1] == {"late": 1, "unknown": 1, "joined": 1}
    remember(memory, "large", *([0.5] * 9))
    assert len(memory) == 2
    clock.at = 61.0
    assert memory.join([label("large")])[1] == {"late": 1}
    assert len(memory) == 0
    assert memory.counts == {
        "dropped_capacity": 4,
        "dropped_age": 2,
        "labels_late": 2,
        "labels_unknown": 1,
        "labels_joined": 1,
    }


def test_ids_of_dropped_requests_are_bounded_too() -> None:
    memory = PredictionMemory(max_requests=10)
    for number in range(1000):
        remember(memory, str(number), 0.5)
    assert memory.join([label("985"), label("100")])[1] == {"late": 1, "unknown": 1}
