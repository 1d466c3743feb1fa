"""Danger: a chief that never ends because a server does not, or a scheduler that gets the wrong outcome."""

from __future__ import annotations

import socket
import sys
import threading
from typing import ClassVar

import pytest

from monolith.cluster import Scheduler, scheduler
from monolith.ps import ClientConfig, ParameterServer
from monolith.testing.servers import free_ports
from monolith.train.distributed.run import HeartBeat, shut_down, tell_scheduler


def test_all_servers_are_told_though_one_never_answers() -> None:
    # It accepts connections and says nothing, as a process that was stopped does.
    with socket.create_server(("127.0.0.1", 0)) as mute, ParameterServer() as one, ParameterServer() as two:
        silent = f"127.0.0.1:{mute.getsockname()[1]}"
        assert shut_down([one.address, silent, two.address], ClientConfig(), timeout=2.0) == [silent]
        assert one.wait(timeout=60)
        assert two.wait(timeout=60)


def test_a_server_that_is_gone_is_not_waited_for() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    assert shut_down([address], ClientConfig(), timeout=0.2) == [address]


class Listening(Scheduler):
    heard: ClassVar[list[str]] = []

    def job_ended(self, failure: BaseException | None) -> None:
        self.heard.append(f"{self.environ['MADE_UP']} {failure!r}")


def test_the_scheduler_that_started_the_process_hears_how_it_went(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "SCHEDULERS", {"made_up": ("MADE_.*", f"{__name__}:Listening")})
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Listening.__module__])
    for error in (None, ValueError("bad data")):
        tell_scheduler(error, environ={"MADE_UP": "1"})
        tell_scheduler(error, environ={"OTHER": "1", "MADE_UP": ""})
    assert Listening.heard == ["1 None", "1 ValueError('bad data')"]


def test_the_heart_beats_until_the_end() -> None:
    heard, twice = list[str](), threading.Event()

    def metric(name: str, value: float, tags: object) -> None:
        heard.append(f"{name} {tags}")
        if len(heard) == 3:
            twice.set()

    with HeartBeat(metric, every_secs=0.01):
        assert twice.wait(60)
    assert set(heard[:-1]) == {"training_heart_beat {'type': 'running'}"}
    assert heard[-1] == "training_heart_beat {'type': 'stopped'}"
