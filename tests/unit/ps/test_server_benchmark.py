"""Danger: a cluster that keeps its slow servers and sends the fast ones home."""

from __future__ import annotations

import itertools

import pytest

from monolith.errors import InvalidArgumentError
from monolith.ps import ParameterServer
from monolith.ps.client.benchmark import Measured, measure_servers, select_servers
from monolith.ps.server import parameter_server
from monolith.ps.server.parameter_server import spin


def measured(*pairs: tuple[str, float]) -> list[Measured]:
    return [Measured(address=address, throughput=throughput) for address, throughput in pairs]


def test_the_fastest_are_kept_in_order() -> None:
    assert select_servers(measured(("a:1", 1.0), ("b:1", 3.0), ("c:1", 2.0)), 2) == ["b:1", "c:1"]


def test_servers_of_one_host_count_together() -> None:
    servers = measured(("a:1", 5.0), ("b:1", 3.0), ("b:2", 4.0), ("c:1", 6.0))
    # b:2 is worth 4 + 3, b:1 its own 3.
    assert select_servers(servers, 3) == ["b:2", "c:1", "a:1"]


def test_equals_keep_the_order_given() -> None:
    servers = measured(("c:1", 2.0), ("a:1", 2.0), ("b:1", 2.0))
    assert select_servers(servers, 2) == ["c:1", "a:1"]
    assert select_servers(servers[::-1], 2) == ["b:1", "a:1"]


def test_an_override_is_taken_instead() -> None:
    assert select_servers(measured(("ps0:1", 1.0), ("ps1:1", 2.0)), 1, override="overridden") == ["overridden"]


def test_an_override_is_cut_to_what_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert select_servers([], 2, override="a:1, b:1,c:1,") == ["a:1", "b:1"]
    assert "c:1 are not used" in caplog.text
    assert select_servers([], 2, override="a:1") == ["a:1"]
    assert "2 servers are required" in caplog.text
    with pytest.raises(InvalidArgumentError, match="override"):
        select_servers([], 1, override=" , ")


@pytest.mark.parametrize("count", [0, 3, -1])
def test_more_than_there_are_cannot_be_kept(count: int) -> None:
    with pytest.raises(InvalidArgumentError, match=r"count: expected 1\.\.2"):
        select_servers(measured(("a:1", 1.0), ("b:1", 2.0)), count)


def test_throughput_is_rounds_by_time() -> None:
    ticks = itertools.count()  # the first reading, then one after each round
    assert spin(4.0, clock=lambda: float(next(ticks))) == 1.0


def test_a_server_computes_for_the_seconds_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(parameter_server, "spin", lambda seconds, *, clock: asked.append(seconds) or 3.0)
    with ParameterServer() as server:
        assert measure_servers([server.address], seconds=0.125)[0].throughput == 3.0
        measure_servers([server.address])
    assert asked == [0.125, 60.0]


def test_servers_are_measured_and_one_is_kept() -> None:
    with ParameterServer() as one, ParameterServer() as two:
        servers = measure_servers([one.address, two.address], seconds=0.02)
        assert [server.address for server in servers] == [one.address, two.address]
        assert all(server.throughput > 0 for server in servers)
        assert len(select_servers(servers, 1)) == 1
