"""Danger: one thread of a server that computes in Python, as a commit of its log does, holds up every answer."""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack

import pytest

from monolith.ps import ParameterServer
from monolith.transport.server import SWITCH_INTERVAL, short_switch_interval
from real_servers import until


def test_threads_take_short_turns_while_a_process_serves_and_python_s_own_again_afterwards() -> None:
    until(
        lambda: sys.getswitchinterval() > 10 * SWITCH_INTERVAL
    )  # servers of tests before this one may be about to end
    before = sys.getswitchinterval()
    seen: list[float] = []
    with ParameterServer() as server:
        assert sys.getswitchinterval() == before
        waiting = threading.Thread(target=lambda: seen.append(server.wait(timeout=60)))
        waiting.start()
        while sys.getswitchinterval() == before and waiting.is_alive():
            waiting.join(0.01)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL)
        server.ask_to_stop()
        waiting.join()
    assert seen == [True]
    assert sys.getswitchinterval() == before


def test_servers_of_one_process_may_end_in_any_order() -> None:
    until(lambda: sys.getswitchinterval() > 10 * SWITCH_INTERVAL)
    before = sys.getswitchinterval()
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(short_switch_interval())
        second.enter_context(short_switch_interval())
        first.close()
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL)
    assert sys.getswitchinterval() == before
