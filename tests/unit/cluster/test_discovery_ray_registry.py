"""Danger: discovery through Ray differs from the others: a late deregistration removes a successor, or a repeated registration
replaces it.
"""

from __future__ import annotations

import pytest

from monolith.cluster import RayServiceDiscovery
from monolith.cluster.discovery.ray import Registry
from monolith.errors import InvalidArgumentError

OLD, NEW = "127.0.0.1:2001", "127.0.0.1:1002"  # not in the order of texts


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


def test_renewing_tells_an_actor_that_has_lost_its_memory_and_the_later_announcement_wins_in_any_order() -> None:
    before = Registry(clock=lambda: 5)
    old = {("ps", 0): (before.register("ps", 0, OLD), OLD)}
    new = {("ps", 0): (before.register("ps", 0, NEW), NEW), ("ps", 1): (before.register("ps", 1, NEW), NEW)}
    assert before.renew(old) == [("ps", 0)]
    for order in ([old, new], [new, old]):
        after = Registry()
        taken = [after.renew(own) for own in order]
        assert taken == ([[], []] if order[0] is old else [[], [("ps", 0)]])
        assert after.query("ps") == {0: NEW, 1: NEW}
    assert after.renew(old) == [("ps", 0)]


def test_who_registers_with_an_actor_that_has_lost_its_memory_is_later_than_everyone_before() -> None:
    before, after = Registry(clock=lambda: 5), Registry(clock=lambda: 6)
    old = {("ps", 0): (before.register("ps", 0, OLD), OLD)}
    after.register("ps", 0, NEW)
    assert after.renew(old) == [("ps", 0)]
    assert after.query("ps") == {0: NEW}


def test_all_can_be_forgotten(registry: Registry) -> None:
    registry.deregister_all()
    assert registry.query("ps") == registry.query("worker") == {}


def test_the_name_of_a_job_is_checked_before_ray_is_asked() -> None:
    with pytest.raises(InvalidArgumentError, match=r"job: expected letters.* got '../x'"):
        RayServiceDiscovery("../x")
