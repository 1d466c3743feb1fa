"""Danger: while dense parameters move, a worker that starts sees one nowhere. It would declare the parameter again on another
server, or push to a server that does not have it."""

from __future__ import annotations

import pytest
import torch

from monolith.errors import ConfigError
from monolith.ps import DenseOptimizer, ParameterServer, ServerParameters, ServerStore
from monolith.ps.client import dense_routes
from monolith.ps.client.routes import LOOKS, ask_buckets
from monolith.ps.protocol.control_messages import Buckets
from monolith.ps.server.owned_buckets import OwnedBuckets
from monolith.transport.link import Link

SGD = DenseOptimizer.of(torch.optim.SGD, lr=1.0)


def test_a_parameter_that_arrives_while_the_server_answers_is_in_the_answer() -> None:
    owned, held = OwnedBuckets(), dict[str, int]()
    owned._set(gave_dense=("w",))

    def sizes() -> dict[str, int]:
        before = dict(held)
        if not held:
            # A transfer is installed right after the server has looked at what it holds.
            held["w"] = 8
            owned.forget_dense(["w"])
        return before

    answer = owned.answer(durable=False, dense=sizes)
    assert (answer.dense, answer.gave_dense) == (("w",), ())


def test_a_parameter_that_is_not_found_at_once_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with ParameterServer() as a, ParameterServer() as b, ServerStore([a.address, b.address]) as store:
        origin = ServerParameters(store, {"w": torch.ones(2)}, SGD)
        (holder,) = (link for link in store.links if ask_buckets(link).dense)
        misses = iter(range(LOOKS - 2))

        def asked(link: Link) -> Buckets:
            found = ask_buckets(link)
            hidden = link is holder and next(misses, None) is not None
            return found.model_copy(update={"dense": (), "dense_bytes": ()}) if hidden else found

        monkeypatch.setattr(dense_routes, "ask_buckets", asked)
        origin._routes._link_of.clear()
        origin.apply({"w": torch.ones(2)})
        assert origin.read()["w"].tolist() == [0.0, 0.0]


def test_a_parameter_that_two_servers_train_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with ParameterServer() as a, ParameterServer() as b, ServerStore([a.address, b.address]) as store:
        origin = ServerParameters(store, {"w": torch.ones(2)}, SGD)
        monkeypatch.setattr(
            dense_routes,
            "ask_buckets",
            lambda link: ask_buckets(link).model_copy(update={"dense": ("w",), "dense_bytes": (8,)}),
        )
        origin._routes._link_of.clear()
        with pytest.raises(ConfigError, match=r"'w': more than one of .* trains it"):
            origin.read()
