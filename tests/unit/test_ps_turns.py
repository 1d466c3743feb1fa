"""Danger: one thread of a server that computes in Python, as a commit of its log does, holds up every answer."""

from __future__ import annotations

import sys
import threading

import pytest

from monolith.ps import ParameterServer
from monolith.transport.turns import TURN_SECONDS


def test_threads_take_short_turns_while_a_process_serves_and_python_s_own_again_afterwards() -> None:
    before = sys.getswitchinterval()
    seen: list[float] = []
    with ParameterServer() as server:
        assert sys.getswitchinterval() == before
        waiting = threading.Thread(target=lambda: seen.append(server.wait(timeout=60)))
        waiting.start()
        while sys.getswitchinterval() == before and waiting.is_alive():
            waiting.join(0.01)
        assert sys.getswitchinterval() == pytest.approx(TURN_SECONDS)
        assert before > TURN_SECONDS
        server.ask_to_stop()
        waiting.join()
    assert seen == [True]
    assert sys.getswitchinterval() == before
