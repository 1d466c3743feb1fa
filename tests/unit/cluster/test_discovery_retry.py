"""Danger: a moment of bad network ends a run, or a broken one is hammered without a pause and without an end."""

from __future__ import annotations

import pytest

from monolith.cluster import retry_with_socket_error
from monolith.errors import DiscoveryError


class Call:
    """Fails with these errors in turn, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.made = list(errors), 0

    def __call__(self) -> str:
        self.made += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


def test_a_passing_failure_is_passed_over() -> None:
    call, naps = Call(TimeoutError(), ConnectionResetError()), list[float]()
    assert retry_with_socket_error(call, sleep=naps.append, uniform=lambda low, high: (low + high) / 2) == "answer"
    assert (call.made, naps) == (3, [2.5, 2.5])


def test_after_five_failures_the_last_is_raised() -> None:
    call, naps = Call(*(TimeoutError(f"no {number}") for number in range(9))), list[float]()
    with pytest.raises(TimeoutError, match="no 4"):
        retry_with_socket_error(call, sleep=naps.append)
    assert call.made == 5
    assert len(naps) == 4
    assert all(0 <= nap <= 5 for nap in naps)
    assert len(set(naps)) > 1  # many processes that failed together do not come back together


@pytest.mark.parametrize("error", [KeyError("x"), DiscoveryError("refused")])
def test_an_error_that_is_not_the_networks_is_not_tried_again(error: Exception) -> None:
    call = Call(error)
    with pytest.raises(type(error)):
        retry_with_socket_error(call, sleep=pytest.fail)
    assert call.made == 1
