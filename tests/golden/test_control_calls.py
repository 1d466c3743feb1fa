"""Invisible contract: the numbers of the calls of a run's chief and of feeds, which commands and replicas of other versions send.

A number never changes its meaning. A new call gets a new number.
"""

from __future__ import annotations

from monolith.dataservice.protocol import DataCall
from monolith.follow.calls import FollowCall
from monolith.ps.protocol.calls import Call
from monolith.serve.shards.messages import ShardCall
from monolith.train.control_server import ControlCall
from monolith.transport.calls import BasicCall


def test_numbers_stay() -> None:
    assert {call.name: int(call) for call in ControlCall} == {
        "STATUS": 144,
        "BLOCK_STATUS": 145,
        "STOP": 146,
        "RESUME": 147,
        "SAVE": 148,
        "END_RUN": 149,
        "DESCRIBE": 150,
        "VARIABLES": 151,
        "FEATURES": 152,
        "FORGET": 153,
        "DROP_CHECKPOINTS": 154,
    }
    assert {call.name: int(call) for call in FollowCall} == {
        "FOLLOW": 160,
        "READ_BUCKETS": 161,
        "READ_IDS": 162,
        "READ_WEIGHTS": 163,
        "CONFIRM": 164,
    }


def test_no_other_server_has_one_of_them() -> None:
    kinds = (BasicCall, Call, DataCall, ControlCall, FollowCall, ShardCall)
    numbers = [int(call) for kind in kinds for call in kind]
    assert len(numbers) == len(set(numbers))
