"""Danger: a server dies while another does not know what became of a piece, and it is then owned twice or by nobody."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith.errors import OwnershipChangedError, UnavailableError
from monolith.ps import ClientConfig, ParameterServer, ServerConfig, ServerStore
from monolith.ps.bucket_messages import Buckets, MoveBuckets
from monolith.ps.client.server_group import link_to
from monolith.ps.messages import TableWrite
from monolith.table import Bags
from monolith.testing import sgd_table_config
from monolith.transport.calls import Call
from monolith.transport.link import Exchange, Link
from same_port import started_again

TABLE = sgd_table_config(1, name="t")
IDS = np.arange(300)
BAGS = Bags(table="t", ids=IDS, row_splits=np.arange(301))


class DeafLink(Link):
    """Delivers transfers and does not hear the answers, or does not even deliver them."""

    delivers = True

    def prepared(
        self, call: Call, text: str, arrays: Sequence[np.ndarray], *, timeout: float | None = None
    ) -> Exchange:
        """As any link, but for transfers."""
        exchange = super().prepared(call, text, arrays, timeout=timeout)
        if call == Call.INSTALL_BUCKETS:
            if self.delivers:
                exchange.finish()
            raise UnavailableError("the answer got lost")
        return exchange


class MuteLink(DeafLink):
    delivers = False


def started(folder: Path | None, port: int = 0) -> ParameterServer:
    # Nothing is written by itself: what must be durable is committed where it must be.
    return started_again(ServerConfig(folder=folder, port=port))


def asked(address: str) -> Buckets:
    link = link_to(address, ClientConfig())
    try:
        return Buckets.from_json(link.call(Call.BUCKETS).text)
    finally:
        link.close()


def moved(giver: str, taker: str, *, wait: float) -> dict[str, object]:
    link = link_to(giver, ClientConfig())
    try:
        move = MoveBuckets(buckets=(0, 2048), taker=taker, rebalance=3, wait=wait)
        answer: dict[str, object] = json.loads(link.call(Call.MOVE_BUCKETS, move.model_dump_json()).text)
        return answer
    finally:
        link.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def crashed(server: ParameterServer, folder: Path) -> ParameterServer:
    """What `server` would be if it had been killed now: another one on a copy of its folder."""
    copy = folder.with_name(folder.name + "-after")
    shutil.copytree(folder, copy)
    port = server.port
    server.close()
    return started(copy, port)


def filled(giver: ParameterServer) -> ServerStore:
    store = ServerStore([giver.address], [TABLE])
    store.assign("t", IDS, torch.ones(len(IDS), 1))
    return store


@pytest.mark.parametrize("kind", [DeafLink, MuteLink])
def test_a_giver_that_dies_in_doubt_asks_again_and_gives_once(
    tmp_path: Path, kind: type[DeafLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    giver, taker = started(tmp_path / "giver"), started(tmp_path / "taker")
    with filled(giver) as store:
        monkeypatch.setattr(giver._dispatcher._moves, "_connect", lambda address: kind(address, timeout=5))
        assert moved(giver.address, taker.address, wait=0.3)["pending"] is True
        # Neither answers for the piece as long as the giver does not know.
        assert asked(giver.address).ranges == ((2048, 4096),)
        write = TableWrite(push=store.next_push(), table="t", map=1)
        with pytest.raises(OwnershipChangedError):
            store.links[0].call(Call.ASSIGN_ADD, write.model_dump_json(), [IDS, np.ones((300, 1), np.float32)])
        if kind is DeafLink:
            wait_for(lambda: asked(taker.address).ranges != ())
        giver = crashed(giver, tmp_path / "giver")
        wait_for(lambda: asked(giver.address).giving is None)
        assert asked(giver.address).ranges == ((2048, 4096),)
        assert asked(taker.address).ranges == ((0, 2048),)
        store.assign_add("t", IDS, torch.ones(len(IDS), 1))
        assert store.lookup([BAGS])[0].eq(2.0).all()
        assert store.stats()["t"].rows == len(IDS)
    for server in (giver, taker):
        server.close()


def test_a_taker_that_dies_after_its_answer_still_owns_what_it_took(tmp_path: Path) -> None:
    giver, taker = started(tmp_path / "giver"), started(tmp_path / "taker")
    with filled(giver) as store:
        assert moved(giver.address, taker.address, wait=30)["pending"] is False
        taker = crashed(taker, tmp_path / "taker")
        giver = crashed(giver, tmp_path / "giver")
        assert asked(taker.address).ranges == ((0, 2048),)
        assert asked(giver.address).ranges == ((2048, 4096),)
        assert store.lookup([BAGS])[0].eq(1.0).all()
    for server in (giver, taker):
        server.close()


def test_a_taker_that_comes_back_without_its_memory_leaves_the_piece_with_the_giver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    giver, taker = started(None), started(None)
    with filled(giver) as store:
        heard = giver._dispatcher._moves._connect
        monkeypatch.setattr(giver._dispatcher._moves, "_connect", lambda address: MuteLink(address, timeout=5))
        assert moved(giver.address, taker.address, wait=0.3)["pending"] is True
        reading = threading.Thread(target=lambda: store.lookup([BAGS]))
        reading.start()
        port = taker.port
        taker.close()
        taker = started(None, port)
        monkeypatch.setattr(giver._dispatcher._moves, "_connect", heard)
        wait_for(lambda: asked(giver.address).giving is None)
        assert asked(giver.address).ranges == ((0, 4096),)
        # Whoever waited for the piece finds it.
        reading.join(60)
        assert not reading.is_alive()
        store.assign_add("t", IDS, torch.ones(len(IDS), 1))
        assert store.lookup([BAGS])[0].eq(2.0).all()
    for server in (giver, taker):
        server.close()


def test_a_piece_whose_taker_moved_house_follows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    giver, taker = started(None), started(tmp_path / "taker")
    with filled(giver) as store:
        heard = giver._dispatcher._moves._connect
        monkeypatch.setattr(giver._dispatcher._moves, "_connect", lambda address: MuteLink(address, timeout=5))
        assert moved(giver.address, taker.address, wait=0.3)["pending"] is True
        taker.close()
        # It has never owned anything, and is known again.
        taker = started(tmp_path / "taker")
        monkeypatch.setattr(giver._dispatcher._moves, "_connect", heard)
        answer = moved(giver.address, taker.address, wait=30)
        assert answer["pending"] is False
        assert store.lookup([BAGS])[0].eq(1.0).all()
        assert store.ownership.holes() == ()
    for server in (giver, taker):
        server.close()


def test_another_server_at_the_takers_address_settles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    giver, taker = started(None), started(tmp_path / "taker")
    with filled(giver) as store:
        moves = giver._dispatcher._moves
        heard, tries = moves._connect, threading.Semaphore(0)

        def counted(address: str) -> Link:
            tries.release()
            return heard(address)

        monkeypatch.setattr(moves, "_connect", lambda address: DeafLink(address, timeout=5))
        assert moved(giver.address, taker.address, wait=0.3)["pending"] is True
        port = taker.port
        taker.close()
        with started(tmp_path / "stranger", port) as stranger:
            monkeypatch.setattr(moves, "_connect", counted)
            for _ in range(3):
                assert tries.acquire(timeout=60)
            # Wherever the taker is now, it has the piece.
            assert asked(giver.address).giving is not None
            assert asked(stranger.address).ranges == ()
        taker = started(tmp_path / "taker", port)
        wait_for(lambda: asked(giver.address).giving is None)
        assert asked(taker.address).ranges == ((0, 2048),)
        assert store.lookup([BAGS])[0].eq(1.0).all()
    for server in (giver, taker):
        server.close()
