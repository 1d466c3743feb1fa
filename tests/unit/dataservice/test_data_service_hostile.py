"""Danger: a message that stops a dispatcher or data worker, makes it read what it should not, or changes what it handed out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.flight as flight
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monolith.dataservice import (
    DataClientConfig,
    DataDispatcher,
    DataServiceSource,
    DatasetConfig,
    DataWorker,
    DataWorkerConfig,
    DispatcherConfig,
)
from monolith.dataservice.dispatcher import DispatcherCalls
from monolith.dataservice.protocol import DataCall
from monolith.errors import AuthenticationError, ConfigError, MonolithError
from monolith.ps.protocol.calls import Call
from monolith.transport.calls import BasicCall
from monolith.transport.frames import Frame, decode, encode
from monolith.transport.link import Link

DATASET = {"kind": "click_stream", "fields": {"batches": 4, "batch_size": 2, "users": 9}, "splits": 2}
JOIN = {"job": "j", "trainer": 0, "trainers": 1, "epoch": 0, "granted": 0, "session": 1, "nonce": 7}
NEXT = {"job": "j", "trainer": 0, "session": 1, "epoch": 0, "granted": 0}
CERT = Path("never-read.pem")
SPLIT = {"job": "j", "trainer": 0, "session": 1, "epoch": 0, "split": 0}


def ask(calls: DispatcherCalls, call: int, text: object, *arrays: np.ndarray) -> Frame:
    words = text if isinstance(text, str) else json.dumps(text)
    return decode(calls.answer(encode(call=call, request=7, text=words, arrays=arrays)))


@pytest.fixture
def calls() -> DispatcherCalls:
    made = DispatcherCalls(DispatcherConfig())
    assert ask(made, DataCall.REGISTER_DATASET, {"job": "j", "dataset": DATASET}).call == DataCall.REGISTER_DATASET
    assert json.loads(ask(made, DataCall.JOIN_JOB, JOIN).text) == {"joined": True, "session": 1}
    return made


def require_whole(calls: DispatcherCalls) -> None:
    """It hands out as if nothing had happened."""
    splits = [
        json.loads(ask(calls, DataCall.NEXT_SPLIT, {**NEXT, "granted": granted}).text)["split"] for granted in range(3)
    ]
    assert splits == [0, 1, None]


WRONG = [
    (DataCall.REGISTER_DATASET, {"job": "../j", "dataset": DATASET}),
    (DataCall.REGISTER_DATASET, {"job": "", "dataset": DATASET}),
    (DataCall.REGISTER_DATASET, {"job": "k", "dataset": {**DATASET, "kind": "os:system"}}),
    (DataCall.REGISTER_DATASET, {"job": "k", "dataset": {**DATASET, "paths": ["-"]}}),
    (DataCall.REGISTER_DATASET, {"job": "k", "dataset": {**DATASET, "splits": 10**7}}),
    (DataCall.REGISTER_DATASET, {"job": "k", "dataset": {**DATASET, "code": "print()"}}),
    (DataCall.REGISTER_DATASET, {"job": "k", "dataset": {**DATASET, "fields": {"paths": ["/etc/passwd"]}}}),
    (DataCall.REGISTER_DATASET, {"job": "j", "dataset": {**DATASET, "splits": 3}}),
    (DataCall.JOIN_JOB, {**JOIN, "session": 2, "trainer": -1}),
    (DataCall.JOIN_JOB, {**JOIN, "session": 2, "trainer": 2**63}),
    (DataCall.JOIN_JOB, {**JOIN, "session": 2, "trainers": 0}),
    (DataCall.JOIN_JOB, {**JOIN, "session": 2, "epoch": 2**62}),
    (DataCall.JOIN_JOB, {**JOIN, "session": 2, "granted": 1}),
    (DataCall.JOIN_JOB, {**JOIN, "session": 2, "granted": "0"}),
    (DataCall.JOIN_JOB, {**JOIN, "session": 0}),
    (DataCall.JOIN_JOB, {**JOIN, "session": 2**62}),
    (DataCall.NEXT_SPLIT, {**NEXT, "session": 0}),
    (DataCall.NEXT_SPLIT, {**NEXT, "session": 2}),
    (DataCall.NEXT_SPLIT, {**NEXT, "trainer": 1}),
    (DataCall.NEXT_SPLIT, {**NEXT, "granted": 2**62}),
    (DataCall.NEXT_SPLIT, {**NEXT, "epoch": 2**62}),
    (DataCall.NEXT_SPLIT, {**NEXT, "job": "nobody's"}),
    (DataCall.DESCRIBE_SPLIT, SPLIT),
    (DataCall.DESCRIBE_SPLIT, {**SPLIT, "epoch": 7}),
    (DataCall.HEARTBEAT, {"address": "no address", "streams": 0}),
    (DataCall.HEARTBEAT, {"address": "a" * 300 + ":1", "streams": 0}),
    (DataCall.FIND_WORKER, {"avoid": ["\n"]}),
    (DataCall.NEXT_SPLIT, "not JSON"),
    (DataCall.NEXT_SPLIT, "[" * 50_000),
    (Call.LOOKUP, {}),
    (DataCall.READ_BATCH, SPLIT),
    (9999, {}),
]


@pytest.mark.parametrize(("call", "text"), WRONG)
def test_a_wrong_request_gets_an_error_and_changes_nothing(calls: DispatcherCalls, call: int, text: object) -> None:
    answer = ask(calls, call, text)
    assert (answer.call, answer.request) == (BasicCall.ERROR, 7)
    assert json.loads(answer.text)["error"] != "ServerError", answer.text
    require_whole(calls)


@settings(max_examples=300)
@given(
    call=st.sampled_from([112, 113, 114, 115, 116, 117, 1]),
    text=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from([*NEXT, "dataset", "split", "address", "streams"]), inner, max_size=6)
        ),
        max_leaves=12,
    ),
)
def test_any_json_is_answered(call: int, text: object) -> None:
    calls = DispatcherCalls(DispatcherConfig())
    ask(calls, DataCall.REGISTER_DATASET, {"job": "j", "dataset": DATASET})
    ask(calls, DataCall.JOIN_JOB, JOIN)
    answer = ask(calls, call, text)
    assert answer.call == call or json.loads(answer.text)["error"] != "ServerError", answer.text


@given(data=st.binary(max_size=200))
def test_any_bytes_are_answered(data: bytes) -> None:
    assert decode(DispatcherCalls(DispatcherConfig()).answer(data)).call == BasicCall.ERROR


@pytest.fixture(scope="module")
def worker() -> Iterator[tuple[str, Link]]:
    """A dispatcher with job "j", and a way to its data worker; trainer 0 has split 0 in session 1."""
    with DataDispatcher() as dispatcher, DataWorker(DataWorkerConfig(dispatcher=dispatcher.address)) as worker:
        link = Link(dispatcher.address, timeout=30)
        for call, text in (
            (DataCall.REGISTER_DATASET, {"job": "j", "dataset": DATASET}),
            (DataCall.JOIN_JOB, JOIN),
            (DataCall.NEXT_SPLIT, NEXT),
        ):
            link.call(call, json.dumps(text))
        own = Link(worker.address, timeout=30)
        yield dispatcher.address, own
        own.close()
        link.close()


def read(link: Link, text: object) -> dict[str, object]:
    while True:
        answer: dict[str, object] = json.loads(link.call(DataCall.READ_BATCH, json.dumps(text)).text)
        if answer["state"] != "wait":
            return answer


POSITIONS = ["{", "3", "[]", "{}", '{"next": 1}', '{"next": -1, "config": ""}', "null", "[" * 5000, '"' + "x" * 10**6]


@pytest.mark.parametrize(
    "text",
    [
        *({**SPLIT, "position": position} for position in POSITIONS),
        {**SPLIT, "position": "x" * (2**20 + 1)},
        {**SPLIT, "session": 0},
        {**SPLIT, "session": 9},
        {**SPLIT, "split": 1},
        {**SPLIT, "split": 2**62},
        {**SPLIT, "job": "other"},
        {**SPLIT, "trainer": 3},
        {**SPLIT, "file": "/etc/passwd"},
    ],
)
def test_a_data_worker_answers_wrong_questions_and_goes_on(worker: tuple[str, Link], text: object) -> None:
    _, link = worker
    with pytest.raises(MonolithError) as caught:
        read(link, text)
    assert "the server failed" not in str(caught.value)
    assert read(link, SPLIT)["state"] == "batch"


def test_the_same_question_has_the_same_answer_and_any_order_of_places_is_served(worker: tuple[str, Link]) -> None:
    _, link = worker
    places = [""]
    while (answer := read(link, {**SPLIT, "position": places[-1]}))["state"] == "batch":
        places.append(str(answer["position"]))
    assert len(places) == 3
    for place in (0, 1, 0, 2, 1, 1, 2, 0):
        answer = read(link, {**SPLIT, "position": places[place]})
        assert answer["state"] == ("end" if place == 2 else "batch")
        assert place == 2 or answer["position"] == places[place + 1]


def test_strangers_are_kept_out_as_of_parameter_servers() -> None:
    for config in (DispatcherConfig(host="0.0.0.0"), DataWorkerConfig(host="0.0.0.0", dispatcher="127.0.0.1:1")):
        make = DataDispatcher if isinstance(config, DispatcherConfig) else DataWorker
        with pytest.raises(ConfigError, match="can be reached from other machines"):
            make(config)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="advertise: expected host:port that trainers can reach"):
        DataWorker(
            DataWorkerConfig(
                host="0.0.0.0", dispatcher="a:1", token="x" * 16, tls_cert=CERT, tls_key=CERT, roots=("*",)
            )
        )
    token = "correct-horse-battery"
    right = DataClientConfig(token=token)
    dataset = DatasetConfig.from_json(json.dumps(DATASET))
    with (
        DataDispatcher(DispatcherConfig(token=token)) as dispatcher,
        DataWorker(DataWorkerConfig(dispatcher=dispatcher.address, token=token, client=right)),
    ):
        with pytest.raises(AuthenticationError):
            list(DataServiceSource(dispatcher.address, dataset, config=DataClientConfig(timeout=5)))
        assert len(list(DataServiceSource(dispatcher.address, dataset, config=right))) == 4


def test_it_speaks_flight_too() -> None:
    client = DataClientConfig(transport="flight")
    dataset = DatasetConfig.from_json(json.dumps(DATASET))
    with (
        DataDispatcher(DispatcherConfig(transport="flight")) as dispatcher,
        DataWorker(DataWorkerConfig(dispatcher=dispatcher.address, client=client, transport="flight")),
    ):
        assert flight.connect(f"grpc://{dispatcher.address}") is not None
        assert len(list(DataServiceSource(dispatcher.address, dataset, config=client))) == 4
