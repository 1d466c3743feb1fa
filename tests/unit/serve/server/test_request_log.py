"""Danger: a log of requests that slows or fails answers, or loses requests without saying so."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from monolith.errors import StorageError
from monolith.features import Ragged
from monolith.features.batch import IdMatrix
from monolith.serve.request_log import RequestLog, RequestLogConfig, encode_rows
from monolith.serve.server.routing import Answered
from monolith.streams import START, FolderStream, Stream, open_stream
from served_models import ServeSums, columns, sum_replica


def rows_of(stream: Stream) -> list[dict[str, Any]]:
    with stream.reader() as reader:
        reader.assign(dict.fromkeys(stream.partitions(), START))
        return [json.loads(value) for records in reader.poll(100_000, 0) for value in records.values]


def answer(request_id: str = "r", **changes: Any) -> Answered:  # noqa: ANN401
    given: dict[str, Any] = {
        "model": "clicks",
        "version": 3,
        "protocol": "grpc",
        "rows": 2,
        "seconds": 0.01,
        "status": "ok",
        "request_id": request_id,
        "columns": {"user": torch.tensor([7, 8])},
        "outputs": {"ctr": torch.tensor([0.25, 0.5])},
    }
    return Answered(**given | changes)


class FakeWriter:
    """A writer whose `append` does what the test says."""

    def __init__(self, append: Callable[[bytes], None]) -> None:
        self._append, self.closed = append, False

    def append(self, value: bytes, **options: object) -> None:
        self._append(value)

    def flush(self, timeout: float | None = None) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class FakeStream:
    """A stream of `FakeWriter`s."""

    url = "stream-of-a-test"

    def __init__(self, append: Callable[[bytes], None]) -> None:
        self._append = append
        self.writers: list[FakeWriter] = []

    def writer(self) -> FakeWriter:
        self.writers.append(FakeWriter(self._append))
        return self.writers[-1]


def test_every_row_that_a_client_gets_is_written_with_what_it_was_predicted_from(
    serve_sums: ServeSums, tmp_path: Path
) -> None:
    stream = open_stream(tmp_path / "served", partitions=2)
    log = RequestLog(stream, now=lambda: 1_700_000_000.5)
    _, client = serve_sums(sum_replica(4, follows=True), observers=[log], assigns_ids=True)
    given = client.infer(columns(1.0, 2.0), request_id="mine")
    assert given.id == "mine"
    assigned = client.infer(columns(3.0))
    assert len(assigned.id) == 32
    log.close()
    own = {"model": "sums", "version": 4, "step": 41, "sequence": 9, "time_ms": 1_700_000_000_500}
    assert sorted(rows_of(stream), key=lambda row: row["a"]) == [
        {"request_id": "mine", "row": 0, **own, "a": 1.0, "b": 1.0, "prediction.sum": 2.0},
        {"request_id": "mine", "row": 1, **own, "a": 2.0, "b": 2.0, "prediction.sum": 4.0},
        {"request_id": assigned.id, "row": 0, **own, "a": 3.0, "b": 3.0, "prediction.sum": 6.0},
    ]
    assert log.counts() == {"written": 3, "dropped": 0, "failed": 0}


def test_of_candidates_those_are_written_that_the_client_got(serve_sums: ServeSums, tmp_path: Path) -> None:
    stream = open_stream(tmp_path / "served", partitions=1)
    log = RequestLog(stream)
    _, client = serve_sums(observers=[log], assigns_ids=True)
    assert client.infer(columns(1.0, 9.0, 5.0), top_k=2)["indices"].tolist() == [1, 2]
    log.close()
    assert [(row["row"], row["a"]) for row in rows_of(stream)] == [(1, 9.0), (2, 5.0)]


def test_lists_of_ids_and_vectors_are_lists() -> None:
    given = {
        "tags": Ragged(torch.tensor([5, 6]), torch.tensor([0, 2, 2])),
        "vector": torch.tensor([[0.5, 1.5], [2.0, float("nan")]]),
    }
    first, second = map(json.loads, encode_rows(answer(columns=given), 1))
    assert (first["tags"], first["vector"]) == ([5, 6], [0.5, 1.5])
    assert (second["tags"], second["vector"]) == ([], [2.0, None])


def test_columns_of_a_matrix_are_columns() -> None:
    matrix = IdMatrix(("user", "item"), torch.tensor([[7, 8], [1, 2]]))
    row = json.loads(encode_rows(answer(columns=matrix), 1)[1])
    assert (row["user"], row["item"]) == (8, 2)


def test_a_column_is_left_out_if_asked_or_if_its_name_is_taken() -> None:
    given = {name: torch.tensor([1, 2]) for name in ("user", "row", "model", "item")}
    row = json.loads(encode_rows(answer(columns=given), 1, frozenset({"user"}))[1])
    assert (row["row"], row["model"], row["item"], "user" in row) == (1, "clicks", 2, False)


def test_failures_and_shadows_are_not_served_and_not_written(tmp_path: Path) -> None:
    stream = open_stream(tmp_path / "served", partitions=1)
    log = RequestLog(stream)
    for one in (answer(status="error"), answer(shadow=True), answer(rows=0), answer(outputs={})):
        log.answered(one)
    log.close()
    assert rows_of(stream) == []


def test_a_share_takes_the_same_requests_everywhere(tmp_path: Path) -> None:
    found = []
    for number in range(2):
        stream = open_stream(tmp_path / str(number), partitions=1)
        log = RequestLog(stream, RequestLogConfig(share=0.25))
        for request in range(400):
            log.answered(answer(f"r-{request}"))
        log.close()
        found.append([row["request_id"] for row in rows_of(stream)])
    assert found[0] == found[1]
    assert 2 * 60 < len(found[0]) < 2 * 140


def test_a_stream_that_stands_still_costs_requests_of_the_log_and_no_answer(
    serve_sums: ServeSums, caplog: pytest.LogCaptureFixture
) -> None:
    gate, writing = threading.Event(), threading.Event()

    def append(value: bytes) -> None:
        writing.set()
        assert gate.wait(30)

    log = RequestLog(FakeStream(append), RequestLogConfig(max_pending_bytes=1 << 16))  # type: ignore[arg-type]
    _, client = serve_sums(observers=[log], assigns_ids=True)
    client.infer(columns(1.0))
    assert writing.wait(20)
    for _ in range(100):
        assert client.infer(columns(1.0))["sum"].tolist() == [2.0]
    dropped = log.counts()["dropped"]
    assert 60 < dropped < 100
    assert "requests are left out" in caplog.text
    gate.set()
    log.close()
    assert log.counts() == {"written": 101 - dropped, "dropped": dropped, "failed": 0}


def test_after_a_failure_the_log_goes_on_with_another_writer(caplog: pytest.LogCaptureFixture) -> None:
    broken, written, done = threading.Event(), list[bytes](), threading.Event()
    broken.set()

    def append(value: bytes) -> None:
        if broken.is_set():
            broken.clear()
            raise StorageError("the disk is full")
        written.append(value)
        done.set()

    stream = FakeStream(append)
    log = RequestLog(stream)  # type: ignore[arg-type]
    log.answered(answer())
    while broken.is_set():
        threading.Event().wait(0.005)
    log.answered(answer("later", rows=1))
    assert done.wait(30)
    log.close()
    assert [json.loads(value)["request_id"] for value in written] == ["later"]
    assert log.counts() == {"written": 1, "dropped": 0, "failed": 2}
    assert "the disk is full" in caplog.text
    assert [writer.closed for writer in stream.writers] == [True, True]


def test_two_logs_cannot_write_to_one_folder(tmp_path: Path) -> None:
    stream = open_stream(tmp_path / "served", partitions=1)
    assert isinstance(stream, FolderStream)
    log = RequestLog(stream)
    with pytest.raises(StorageError):
        RequestLog(open_stream(tmp_path / "served"))
    log.close()
