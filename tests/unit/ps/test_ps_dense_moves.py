"""Danger: a gradient is lost or counted twice, or a parameter is there twice, while dense parameters move between servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from monolith.errors import UnavailableError
from monolith.ps import (
    ClientConfig,
    DenseOptimizer,
    ParameterServer,
    ServerConfig,
    ServerParameters,
    ServerStore,
    take_back_buckets,
)
from monolith.ps.client.saving import _is_whole
from monolith.ps.client.server_group import link_to
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.control_messages import MoveBuckets, SaveBegun
from monolith.ps.rebalance.client import SettledTransfer
from monolith.table.store import Position
from monolith.testing import sgd_table_config
from moving_buckets import DeafLink, MuteLink, asked, mover_done, started, wait_for

NAMES = tuple(f"p{number}" for number in range(6))
SGD = DenseOptimizer.of(torch.optim.SGD, lr=1.0)


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(3) for name in NAMES}


@pytest.fixture
def addresses() -> Iterator[list[str]]:
    with ExitStack() as stack:
        # One parameter at a time: a move takes long enough for others to meet it in the middle.
        config = ServerConfig(move_piece_bytes=8)
        yield [stack.enter_context(ParameterServer(config)).address for _ in range(3)]


class Worker(threading.Thread):
    """Takes 1 from every parameter until told to stop, and counts how often."""

    def __init__(self, addresses: list[str]) -> None:
        super().__init__()
        self.steps, self.error = 0, None
        self.ending = threading.Event()
        self._addresses = addresses

    def run(self) -> None:
        try:
            with ServerStore(self._addresses, config=ClientConfig(timeout=60)) as store:
                origin = ServerParameters(store, zeros(), SGD)
                while not self.ending.is_set():
                    before = origin.read()
                    # Others only take away: what this worker has counted itself must be there.
                    assert all(bool((-value >= self.steps).all()) for value in before.values())
                    origin.apply({name: torch.ones(3) for name in NAMES})
                    self.steps += 1
        except BaseException as error:
            self.error = error

    def stop(self) -> int:
        self.ending.set()
        self.join(120)
        assert not self.is_alive()
        assert self.error is None, self.error
        return self.steps


def holders(addresses: list[str]) -> dict[str, str]:
    """Who holds each parameter; each is held once."""
    found = [(name, address) for address in addresses for name in asked(address).dense]
    assert sorted(name for name, _ in found) == sorted(NAMES)
    return dict(found)


def move_dense(giver: ParameterServer, taker: ParameterServer, *, wait: float = 30.0) -> str:
    """Let `giver` give all it has in one piece, and whoever moves give up; the answer."""
    link = link_to(giver.address, ClientConfig())
    move = MoveBuckets(dense=NAMES, taker=taker.address, rebalance=3, wait=wait)
    try:
        return link.call(Call.MOVE_BUCKETS, move.model_dump_json()).text
    finally:
        link.close()
        mover_done(giver.address)


def test_gradients_of_two_workers_count_once_while_servers_come_and_go(addresses: list[str]) -> None:
    workers = [Worker(addresses[:2]) for _ in range(2)]
    with ServerStore(addresses[:2]) as store:
        origin = ServerParameters(store, zeros(), SGD)
        for worker in workers:
            worker.start()
        for wanted in (addresses, addresses[1:], addresses[2:], addresses[:2]):
            begun = [worker.steps for worker in workers]
            store.rebalance(wanted)
            assert set(holders(addresses).values()) <= set(wanted)
            wait_for(lambda: all(w.error or w.steps > s + 2 for w, s in zip(workers, begun, strict=True)))  # noqa: B023
        steps = sum(worker.stop() for worker in workers)
        assert all(value.eq(-steps).all() for value in origin.read().values())


def test_parameters_with_their_optimizer_arrive_bit_for_bit(addresses: list[str]) -> None:
    torch.manual_seed(0)
    local = {name: torch.randn(3).requires_grad_() for name in NAMES}
    adam = torch.optim.Adam(local.values(), 0.1)
    with ServerStore(addresses[:2]) as store:
        origin = ServerParameters(store, local, DenseOptimizer.of(torch.optim.Adam, lr=0.1))
        for wanted in (addresses[1:2], addresses, addresses[2:]):
            store.rebalance(wanted)
            for _ in range(3):
                for parameter in local.values():
                    parameter.grad = torch.randn(3)
                origin.apply({name: parameter.grad for name, parameter in local.items() if parameter.grad is not None})
                adam.step()
            found = origin.read()
            assert all(torch.equal(found[name], parameter.detach()) for name, parameter in local.items())


def test_an_idle_worker_finds_them_after_their_server_has_ended() -> None:
    with ParameterServer() as one, ParameterServer() as two:
        both = [one.address, two.address]
        with ServerStore(both) as idle, ServerStore(both) as store:
            origin = ServerParameters(idle, zeros(), SGD)
            store.rebalance([two.address])
            one.close()
            assert all(value.eq(0.0).all() for value in origin.read().values())
            origin.apply({name: torch.ones(3) for name in NAMES})
            assert all(value.eq(-1.0).all() for value in origin.read().values())
            with ServerStore([two.address]) as late:
                assert not ServerParameters(late, zeros(), SGD).created


@pytest.mark.parametrize("kind", [DeafLink, MuteLink])
def test_a_giver_that_dies_in_doubt_gives_once(tmp_path: Path, kind: type[DeafLink]) -> None:
    giver, taker = started(tmp_path / "giver"), started(tmp_path / "taker")
    with ServerStore([giver.address], [sgd_table_config(1, name="t")]) as store:
        origin = ServerParameters(store, zeros(), SGD)
        origin.apply({name: torch.ones(3) for name in NAMES})
        giver._dispatcher._moves._delivery._connect = lambda address: kind(address, timeout=5)
        assert '"pending":true' in move_dense(giver, taker, wait=0.3)
        if kind is DeafLink:
            wait_for(lambda: asked(taker.address).dense != ())
        # Whoever comes now does not make them a second time, but waits for them.
        declared: list[bool] = []

        def declare() -> None:
            with ServerStore([giver.address, taker.address]) as late:
                declared.append(ServerParameters(late, zeros(), SGD).created)

        late = threading.Thread(target=declare)
        late.start()
        port = giver.port
        giver.close()
        giver = started(tmp_path / "giver", port)
        wait_for(lambda: asked(giver.address).giving is None)
        assert asked(giver.address).dense == ()
        assert sorted(asked(taker.address).dense) == sorted(NAMES)
        late.join(60)
        assert declared == [False]
        origin.apply({name: torch.ones(3) for name in NAMES})
        assert all(value.eq(-2.0).all() for value in origin.read().values())
    for server in (giver, taker):
        server.close()


def test_what_is_on_its_way_can_be_taken_back(tmp_path: Path) -> None:
    with started(None) as giver, started(tmp_path / "taker") as taker, ServerStore([giver.address]) as store:
        origin = ServerParameters(store, zeros(), SGD)
        giver._dispatcher._moves._delivery._connect = lambda address: MuteLink(address, timeout=1)
        move_dense(giver, taker, wait=0.3)
        assert asked(giver.address).dense == ()
        (piece,) = take_back_buckets([giver.address, taker.address])
        assert piece == SettledTransfer(
            source=giver.address, destination=taker.address, dense=NAMES, owner=giver.address
        )
        origin.apply({"p1": torch.ones(3)})
        assert origin.read()["p1"].eq(-1.0).all()


def test_a_batch_that_counted_before_the_move_counts_once(tmp_path: Path) -> None:
    with ParameterServer() as one, ParameterServer() as two:
        for epoch in (1, 2):
            config = ClientConfig(worker="w", epoch=epoch)
            with ServerStore([one.address], config=config) as store:
                origin = ServerParameters(store, zeros(), SGD)
                # The successor does not know whether the last batch counted, and pushes it again.
                for batch in range(1, 4) if epoch == 1 else range(3, 5):
                    position = Position(batches=batch)
                    origin.apply({name: torch.ones(3) for name in NAMES}, position=position)
                if epoch == 1:
                    assert '"pending":false' in move_dense(one, two)
                assert origin.read()["p0"].eq(-3.0 if epoch == 1 else -4.0).all()


def test_those_of_a_server_that_is_lost_begin_anew_only_if_told_so() -> None:
    with ParameterServer() as one, ServerStore([one.address]) as store:
        ServerParameters(store, zeros(), SGD)
        with ParameterServer() as lost:
            assert '"pending":false' in move_dense(one, lost)
        impatient = ClientConfig(timeout=1.0)
        with (
            ServerStore([one.address], config=impatient) as other,
            pytest.raises(UnavailableError, match="replace_lost"),
        ):
            ServerParameters(other, zeros(), SGD)
        ServerStore([one.address], replace_lost=True).close()
        for created in (True, False):
            with ServerStore([one.address]) as other:
                assert ServerParameters(other, zeros(), SGD).created is created


@pytest.mark.parametrize(
    ("cuts", "whole"),
    [
        ([SaveBegun(ranges=None, dense=("p",)), SaveBegun(ranges=None, dense=("q",))], True),
        ([SaveBegun(ranges=None, moving_dense=("p",)), SaveBegun(ranges=None)], True),
        ([SaveBegun(ranges=None, moving_dense=("p",)), SaveBegun(ranges=None, dense=("p",))], True),
        ([SaveBegun(ranges=None, gave_dense=("p",)), SaveBegun(ranges=None, dense=("p",))], True),
        ([SaveBegun(ranges=None, dense=("p",)), SaveBegun(ranges=None, dense=("p",))], False),
        ([SaveBegun(ranges=None, gave_dense=("p",)), SaveBegun(ranges=None)], False),
    ],
)
def test_a_checkpoint_whose_cuts_have_a_parameter_twice_or_not_at_all_is_taken_again(
    cuts: list[SaveBegun], whole: bool
) -> None:
    assert _is_whole(cuts) is whole


def test_a_checkpoint_while_they_are_on_their_way_has_them_once(tmp_path: Path) -> None:
    giver, taker = started(tmp_path / "run" / "ps" / "0"), started(tmp_path / "run" / "ps" / "1")
    with ServerStore([giver.address, taker.address]) as store:
        origin = ServerParameters(store, zeros(), SGD)
        origin.apply({name: torch.ones(3) for name in NAMES})
        giver._dispatcher._moves._delivery._connect = lambda address: DeafLink(address, timeout=5)
        move_dense(giver, taker, wait=0.3)
        wait_for(lambda: len(asked(taker.address).dense) == len(NAMES))
        origin.apply({name: torch.ones(3) for name in NAMES})
        store.save(tmp_path / "run" / "model.ckpt-1")
    for server in (giver, taker):
        server.close()
    roots = ServerConfig(restore_roots=(str(tmp_path),))
    with ParameterServer(roots) as fresh, ServerStore([fresh.address]) as store:
        store.restore(tmp_path / "run" / "model.ckpt-1")
        # Those that arrived count, and not what the giver still holds of them.
        assert all(value.eq(-2.0).all() for value in ServerParameters(store, zeros(), SGD).read().values())
