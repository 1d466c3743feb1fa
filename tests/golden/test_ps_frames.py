"""Danger: a worker and a server of different builds that misread each other's bytes.

These bytes may change only together with the version of the protocol.
"""

from __future__ import annotations

import numpy as np
import pytest

from monolith.dataservice.protocol import DataCall
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.messages import Apply, Lookup, Push, TableGradient, TableRead
from monolith.ps.server.parameter_server import Dispatcher
from monolith.table.store import Position
from monolith.transport.calls import BasicCall, CallNumber
from monolith.transport.frames import BFLOAT16, PROTOCOL_VERSION, decode, encode

LOOKUP = (
    bytes.fromhex(
        "4d4f505302001000070000000000000005000000000000000200000044000000"  # header
        "0101000000000000"
        "0200000000000000"  # int64 [2]
        "0101000000000000"
        "0200000000000000"  # int64 [2]
    )
    + (
        b'{"tables":[{"table":"user","pooling":"sum"}],"wire":"float32"}'
        b"      "  # the text may have any JSON white space
        b"\0\0\0\0"
    )
    + bytes.fromhex("0300000000000000feffffffffffffff00000000000000000200000000000000")
)

APPLY_TEXT = (
    b'{"push":{"worker":"w0","epoch":9,"sequence":4},"position":{"batches":7,"state":null,"ended":false,"epochs":0},'
    b'"tables":[{"table":"user","pooling":"none","learning_rates":[0.5]}],"step":3,"event_time":100,"map":6}'
)


def test_the_version_is_the_one_these_bytes_are_of() -> None:
    assert PROTOCOL_VERSION == 2


def test_a_lookup_has_these_bytes() -> None:
    text = LOOKUP[64 : 64 + 0x44].decode()
    arrays = [np.array([3, -2]), np.array([0, 2])]
    assert encode(call=Call.LOOKUP, request=7, instance=5, text=text, arrays=arrays).tobytes() == LOOKUP
    frame = decode(LOOKUP)
    assert (frame.call, frame.request, frame.instance) == (16, 7, 5)
    assert [array.tolist() for array in frame.arrays] == [[3, -2], [0, 2]]
    assert Lookup.from_json(frame.text) == Lookup(tables=(TableRead(table="user", pooling="sum"),), wire="float32")


def test_the_text_of_a_push_is_this_json() -> None:
    push = Push(worker="w0", epoch=9, sequence=4)
    gradient = TableGradient(table="user", pooling="none", learning_rates=(0.5,))
    apply = Apply(push=push, position=Position(batches=7), tables=(gradient,), step=3, event_time=100, map=6)
    assert apply.model_dump_json().encode() == APPLY_TEXT
    assert Apply.from_json(APPLY_TEXT.decode()) == apply


@pytest.mark.parametrize(
    ("code", "dtype"),
    [(1, "<i8"), (2, "<i4"), (3, "<f4"), (4, "<f8"), (5, "<f2"), (6, BFLOAT16), (7, "u1")],
)
def test_each_dtype_keeps_its_code(code: int, dtype: str) -> None:
    frame = encode(call=0, request=0, text="", arrays=[np.zeros((1, 3), dtype=dtype)])
    assert frame[32:56].tobytes() == bytes([code, 2, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0])


def test_each_call_keeps_its_number() -> None:
    assert {call.name: call.value for kind in (BasicCall, Call, DataCall) for call in kind} == {
        "ERROR": 0,
        "HEALTH": 1,
        "JOIN": 2,
        "DECLARE_TABLES": 3,
        "CONFIGS": 4,
        "POSITIONS": 5,
        "LOOKUP": 16,
        "APPLY_GRADIENTS": 17,
        "ASSIGN": 18,
        "ASSIGN_ADD": 19,
        "REINITIALIZE": 20,
        "EVICT": 21,
        "STATS": 22,
        "READ_ROWS": 23,
        "READ_ENTRIES": 24,
        "COUNT_SLOTS": 25,
        "ERASE": 26,
        "DECLARE_DENSE": 32,
        "READ_DENSE": 33,
        "APPLY_DENSE": 34,
        "ASSIGN_DENSE": 35,
        "READ_DENSE_SETTINGS": 36,
        "LOAD_DENSE": 37,
        "IS_INITIALISED": 48,
        "MARK_INITIALISED": 49,
        "MEASURE": 50,
        "SHUTDOWN": 51,
        "LOG_STATE": 64,
        "FLUSH": 65,
        "READ_LOG": 66,
        "SAVE": 80,
        "SAVED": 81,
        "RESTORE": 82,
        "COMMIT_RESTORE": 83,
        "OWN_BUCKETS": 84,
        "BUCKETS": 85,
        "MOVE_BUCKETS": 86,
        "INSTALL_BUCKETS": 87,
        "TAKE_BACK": 88,
        "REFUSE_TRANSFER": 89,
        "GREET": 96,
        "MEMBERS": 97,
        "PLACE_BARRIER": 99,
        "REMOVE_BARRIER": 100,
        "HOLD": 101,
        "READ_KEYS": 102,
        "SET_KEY": 103,
        "COUNT_FROM": 104,
        "GLOBAL_STEP": 105,
        "END_RUN": 106,
        "REGISTER_DATASET": 112,
        "JOIN_JOB": 113,
        "NEXT_SPLIT": 114,
        "DESCRIBE_SPLIT": 115,
        "FIND_WORKER": 116,
        "HEARTBEAT": 117,
        "LEAVE_JOB": 118,
        "READ_BATCH": 120,
    }


def test_no_two_kinds_of_servers_share_a_number() -> None:
    assert {BasicCall, Call, DataCall} <= set(CallNumber.__subclasses__())
    numbers = [call.value for kind in CallNumber.__subclasses__() for call in kind]
    assert len(set(numbers)) == len(numbers)


def test_a_frame_that_reaches_the_wrong_kind_of_server_is_refused() -> None:
    refused = decode(Dispatcher().answer(encode(call=DataCall.NEXT_SPLIT, request=3, text="{}")))
    assert (refused.call, refused.request) == (BasicCall.ERROR, 3)
    assert "call: 114 is not known" in refused.text
