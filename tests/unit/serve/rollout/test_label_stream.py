"""Danger: labels of a stream that are lost, or counted twice, when a server stops between reading and remembering."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.serve.rollout.label_stream import LabelStream, labels_of_record
from monolith.serve.rollout.labels import ServedLabel
from monolith.streams import FolderStream, open_stream
from rollout_models import MODEL, ask, replica, router_of


class Taken:
    """Keeps labels, and fails as often as the test says."""

    def __init__(self, failures: int = 0) -> None:
        self.ids: list[str] = []
        self._failures = failures

    def __call__(self, labels: Sequence[ServedLabel]) -> None:
        if self._failures:
            self._failures -= 1
            raise OSError("labels cannot be taken now")
        self.ids += [label.request_id for label in labels]


def write(stream: FolderStream, *ids: str) -> None:
    with stream.writer() as writer:
        for one in ids:
            writer.append(json.dumps({"request_id": one, "label": 1}).encode())


def wait_for(is_there: Callable[[], bool]) -> None:
    for _ in range(6000):
        if is_there():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it did not happen")


@pytest.fixture
def stream(tmp_path: Path) -> FolderStream:
    found = open_stream(tmp_path / "examples", partitions=1)
    assert isinstance(found, FolderStream)
    return found


def test_labels_join_what_was_served(stream: FolderStream, tmp_path: Path) -> None:
    router = router_of(tmp_path / "rollout", replica(7))
    ask(router, "r-1", [0.25, 0.5])
    labels = LabelStream(stream, router.add_labels, tmp_path / "at.json", columns={"clicked": "click"})
    with stream.writer() as writer:
        joined = {"request_id": "r-1", "row": 1, "model": MODEL, "version": 7, "p": 0.5, "clicked": 1.0}
        writer.append(json.dumps(joined).encode())
    wait_for(lambda: router.memory.counts["labels_joined"] == 1)
    labels.close()
    router.close()


def test_reading_goes_on_where_it_stopped(stream: FolderStream, tmp_path: Path) -> None:
    write(stream, "before any server")
    taken, file = Taken(), tmp_path / "at.json"
    labels = LabelStream(stream, taken, file)
    write(stream, "a", "b")
    wait_for(lambda: taken.ids == ["a", "b"])
    labels.close()
    write(stream, "while it was down")
    labels = LabelStream(stream, taken, file)
    wait_for(lambda: len(taken.ids) == 3)
    labels.close()
    assert taken.ids == ["a", "b", "while it was down"]
    assert json.loads(file.read_bytes()) == {"stream": stream.url, "partitions": {"examples/0": 4}}


def test_labels_that_could_not_be_taken_are_read_again(stream: FolderStream, tmp_path: Path) -> None:
    taken = Taken(failures=2)
    labels = LabelStream(stream, taken, tmp_path / "at.json")
    write(stream, "a", "b")
    wait_for(lambda: taken.ids == ["a", "b"])
    labels.close()


def test_a_bad_record_is_counted_and_the_next_is_read(
    stream: FolderStream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = Taken()
    labels = LabelStream(stream, taken, tmp_path / "at.json")
    with stream.writer() as writer:
        writer.append(b"no JSON")
    write(stream, "good")
    wait_for(lambda: taken.ids == ["good"])
    labels.close()
    assert labels.counts() == {"read": 2, "bad": 1, "lost_positions": 0}
    assert "a record is no label: JSON: " in caplog.text


def test_a_position_that_the_stream_does_not_have_is_told(
    stream: FolderStream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(stream, "a")
    file, taken = tmp_path / "at.json", Taken()
    file.write_text(json.dumps({"stream": stream.url, "partitions": {"examples/0": 1000}}))
    labels = LabelStream(stream, taken, file)
    wait_for(lambda: taken.ids == ["a"])
    labels.close()
    assert labels.counts()["lost_positions"] == 1
    assert "labels were removed before they were read" in caplog.text


def test_positions_of_another_stream_are_not_used_and_a_damaged_file_is_an_error(
    stream: FolderStream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "at.json"
    file.write_text(json.dumps({"stream": "another", "partitions": {"examples/0": 1000}}))
    LabelStream(stream, Taken(), file).close()
    assert "has positions of another" in caplog.text
    file.write_text("{")
    with pytest.raises(CorruptFileError, match="remove it to begin at the end"):
        LabelStream(stream, Taken(), file)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (b"[]", "expected a JSON object, got list"),
        (b'{"request_id": "r"}', "expected one of the columns 'label'"),
        (b'{"label": 1}', "request_id"),
        (b'{"request_id": "r", "label": 1.5}', "label"),
        (b'{"request_id": "r", "label": 1, "row": -1}', "row"),
        (b'{"request_id": "r", "label": 0, "sample_rate": 0.1}', "sample_rate: expected 1"),
    ],
)
def test_a_record_that_is_no_label_says_why(record: bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        labels_of_record(record, {"label": None})


def test_a_record_may_have_labels_of_several_heads_or_of_all_rows() -> None:
    record = b'{"request_id": "r", "clicked": 1, "bought": 0, "head": "ignored"}'
    found = labels_of_record(record, {"clicked": "ctr", "bought": "cvr"})
    assert [(label.head, label.label) for label in found] == [("ctr", 1.0), ("cvr", 0.0)]
    (all_rows,) = labels_of_record(b'{"request_id": "r", "label": [1, 0]}', {"label": None})
    assert all_rows.label == (1.0, 0.0)
