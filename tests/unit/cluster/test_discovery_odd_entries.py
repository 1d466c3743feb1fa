"""Danger: an entry of a job that cannot be read is left out by its discovery, and the job waits for it silently."""

from __future__ import annotations

import pytest

from monolith.cluster.discovery.consul import _parse
from monolith.cluster.discovery.service_discovery import warn_of_entry
from monolith.cluster.discovery.zookeeper import _is_entry


@pytest.fixture(autouse=True)
def _nothing_said_before() -> None:
    warn_of_entry.cache_clear()


def test_an_odd_address_in_zookeeper_is_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    assert _is_entry("ps", "10.0.0.1:2222")
    assert not caplog.text
    assert [_is_entry("ps", "10.0.0.1") for _ in range(3)] == [False] * 3
    assert caplog.text.count("entry 'ps' of ZooKeeper is ignored") == 1


def test_an_odd_port_in_consul_is_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    service = {"ID": "job-ps-0", "Tags": ["name:ps", "index:0", "ip:10.0.0.1"], "Port": 70000}
    assert [_parse({"Service": service, "Node": {"Node": "n"}}) for _ in range(3)] == [None] * 3
    assert caplog.text.count("entry 'job-ps-0' of Consul is ignored") == 1


def test_entries_of_others_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    assert _parse({"Service": {"ID": "web", "Tags": ["v1"], "Port": 80}, "Node": {"Node": "n"}}) is None
    assert not caplog.text
