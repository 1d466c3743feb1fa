"""Danger: a shadow whose predictions reach a client, or an observer that misses answers or breaks them."""

from __future__ import annotations

import threading

import pytest

from monolith.errors import ModelNotFoundError
from monolith.serve.repository import ModelRepository
from monolith.serve.server.routing import Answered, ReplicaRoute
from served_models import ServeSums, columns, sum_replica


class Seen:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.answers: list[Answered] = []
        self.shadowed = threading.Semaphore(0)

    def answered(self, answered: Answered) -> None:
        self.answers.append(answered)
        if answered.shadow:
            self.shadowed.release()


class Shadowing:
    """Answers with version 1 and shadows with version 2."""

    def __init__(self) -> None:
        self.repository = ModelRepository()
        self.keys: list[str] = []

    def key_column(self, name: str) -> str | None:
        return None

    def route(self, name: str, version: int | None, key: str) -> ReplicaRoute:
        self.keys.append(key)
        return ReplicaRoute(primary=self.repository.get(name, 1), shadows=(self.repository.get(name, 2),))


def test_shadows_are_observed_and_never_answered(serve_sums: ServeSums) -> None:
    seen, router = Seen(), Shadowing()
    server, client = serve_sums(sum_replica(1), sum_replica(2, scale=10.0), observers=[seen], router=router)
    router.repository = server.handler.repository
    answer = client.infer(columns(1.0, 2.0), request_id="r", route_key="user-7")
    assert (answer.version, answer["sum"].tolist()) == (1, [2.0, 4.0])
    assert seen.shadowed.acquire(timeout=20)
    primary, shadow = sorted(seen.answers, key=lambda one: one.version)
    assert (primary.version, primary.shadow, primary.rows, primary.status) == (1, False, 2, "ok")
    assert (primary.protocol, primary.request_id, primary.key) == ("http-binary", "r", "user-7")
    assert (shadow.version, shadow.shadow, shadow.outputs["sum"].tolist()) == (2, True, [20.0, 40.0])
    assert list(primary.columns) == ["a", "b"]
    assert router.keys == ["user-7"]


def test_failures_are_observed(serve_sums: ServeSums) -> None:
    seen = Seen()
    _, client = serve_sums(observers=[seen])
    with pytest.raises(ModelNotFoundError):
        client.infer(columns(1.0), model="other")
    assert [(one.model, one.version, one.status) for one in seen.answers] == [("other", 0, "invalid")]


def test_an_observer_that_fails_does_not_fail_the_answer(serve_sums: ServeSums) -> None:
    class Broken:
        def answered(self, answered: Answered) -> None:
            raise RuntimeError("broken")

    seen = Seen()
    _, client = serve_sums(observers=[Broken(), seen])
    assert client.infer(columns(1.0))["sum"].tolist() == [2.0]
    assert len(seen.answers) == 1
