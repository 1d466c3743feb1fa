"""Danger: a discovery through Ray that means something else than the others: a late goodbye that removes a successor, or an
announcement made again that takes a place back."""

from __future__ import annotations

import pytest

from monolith.cluster import RayServiceDiscovery
from monolith.cluster.ray_discovery import Registry
from monolith.errors import InvalidArgumentError

OLD, NEW = "127.0.0.1:1001", "127.0.0.1:1002"


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    registry.register("ps", 1, OLD)
    registry.register("ps", 0, OLD)
    registry.register("worker", 0, OLD)
    return registry


def test_a_service_is_listed_in_order_and_alone(registry: Registry) -> None:
    assert list(registry.query("ps").items()) == [(0, OLD), (1, OLD)]
    assert registry.query("dispatcher") == {}


def test_registering_again_replaces_and_a_late_goodbye_does_not_remove_the_successor(registry: Registry) -> None:
    registry.register("ps", 1, NEW)
    registry.deregister("ps", 1, OLD)
    assert registry.query("ps")[1] == NEW
    registry.deregister("ps", 1, NEW)
    registry.deregister("ps", 1, NEW)
    assert registry.query("ps") == {0: OLD}


def test_renewing_fills_what_was_forgotten_and_names_what_is_taken(registry: Registry) -> None:
    registry.deregister("ps", 0, OLD)
    registry.register("ps", 1, NEW)
    assert registry.renew({("ps", 0): OLD, ("ps", 1): OLD, ("worker", 0): OLD}) == {("ps", 1): NEW}
    assert registry.query("ps") == {0: OLD, 1: NEW}


def test_all_can_be_forgotten(registry: Registry) -> None:
    registry.deregister_all()
    assert registry.query("ps") == registry.query("worker") == {}


def test_the_name_of_a_job_is_checked_before_ray_is_asked() -> None:
    with pytest.raises(InvalidArgumentError, match=r"job: expected letters.* got '../x'"):
        RayServiceDiscovery("../x")
