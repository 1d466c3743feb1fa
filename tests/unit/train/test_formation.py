"""Danger: workers of one run that train on different servers, or wait for servers that no longer exist."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from monolith.cluster import HostServiceDiscovery
from monolith.errors import ConfigError, DeadlineExceededError
from monolith.original import MLPEnv, MLPServiceDiscovery
from monolith.train.distributed.formation import Formation, wait_for_servers
from monolith.train.distributed.run import ServerListFile


class Time:
    """A clock that is moved on by sleeping; `then` happens at the sleeps."""

    def __init__(self, then: Sequence[Callable[[], object]] = ()) -> None:
        self.now, self.sleeps = 0.0, list[float]()
        self._then = list(then)

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.sleeps.append(seconds)
        if self._then:
            self._then.pop(0)()


@pytest.fixture
def discovery(tmp_path: Path) -> HostServiceDiscovery:
    return HostServiceDiscovery(tmp_path / "discovery")


def register(discovery: HostServiceDiscovery, *indexes: int, port: int = 1) -> None:
    for index in indexes:
        discovery.register("ps", index, f"h{index}:{port}")


def formation(discovery: HostServiceDiscovery, time: Time, *, count: int = 2, **given: object) -> Formation:
    arguments = {"is_chief": True, "alive": list, "clock": time, "sleep": time.sleep, **given}
    return Formation(discovery, count, **arguments)  # type: ignore[arg-type]


def test_servers_are_waited_for_and_come_in_order(discovery: HostServiceDiscovery) -> None:
    register(discovery, 1)
    time = Time([lambda: None, lambda: register(discovery, 0, 2)])
    assert wait_for_servers(discovery, 2, alive=list, sleep=time.sleep) == ("h0:1", "h1:1")
    assert time.sleeps == [5.0, 5.0]


def test_which_servers_are_waited_for_is_said_and_not_with_every_look(
    discovery: HostServiceDiscovery, caplog: pytest.LogCaptureFixture
) -> None:
    register(discovery, 1)
    time = Time([*[lambda: None] * 7, lambda: register(discovery, 0, 2)])
    with caplog.at_level(logging.INFO, "monolith.train.distributed.formation"):
        wait_for_servers(discovery, 3, alive=lambda a: list(a) if time.now > 40 else [], clock=time, sleep=time.sleep)
    assert caplog.messages == [
        "waiting for ps 1 at h1:1 to answer and 2 of 3 parameter servers to be announced",
        "still waiting after 30 s for ps 1 at h1:1 to answer and 2 of 3 parameter servers to be announced",
        "still waiting after 40 s for ps 0 at h0:1, ps 1 at h1:1, ps 2 at h2:1 to answer",
    ]


def test_who_died_and_is_still_announced_does_not_count(discovery: HostServiceDiscovery) -> None:
    register(discovery, 0, 1)
    time = Time([lambda: register(discovery, 0, port=9)])
    found = wait_for_servers(
        discovery, 2, alive=lambda addresses: [a for a in addresses if a != "h0:1"], sleep=time.sleep
    )
    assert found == ("h0:9", "h1:1")


def test_a_scheduler_that_knows_addresses_in_advance_is_not_waited_for() -> None:
    environ = {"MLP_ROLE": "worker", "MLP_WORKER_NUM": "1", "MLP_PS_NUM": "1", "MLP_PS_0_PRIMARY_HOST": "h0"}
    discovery = MLPServiceDiscovery(MLPEnv(environ), check=lambda host, port, timeout: pytest.fail("it waits"))
    assert wait_for_servers(discovery, 1, alive=list) == ("h0:2222",)
    assert Formation(discovery, 1, is_chief=True).announced() == ("h0:2222",)


def test_the_chief_takes_the_first_that_come_and_tells_the_others(
    discovery: HostServiceDiscovery, tmp_path: Path
) -> None:
    shared, time = ServerListFile(str(tmp_path), uuid="job"), Time()
    register(discovery, 1, 3)
    assert formation(discovery, time, shared=shared).servers() == ("h1:1", "h3:1")
    assert (tmp_path / "ps_cluster_dir" / "job").read_text() == "h1:1,h3:1"
    register(discovery, 0, 2)
    assert formation(discovery, time, shared=shared, is_chief=False).servers() == ("h1:1", "h3:1")
    assert formation(discovery, time).announced() == ("h0:1", "h1:1", "h2:1", "h3:1")
    assert time.sleeps == []


def test_a_chief_that_was_started_again_keeps_the_servers(discovery: HostServiceDiscovery, tmp_path: Path) -> None:
    shared = ServerListFile(str(tmp_path))
    shared.write(["h3:1", "h2:1"])
    register(discovery, 0, 1, 2, 3)
    assert formation(discovery, Time(), shared=shared).servers() == ("h3:1", "h2:1")
    assert (tmp_path / "ps_cluster_dir" / "ps_info").exists()


@pytest.mark.parametrize("kept", [["h3:1"], ["h3:1", "h9:1"], []])
def test_a_list_that_does_not_hold_any_more_is_made_anew(
    discovery: HostServiceDiscovery, tmp_path: Path, kept: list[str]
) -> None:
    shared = ServerListFile(str(tmp_path))
    shared.write(kept)
    register(discovery, 1, 2, 3)
    assert formation(discovery, Time(), shared=shared).servers() == ("h1:1", "h2:1")
    assert shared.read() == ("h1:1", "h2:1")


def test_a_worker_waits_for_the_list(discovery: HostServiceDiscovery, tmp_path: Path) -> None:
    shared = ServerListFile(str(tmp_path))
    time = Time([lambda: None, lambda: shared.write(["a:1", "b:1"])])
    assert formation(discovery, time, shared=shared, is_chief=False).servers() == ("a:1", "b:1")
    assert time.sleeps == [5.0, 5.0]


def test_a_worker_does_not_wait_for_ever(discovery: HostServiceDiscovery, tmp_path: Path) -> None:
    time = Time()
    with pytest.raises(DeadlineExceededError, match="list of 2 servers within 1800 s"):
        formation(discovery, time, shared=ServerListFile(str(tmp_path)), is_chief=False).servers()
    assert time.now == 1800.0


@pytest.mark.parametrize("uuid", ["../x", "a/b", "..", "a\nb"])
def test_a_name_cannot_lead_elsewhere(tmp_path: Path, uuid: str) -> None:
    with pytest.raises(ConfigError, match="uuid: expected letters"):
        ServerListFile(str(tmp_path), uuid=uuid)
