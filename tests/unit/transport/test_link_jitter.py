"""Danger: a pause between two attempts changes what a seeded program draws, or all workers pause alike."""

from __future__ import annotations

import random

import pytest

from monolith.errors import UnavailableError
from monolith.testing.servers import free_ports
from monolith.transport.calls import BasicCall
from monolith.transport.link import Link, jittered


def test_a_pause_is_between_half_of_what_was_asked_for_and_all_of_it() -> None:
    pauses = [jittered(2.0) for _ in range(1000)]
    assert 1.0 <= min(pauses) < 1.1
    assert 1.9 < max(pauses) <= 2.0


def test_attempts_to_reach_a_server_leave_the_generator_of_the_program_alone() -> None:
    random.seed(5)
    before = random.getstate()
    link = Link(f"127.0.0.1:{free_ports(1)[0]}", timeout=0.2)
    with pytest.raises(UnavailableError, match=r"tried for 0.2 s"):
        link.call(BasicCall.HEALTH, "{}")
    assert random.getstate() == before
