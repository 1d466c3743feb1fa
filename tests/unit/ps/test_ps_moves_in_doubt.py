"""Danger: a server dies while the outcome of a move is unknown, and the chunk is then owned by two servers or by none."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith.errors import OwnershipChangedError
from monolith.ps import ParameterServer
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.messages import TableWrite
from monolith.transport.link import Link
from moving_buckets import BAGS, IDS, DeafLink, MuteLink, asked, filled, moved, started, wait_for


def crashed(server: ParameterServer, folder: Path) -> ParameterServer:
    """What `server` would be if it had been killed now: another one on a copy of its folder."""
    copy = folder.with_name(folder.name + "-after")
    shutil.copytree(folder, copy)
    port = server.port
    server.close()
    return started(copy, port)


@pytest.mark.parametrize("kind", [DeafLink, MuteLink])
def test_a_giver_that_dies_in_doubt_asks_again_and_gives_once(
    tmp_path: Path, kind: type[DeafLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    giver, taker = started(tmp_path / "giver"), started(tmp_path / "taker")
    with filled(giver) as store:
        monkeypatch.setattr(giver._dispatcher._moves._delivery, "_connect", lambda address: kind(address, timeout=5))
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
        heard = giver._dispatcher._moves._delivery._connect
        monkeypatch.setattr(
            giver._dispatcher._moves._delivery, "_connect", lambda address: MuteLink(address, timeout=5)
        )
        assert moved(giver.address, taker.address, wait=0.3)["pending"] is True
        reading = threading.Thread(target=lambda: store.lookup([BAGS]))
        reading.start()
        port = taker.port
        taker.close()
        taker = started(None, port)
        monkeypatch.setattr(giver._dispatcher._moves._delivery, "_connect", heard)
        wait_for(lambda: asked(giver.address).giving is None)
        assert asked(giver.address).ranges == ((0, 4096),)
        # Whoever waited for the piece finds it.
        reading.join(60)
        assert not reading.is_alive()
        store.assign_add("t", IDS, torch.ones(len(IDS), 1))
        assert store.lookup([BAGS])[0].eq(2.0).all()
    for server in (giver, taker):
        server.close()


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_taker_that_dies_while_it_is_met_is_looked_for_again(
    monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    giver, taker = started(None), started(None)
    with filled(giver) as store:
        delivery, join = giver._dispatcher._moves._delivery, store._routes._join
        heard, met = delivery._connect, threading.Event()

        def dies_when_joined(address: str) -> Link | None:
            nonlocal taker
            link, port = join(address), taker.port
            monkeypatch.setattr(store._routes, "_join", join)
            taker.close()
            if comes_back:
                taker = started(None, port)
            met.set()
            return link

        monkeypatch.setattr(delivery, "_connect", lambda address: MuteLink(address, timeout=5))
        monkeypatch.setattr(store._routes, "_join", dies_when_joined)
        assert moved(giver.address, taker.address, wait=0.3)["pending"] is True
        found: list[torch.Tensor] = []
        reading = threading.Thread(target=lambda: found.extend(store.lookup([BAGS])))
        reading.start()
        assert met.wait(60)
        if not comes_back:
            taker = started(None, taker.port)
        monkeypatch.setattr(delivery, "_connect", heard)
        reading.join(60)
        assert found[0].eq(1.0).all()
    for server in (giver, taker):
        server.close()


def test_a_piece_whose_taker_moved_house_follows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    giver, taker = started(None), started(tmp_path / "taker")
    with filled(giver) as store:
        heard = giver._dispatcher._moves._delivery._connect
        monkeypatch.setattr(
            giver._dispatcher._moves._delivery, "_connect", lambda address: MuteLink(address, timeout=5)
        )
        assert moved(giver.address, taker.address, wait=0.3)["pending"] is True
        taker.close()
        # It has never owned anything, and is known again.
        taker = started(tmp_path / "taker")
        monkeypatch.setattr(giver._dispatcher._moves._delivery, "_connect", heard)
        answer = moved(giver.address, taker.address, wait=30)
        assert answer["pending"] is False
        assert store.lookup([BAGS])[0].eq(1.0).all()
        assert store.ownership.holes() == ()
    for server in (giver, taker):
        server.close()


def test_another_server_at_the_takers_address_settles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    giver, taker = started(None), started(tmp_path / "taker")
    with filled(giver) as store:
        moves = giver._dispatcher._moves._delivery
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
