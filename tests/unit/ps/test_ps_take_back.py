"""Danger: buckets whose destination never comes back wait forever, or are taken back although the destination has them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith.errors import ConfigError, InvalidArgumentError, UnavailableError
from monolith.ps import ClientConfig, ParameterServer, ServerStore, take_back_buckets
from monolith.ps.client.server_group import link_to
from monolith.ps.protocol.calls import Call
from monolith.ps.rebalance.client import SettledTransfer
from monolith.transport.link import Exchange, Link
from moving_buckets import BAGS, IDS, DeafLink, MuteLink, asked, filled, moved, mover_done, started, wait_for

PIECE = (0, 2048)


def stuck(giver: ParameterServer, taker: ParameterServer, connect: Callable[[str], Link]) -> None:
    """Let `source` give a transfer to `destination` over links that lose something, and whoever moves give up."""
    giver._dispatcher._moves._delivery._connect = connect
    assert moved(giver.address, taker.address, wait=0.3)["pending"] is True
    mover_done(giver.address)


def mute(address: str) -> Link:
    return MuteLink(address, timeout=1)


def deaf(address: str) -> Link:
    return DeafLink(address, timeout=1)


def piece(giver: ParameterServer, taker: ParameterServer, owner: ParameterServer) -> SettledTransfer:
    return SettledTransfer(source=giver.address, destination=taker.address, buckets=PIECE, owner=owner.address)


def require_counts(store: ServerStore) -> None:
    """Every row has its value, and takes one more update."""
    store.assign_add("t", IDS, torch.ones(len(IDS), 1))
    assert store.lookup([BAGS])[0].eq(2.0).all()
    assert store.stats()["t"].rows == len(IDS)


def test_a_taker_that_has_not_got_it_gives_it_up_and_never_takes_it(tmp_path: Path) -> None:
    sent: list[tuple[str, Sequence[np.ndarray], int]] = []

    class SpyingLink(MuteLink):
        def begin(
            self, call: Call, text: str = "{}", arrays: Sequence[np.ndarray] = (), *, timeout: float | None = None
        ) -> Exchange:
            if call == Call.INSTALL_BUCKETS:
                sent.append((text, arrays, self.instance))
            return super().begin(call, text, arrays, timeout=timeout)

    with started(tmp_path / "giver") as giver, started(tmp_path / "taker") as taker, filled(giver) as store:
        stuck(giver, taker, lambda address: SpyingLink(address, timeout=1))
        assert take_back_buckets([giver.address, taker.address]) == [piece(giver, taker, giver)]
        # The transfer itself, delayed by the network until now.
        text, arrays, instance = sent[0]
        link = link_to(taker.address, ClientConfig())
        link.instance = instance
        with pytest.raises(InvalidArgumentError, match="was refused before"):
            link.call(Call.INSTALL_BUCKETS, text, arrays)
        link.close()
        assert asked(taker.address).ranges == ()
        assert asked(giver.address).ranges == ((0, 4096),)
        require_counts(store)
        assert take_back_buckets([giver.address, taker.address]) == []


def test_a_taker_that_has_it_keeps_it(tmp_path: Path) -> None:
    with started(tmp_path / "giver") as giver, started(tmp_path / "taker") as taker, filled(giver) as store:
        stuck(giver, taker, deaf)
        wait_for(lambda: asked(taker.address).ranges != ())
        assert take_back_buckets([giver.address], lost=[taker.address]) == [piece(giver, taker, taker)]
        assert asked(giver.address).ranges == ((2048, 4096),)
        require_counts(store)


def test_a_taker_that_cannot_be_asked_may_have_it_unless_it_is_lost(tmp_path: Path) -> None:
    giver, taker = started(tmp_path / "giver"), started(tmp_path / "taker")
    with filled(giver) as store:
        stuck(giver, taker, mute)
        taker.close()
        with pytest.raises(
            UnavailableError, match=f"in transit from {giver.address} to {taker.address}.*declare it lost"
        ):
            take_back_buckets([giver.address])
        assert asked(giver.address).giving is not None
        with pytest.raises(InvalidArgumentError, match=r"nothing is in transit to 127\.0\.0\.1:9"):
            take_back_buckets([giver.address], lost=["127.0.0.1:9"])
        reading = threading.Thread(target=lambda: store.lookup([BAGS]))
        reading.start()
        assert take_back_buckets([giver.address], lost=[taker.address]) == [piece(giver, taker, giver)]
        # Whoever waited for the transfer finds it.
        reading.join(60)
        assert not reading.is_alive()
        require_counts(store)
        # It is durable that the transfer is here.
        port = giver.port
        giver.close()
        with started(tmp_path / "giver", port) as again:
            assert asked(again.address).ranges == ((0, 4096),)
            assert asked(again.address).giving is None


def test_servers_that_answer_are_not_lost(tmp_path: Path) -> None:
    with started(tmp_path / "giver") as giver, started(tmp_path / "taker") as taker, filled(giver):
        stuck(giver, taker, mute)
        with pytest.raises(InvalidArgumentError, match=f"lost: {taker.address} answers"):
            take_back_buckets([giver.address, taker.address], lost=[taker.address])
        assert asked(giver.address).giving is not None


def test_what_a_lost_taker_has_given_on_is_not_taken_back(tmp_path: Path) -> None:
    giver, taker, third = (started(tmp_path / name) for name in ("giver", "taker", "third"))
    with filled(giver):
        stuck(giver, taker, deaf)
        wait_for(lambda: asked(taker.address).ranges != ())
        assert moved(taker.address, third.address, wait=30)["pending"] is False
        taker.close()
        with pytest.raises(InvalidArgumentError, match=f"lost: {third.address} owns some of the buckets"):
            take_back_buckets([giver.address, third.address], lost=[taker.address])
        assert asked(giver.address).giving is not None
    for server in (giver, third):
        server.close()


def test_a_server_that_was_not_lost_after_all_is_noticed(tmp_path: Path) -> None:
    giver, taker = started(tmp_path / "giver"), started(tmp_path / "taker")
    with filled(giver):
        stuck(giver, taker, deaf)
        wait_for(lambda: asked(taker.address).ranges != ())
        port = taker.port
        taker.close()
        take_back_buckets([giver.address], lost=[taker.address])
        with (
            started(tmp_path / "taker", port) as back,
            pytest.raises(ConfigError, match=r"more than one of .* owns the buckets \[\(0, 2048\)\].*stop it"),
        ):
            ServerStore([giver.address, back.address], config=ClientConfig(timeout=0.5))
    giver.close()
