"""Danger: one worker's wrong or hostile request that stops the server, changes half of something, or frightens others."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from monolith.errors import ConfigError, InvalidArgumentError, MonolithError, ProtocolError, ServerError
from monolith.ps import ParameterServer, ServerConfig, ServerStore
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.messages import DeclaredTable, DeclareTables, Join
from monolith.ps.server import served_tables
from monolith.ps.server.parameter_server import Dispatcher
from monolith.table import TableConfig
from monolith.testing import sgd_table_config
from monolith.transport.calls import BasicCall
from monolith.transport.errors import decode_error
from monolith.transport.frames import Frame, decode, encode
from monolith.transport.link import Transport, connector_to

PUSH = {"worker": "w", "epoch": 1, "sequence": 1}
IDS, SPLITS = np.array([1, 2]), np.array([0, 1, 2])
ROWS = np.ones((2, 3), dtype=np.float32)


@pytest.fixture
def server() -> Dispatcher:
    made = Dispatcher(max_frame_bytes=100_000)
    tables = DeclareTables(tables=tuple(DeclaredTable(config=sgd_table_config(3, name=n)) for n in ("a", "b")))
    ask(made, Call.DECLARE_TABLES, tables.model_dump_json())
    ask(made, Call.JOIN, Join(worker="w", epoch=1, nonce=0).model_dump_json())
    return made


def ask(server: Dispatcher, call: int, text: object, *arrays: np.ndarray) -> Frame:
    words = text if isinstance(text, str) else json.dumps(text)
    frame = decode(server.answer(encode(call=call, request=9, text=words, arrays=arrays)))
    assert frame.request == 9
    if frame.call == BasicCall.ERROR:
        raise decode_error(frame.text, "test")
    return frame


def rows(server: Dispatcher, table: str = "a") -> int:
    count: int = json.loads(ask(server, Call.STATS, {}).text)["tables"][table]["rows"]
    return count


def lookup(*tables: dict[str, object]) -> dict[str, object]:
    return {"tables": list(tables)}


A = {"table": "a", "pooling": "sum"}

LOOKUPS = [
    (lookup({"table": "../a", "pooling": "sum"}), [IDS, SPLITS], "between slashes"),
    (lookup({"table": "c", "pooling": "sum"}), [IDS, SPLITS], "the server has no 'c'; it has 'a', 'b'"),
    (lookup({"table": "a", "pooling": "max"}), [IDS, SPLITS], "pooling"),
    (lookup(A), [IDS], "arrays: expected 2 for these tables, got 1"),
    (lookup(A), [IDS, SPLITS, SPLITS], "arrays: expected 2 for these tables, got 3"),
    (lookup(A), [IDS.astype(np.float64), SPLITS], "ids of table 'a': expected int64"),
    (lookup(A), [IDS.astype(np.int32), SPLITS], "ids of table 'a': expected int64"),
    (lookup(A), [IDS.reshape(1, 2), SPLITS], "ids of table 'a': expected int64 with 1 dimension"),
    (lookup(A), [IDS, SPLITS.astype(np.int32)], "offsets of table 'a'"),
    (lookup(A), [IDS, np.array([0, 1])], "table 'a': offsets"),
    (lookup(A), [IDS, np.array([0, 2**62, 2])], "table 'a': offsets"),
    (lookup(A), [IDS, np.array([0, -1, 2])], "table 'a': offsets"),
    (lookup(A), [IDS, np.array([], dtype=np.int64)], "table 'a': offsets"),
    (lookup(A), [IDS, np.array([1, 2])], "table 'a': offsets"),
    ({"tables": [A], "wire": "float8"}, [IDS, SPLITS], "wire"),
    ({"tables": [A], "surprise": 1}, [IDS, SPLITS], "unknown field"),
    ("not json", [], "json"),
    ("[" * 100_000, [], "at most 100,000 bytes"),
    ("[" * 50_000, [], "json"),
    (lookup(A), [np.zeros(10_000, dtype=np.int64), np.zeros(2, dtype=np.int64)], "table 'a': offsets"),
    (
        lookup({"table": "a", "pooling": "none"}),
        [np.zeros(9_000, dtype=np.int64)],
        "the answer would have 108,000 bytes",
    ),
]


@pytest.mark.parametrize(("text", "arrays", "complaint"), LOOKUPS)
def test_a_wrong_lookup_is_an_error_that_says_why(
    server: Dispatcher, text: object, arrays: list[np.ndarray], complaint: str
) -> None:
    with pytest.raises(MonolithError) as caught:
        ask(server, Call.LOOKUP, text, *arrays)
    assert complaint.lower() in str(caught.value).lower()
    assert type(caught.value) is not ServerError, "the client is at fault, not the server"
    assert ask(server, Call.LOOKUP, lookup(A), IDS, SPLITS).arrays[0].shape == (2, 3)


def gradient(**changes: object) -> dict[str, object]:
    return {"table": "b", "pooling": "none", **changes}


UPDATES = [
    (gradient(table="c"), [IDS, ROWS], {}, "the server has no 'c'"),
    (gradient(table="a"), [IDS, ROWS], {}, "expected each table once"),
    (gradient(), [IDS], {}, "arrays: expected 4"),
    (gradient(), [IDS, ROWS[:, :2].copy()], {}, "gradients of table 'b': expected [2, 3], got [2, 2]"),
    (gradient(), [IDS, ROWS[:1]], {}, "gradients of table 'b': expected [2, 3], got [1, 3]"),
    (gradient(), [IDS, ROWS.astype(np.float64)], {}, "expected float32, float16, bfloat16, got float64"),
    (gradient(), [IDS, IDS], {}, "got int64"),
    (gradient(pooling="sum"), [IDS, np.array([0, 1, 3]), ROWS], {}, "table 'b': offsets[2]"),
    (gradient(pooling="mean"), [IDS, np.array([0, 5, 2]), ROWS], {}, "table 'b': offsets[2]"),
    (gradient(learning_rates=[0.1, 0.2]), [IDS, ROWS], {}, "learning_rates of table 'b': expected 1"),
    (gradient(learning_rates=["x"]), [IDS, ROWS], {}, "learning_rates"),
    (gradient(), [IDS, ROWS], {"step": -1}, "step"),
    (gradient(), [IDS, ROWS], {"step": 2**63}, "step"),
    (gradient(), [IDS, ROWS], {"event_time": 2**32}, "event_time"),
    (gradient(), [IDS, ROWS], {"push": {**PUSH, "worker": "../../etc"}}, "between slashes"),
    (gradient(), [IDS, ROWS], {"push": {**PUSH, "epoch": 2**63}}, "epoch"),
    (gradient(), [IDS, ROWS], {"push": {**PUSH, "sequence": -1}}, "sequence"),
]


@pytest.mark.parametrize(("second", "arrays", "changes", "complaint"), UPDATES)
def test_a_push_that_is_wrong_in_its_second_table_changes_neither(
    server: Dispatcher, second: dict[str, object], arrays: list[np.ndarray], changes: dict[str, object], complaint: str
) -> None:
    text = {"push": PUSH, "tables": [{"table": "a", "pooling": "none"}, second], **changes}
    with pytest.raises(MonolithError) as caught:
        ask(server, Call.APPLY_GRADIENTS, text, IDS, ROWS, *arrays)
    assert complaint in str(caught.value)
    assert type(caught.value) is not ServerError
    assert rows(server, "a") == rows(server, "b") == 0


@pytest.mark.parametrize("call", [6, 15, 27, 79, 95, 65535])
def test_an_unknown_call_is_refused_by_number(server: Dispatcher, call: int) -> None:
    with pytest.raises(ProtocolError, match=f"call: {call} is not known; known are 1 health"):
        ask(server, call, {})


def test_a_table_that_is_declared_again_must_be_the_same(server: Dispatcher) -> None:
    same = DeclareTables(tables=(DeclaredTable(config=sgd_table_config(3, name="a")),))
    ask(server, Call.DECLARE_TABLES, same.model_dump_json())
    other = (sgd_table_config(3, name="new"), sgd_table_config(4, name="a"))
    text = DeclareTables(tables=tuple(DeclaredTable(config=config) for config in other)).model_dump_json()
    with pytest.raises(
        ConfigError, match=r"table 'a': the server has it with other rows: .*segments\.0\.dim was 3, is now 4"
    ):
        ask(server, Call.DECLARE_TABLES, text)
    assert set(json.loads(ask(server, Call.STATS, {}).text)["tables"]) == {"a", "b"}


@pytest.mark.parametrize("name", ["../x", "/x", "x/", "a//b", "x/../y", ".", "..", "a\nb", "a\\b", "a\0b", ""])
def test_a_name_that_could_lead_out_of_a_folder_is_refused(server: Dispatcher, name: str) -> None:
    config = sgd_table_config(3, name="x").model_dump(mode="json")
    text = {"tables": [{"config": {**config, "name": name}}]}
    with pytest.raises(ConfigError, match="name"):
        ask(server, Call.DECLARE_TABLES, text)


def test_a_request_for_an_earlier_life_of_the_server_is_refused(server: Dispatcher) -> None:
    data = encode(call=Call.STATS, request=1, instance=server.instance ^ 2, text="{}")
    answer = decode(server.answer(data))
    assert json.loads(answer.text)["error"] == "ServerRestartedError"
    assert (
        decode(server.answer(encode(call=1, request=1, instance=server.instance, text="{}"))).call == BasicCall.HEALTH
    )


def test_what_breaks_inside_is_the_servers_fault_and_not_the_end(
    server: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(served_tables.ServedTables, "stats", lambda self: 1 / 0)
        with pytest.raises(ServerError, match="ZeroDivisionError"):
            ask(server, Call.STATS, {})
    assert rows(server) == 0


def test_an_error_class_that_is_not_ours_is_never_made() -> None:
    for name in ("SystemExit", "os.system", "MonolithError", "__import__", ""):
        assert type(decode_error(json.dumps({"error": name, "message": "m"}), "x")) is ServerError
    assert isinstance(decode_error("{", "x"), ProtocolError)
    assert isinstance(decode_error('{"error": "InvalidArgumentError", "message": "m"}', "x"), InvalidArgumentError)


@pytest.mark.parametrize("transport", ["socket", "flight"])
def test_over_the_network_the_stream_goes_on_after_each_error(transport: Transport) -> None:
    with ParameterServer(ServerConfig(transport=transport)) as server:
        connector = connector_to(server.address, transport=transport, timeout=30, token=None, tls_root_certs=None)
        deadline = time.monotonic() + 30
        stream = connector.open(deadline=deadline)
        for data in (b"x", b"rubbish", b"MOPS" + bytes(28), encode(call=999, request=4, text="{}").tobytes()):
            stream.send(np.frombuffer(data, dtype=np.uint8), deadline=deadline)
            assert stream.receive(4, deadline=deadline).call == BasicCall.ERROR
        stream.send(encode(call=BasicCall.HEALTH, request=5, text="{}"), deadline=deadline)
        answer = stream.receive(5, deadline=deadline)
        assert (answer.call, answer.request) == (BasicCall.HEALTH, 5)
        stream.close()
        connector.close()


def test_errors_reach_the_worker_as_what_they_are_and_name_the_server() -> None:
    with ParameterServer() as server, ServerStore([server.address], [sgd_table_config(2, name="a")]) as store:
        with pytest.raises(InvalidArgumentError, match=f"has no 'b'.*server at {server.address}"):
            store.reinitialize("b", [1])
        with pytest.raises(ConfigError, match="other rows"):
            store.declare([TableConfig(name="a", segments=sgd_table_config(3, name="a").segments)])
        assert store.reinitialize("a", [1]).tolist() == [0]


@pytest.mark.parametrize("name", ["", "w" * 256, "..", "a/../b", "a\\b", "a\nb"])
def test_a_name_that_cannot_be_part_of_a_file_is_refused(server: Dispatcher, name: str) -> None:
    with pytest.raises((ConfigError, ProtocolError), match="worker"):
        ask(server, Call.JOIN, {"worker": name, "epoch": 1, "nonce": 0})
    ask(server, Call.JOIN, {"worker": "w" * 255, "epoch": 1, "nonce": 0})
