"""Danger: the answer to "what does the model know of this id, and since when" is wrong, or one lookup stops the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from monolith import EmbeddingTable
from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.features import hash_strings
from monolith.log import ChangeLog, RowChange
from monolith.serve.metrics import ServingMetrics
from monolith.serve.page import Page, row_history
from monolith.serve.server.http import HttpRequest
from monolith.testing import sgd_table_config
from page_replicas import Clock, SetLag, change, replica, repository


def asked(page: Page, table: str, id_: str, **query: str) -> tuple[int, dict[str, Any]]:
    route = next(route for route in page.routes() if route.path.startswith("/ids"))
    request = HttpRequest(method="GET", path="", query=query, path_parameters={"table": table, "id": id_})
    response = asyncio.run(route.handler(request))
    return response.status, json.loads(response.body)


def test_the_row_as_it_is_now() -> None:
    page = Page(ServingMetrics(repository(replica(tables=("user", "item")))))
    status, row = asked(page, "item", "7")
    assert status == 200
    assert row["found"]
    assert (row["values"], row["norm"], row["event_time"]) == ([3.0, 4.0], 5.0, 1_700_000_000)
    assert (row["table"], row["id"], row["model"], row["version"]) == ("item", "7", "clicks", 3)
    assert row["changes"] is None
    assert "no change log" in row["note"]


def test_an_id_without_a_row_says_so() -> None:
    _, row = asked(Page(ServingMetrics(repository(replica()))), "user", "-9223372036854775808")
    assert row["found"] is False
    assert row["values"] is None
    assert row["id"] == "-9223372036854775808", "JavaScript would round a number"


def test_the_row_of_another_version() -> None:
    old, new = replica(version=3), replica(version=4)
    new.predictor.stores[""].tables["user"].assign([7], np.array([[6.0, 8.0]], np.float32))
    page = Page(ServingMetrics(repository(old, new)))
    assert asked(page, "user", "7")[1]["norm"] == 10.0
    assert asked(page, "user", "7", model="clicks", version="3")[1]["norm"] == 5.0


@pytest.mark.parametrize(
    ("table", "id_", "query", "status", "message"),
    [
        ("nothing", "7", {}, 404, "there is user"),
        ("user", "7", {"model": "other"}, 404, "no table of this model"),
        ("user", "7", {"version": "9"}, 404, "no table of this model"),
        ("user", "7", {"version": "x"}, 400, "version: expected an integer, got 'x'"),
        ("user", "9223372036854775808", {}, 404, "expected an int64"),
        ("user", "9" * 100_000, {}, 400, "expected an integer"),
    ],
)
def test_wrong_questions_get_an_answer(table: str, id_: str, query: dict[str, str], status: int, message: str) -> None:
    found, answer = asked(Page(ServingMetrics(repository(replica()))), table, id_, **query)
    assert found == status
    assert message in answer["error"]
    assert len(answer["error"]) < 200


def test_when_it_was_learnt_and_since_when_it_is_served() -> None:
    clock, follower = Clock(2000.0), SetLag(sequence=4)
    metrics = ServingMetrics(repository(replica(follower=follower)), now=clock)
    for sequence in (4, 5, 8):
        follower.fields["sequence"] = sequence
        metrics.tick()
        clock.now += 1
    changes = [change(2, None), change(4), change(6), change(9)]
    _, row = asked(Page(metrics, history=lambda table, id_: changes), "user", "7")
    assert row["learnt"]["sequence"] == 4, "the first that is not an erasure"
    assert [(known["served"], known["served_earlier"]) for known in row["changes"]] == [
        (2000.0, True), (2000.0, True), (2002.0, False), (None, False)
    ]  # fmt: skip
    assert [known["erased"] for known in row["changes"]] == [True, False, False, False]


def test_numbers_of_several_writers_are_not_compared() -> None:
    follower = SetLag(sequence=4, positions={"server 0": 4, "server 1": 90})
    metrics = ServingMetrics(repository(replica(follower=follower)))
    metrics.tick()
    _, row = asked(Page(metrics, history=lambda table, id_: [change(2)]), "user", "7")
    assert row["changes"][0]["served"] is None


def test_a_long_history_is_cut() -> None:
    page = Page(
        ServingMetrics(repository(replica())), history=lambda table, id_: [change(number) for number in range(1, 501)]
    )
    _, row = asked(page, "user", "7")
    assert [known["sequence"] for known in row["changes"]] == list(range(401, 501))
    assert row["learnt"]["sequence"] == 1
    assert "100 of 500" in row["note"]


def test_a_log_that_cannot_be_read_does_not_hide_the_row() -> None:
    def history(table: str, id_: int) -> Iterable[RowChange]:
        raise CorruptFileError("segment 7 is damaged")

    status, row = asked(Page(ServingMetrics(repository(replica())), history=history), "user", "7")
    assert (status, row["norm"]) == (200, 5.0)
    assert "segment 7 is damaged" in row["note"]


def test_one_lookup_reads_the_log_at_a_time() -> None:
    answers: list[dict[str, Any]] = []

    def history(table: str, id_: int) -> Iterable[RowChange]:
        if not answers:
            answers.append(page.row("user", 7))
        return []

    page = Page(ServingMetrics(repository(replica())), history=history)
    assert page.row("user", 7)["changes"] == []
    assert "Another lookup" in str(answers[0]["note"])
    assert page.row("user", 7)["note"] == "", "the lock was given back"


def test_history_of_a_run_folder(tmp_path: Path) -> None:
    user = EmbeddingTable(sgd_table_config(1, name="user"))
    for folder, step in (("log", 1), ("ps/0/log", 2)):
        with ChangeLog(tmp_path / folder, [user]) as log:
            user.assign([7, 8], np.full((2, 1), float(step), np.float32))
            log.commit(step=step)
    found = list(row_history(tmp_path)("user", 7))
    assert [(known.step, known.values) for known in found] == [(1, (1.0,)), (2, (2.0,))]
    assert list(row_history(tmp_path)("item", 7)) == []
    assert list(row_history(tmp_path / "nothing")("user", 7)) == []


def test_an_id_that_is_no_int64_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="expected an int64"):
        Page(ServingMetrics()).row("user", 2**63)


def test_a_text_is_looked_up_by_its_id() -> None:
    served = replica(tables=("item",))
    of_text, of_digits = hash_strings(["brand-new item", "7"]).tolist()
    served.predictor.stores[""].tables["item"].assign(
        [of_text, of_digits], np.array([[6.0, 8.0], [0.0, 2.0]], np.float32)
    )
    page = Page(ServingMetrics(repository(served)))
    _, row = asked(page, "item", "brand-new item")
    assert (row["text"], row["id"], row["norm"]) == ("brand-new item", str(of_text), 10.0)
    assert asked(page, "item", "7", text="1")[1]["norm"] == 2.0
    assert "text" not in asked(page, "item", "7")[1]
