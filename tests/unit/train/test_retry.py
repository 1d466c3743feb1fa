"""Danger: a run that gives up because a server was slow, retries forever while servers keep dying, or retries a mistake."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monolith.errors import (
    DeadlineExceededError,
    MonolithError,
    ServerError,
    ServerRestartedError,
    ServerRestoredError,
    StalePushError,
    UnavailableError,
)
from monolith.train.distributed.formation import run_with_retries


class Run:
    """Fails with `errors` in turn, then returns; remembers with which clusters, and the sleeps between."""

    def __init__(self, errors: list[Exception], clusters: str) -> None:
        self._errors, self._clusters = iter(errors), iter(clusters)
        self.seen, self.sleeps, self.failovers = "", list[float](), list[int]()

    def __call__(self, cluster: str) -> str:
        self.seen += cluster
        for error in self._errors:
            raise error
        return "done"

    def retried(self, max_losses: int = 0) -> str:
        return run_with_retries(
            self,
            lambda: next(self._clusters),
            max_losses=max_losses,
            wait_secs=30,
            on_failover=self.failovers.append,
            sleep=self.sleeps.append,
        )


def temporary() -> Iterator[Exception]:
    while True:
        yield DeadlineExceededError("slow")
        yield UnavailableError("away")


def test_what_succeeds_is_not_retried() -> None:
    run = Run([], "a")
    assert (run.retried(), run.seen, run.sleeps) == ("done", "a", [])


def test_with_the_same_servers_there_is_no_limit() -> None:
    run = Run([error for error, _ in zip(temporary(), range(20), strict=False)], "a" * 21)
    assert run.retried(max_losses=0) == "done"
    assert (run.seen, run.sleeps, run.failovers) == ("a" * 21, [30] * 20, list(range(1, 21)))


def test_servers_that_have_moved_without_a_loss_do_not_count() -> None:
    """A long job must not be ended by the seventh restart of a server at another address."""
    run = Run([UnavailableError("x")] * 9, "aabcdefghij")
    assert run.retried(max_losses=0) == "done"
    assert run.seen == "aabcdefghi"


@pytest.mark.parametrize(("limit", "seen"), [(0, "a"), (1, "ab"), (2, "abc")])
def test_losses_are_accepted_so_many_times(limit: int, seen: str) -> None:
    run = Run([ServerRestartedError(str(number)) for number in range(9)], "abcdefg")
    with pytest.raises(ServerRestartedError, match=f"^{limit}$"):
        run.retried(max_losses=limit)
    assert run.seen == seen


def test_a_server_that_has_lost_its_rows_is_another_one() -> None:
    with pytest.raises(ServerRestartedError):
        Run([ServerRestartedError("empty")], "aa").retried()
    assert Run([ServerRestartedError("empty")], "aa").retried(max_losses=1) == "done"


def test_a_server_that_has_restored_itself_is_the_same() -> None:
    assert Run([ServerRestoredError("full")], "aa").retried() == "done"


@pytest.mark.parametrize(
    "error", [StalePushError("x"), ServerError("x"), MonolithError("x"), ValueError("x"), OSError()]
)
def test_everything_else_is_raised_at_once(error: Exception) -> None:
    run = Run([error], "aa")
    with pytest.raises(type(error)):
        run.retried(max_losses=6)
    assert (run.seen, run.sleeps) == ("a", [])
