"""Invisible contract: the numbers of the calls of a run's chief, which a command of another version sends.

A number never changes its meaning. A new call gets a new number.
"""

from __future__ import annotations

from monolith.dataservice.protocol import DataCall
from monolith.ps.protocol.calls import Call
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
    }


def test_no_other_server_has_one_of_them() -> None:
    others = {int(call) for kind in (BasicCall, Call, DataCall) for call in kind}
    assert not others & {int(call) for call in ControlCall}
