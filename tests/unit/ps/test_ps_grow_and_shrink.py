"""Danger: an update is lost or counted twice, or a row changes, while buckets move between running servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith import EmbeddingTable, Segment, TableConfig
from monolith.errors import ConfigError, InvalidArgumentError, UnavailableError
from monolith.ps import ClientConfig, ParameterServer, ServerConfig, ServerStore
from monolith.ps.protocol.ownership import OwnershipMap
from monolith.table import SGD, Adagrad, Bags, Gradient, LocalStore, OneBit, Zeros
from same_port import started_again

COUNTS = TableConfig(name="counts", segments=(Segment(dim=2, initializer=Zeros(), optimizer=SGD(learning_rate=1.0)),))
MOMENTS = TableConfig(name="moments", segments=(Segment(dim=3, optimizer=Adagrad(learning_rate=0.1)),), seed=4)
BITS = TableConfig(name="bits", segments=(Segment(dim=3, compressor=OneBit(step_size=2)),))
IDS = np.arange(4000) * 2**33 + 11


@pytest.fixture
def addresses() -> Iterator[list[str]]:
    with ExitStack() as stack:
        # Small pieces: a move takes long enough for others to meet it in the middle.
        config = ServerConfig(move_piece_bytes=4096)
        yield [stack.enter_context(ParameterServer(config)).address for _ in range(3)]


def singles(table: str, ids: np.ndarray = IDS) -> Bags:
    return Bags(table=table, ids=ids, offsets=np.arange(len(ids) + 1))


class Worker(threading.Thread):
    """Adds 1 to random ids of `counts` until told to stop, and keeps count of it."""

    def __init__(self, addresses: list[str], seed: int) -> None:
        super().__init__()
        self.counted = np.zeros(len(IDS))
        self.error: BaseException | None = None
        self.steps = 0
        self._ending = threading.Event()
        self._addresses = addresses
        self._random = np.random.default_rng(seed)

    def run(self) -> None:
        try:
            with ServerStore(self._addresses, [COUNTS], config=ClientConfig(timeout=60)) as store:
                while not self._ending.is_set():
                    self._step(store)
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self._ending.set()
        self.join(timeout=120)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error

    def _step(self, store: ServerStore) -> None:
        places = self._random.integers(0, len(IDS), size=300)
        bags = singles("counts", IDS[places])
        (before,) = store.lookup([bags])
        # Others only add: what this worker has counted itself must be there.
        assert bool((-before[:, 0].numpy() >= self.counted[places]).all())
        store.apply([Gradient(bags=bags, values=torch.ones(len(places), 2))])
        np.add.at(self.counted, places, 1)
        self.steps += 1


def test_updates_of_two_workers_count_once_while_servers_come_and_go(addresses: list[str]) -> None:
    workers = [Worker(addresses[:2], seed) for seed in range(2)]
    with ServerStore(addresses[:2], [COUNTS]) as store:
        for worker in workers:
            worker.start()
        sizes = []
        for wanted in (addresses, addresses[:2], addresses[:1], addresses):
            begun = [worker.steps for worker in workers]
            owned = store.rebalance(wanted)
            assert set(owned.addresses) == set(wanted)
            assert owned.holes() == ()
            sizes.append([sum(end - first for first, end in server.ranges) for server in owned.servers])
            for worker, steps in zip(workers, begun, strict=True):
                assert wait_for(lambda: worker.steps > steps + 3 or worker.error is not None)  # noqa: B023
        for worker in workers:
            worker.stop()
        (rows,) = store.lookup([singles("counts")])
        assert store.stats()["counts"].rows == np.count_nonzero(sum(worker.counted for worker in workers))
    assert [sorted(one) for one in sizes] == [[1365, 1365, 1366], [2048, 2048], [4096], [1365, 1365, 1366]]
    expected = -sum(worker.counted for worker in workers)
    assert rows[:, 0].numpy().tolist() == expected.tolist()


def test_rows_with_their_optimizer_state_arrive_bit_for_bit(addresses: list[str]) -> None:
    rng, local = np.random.default_rng(0), LocalStore([EmbeddingTable(MOMENTS), EmbeddingTable(BITS)])
    with ServerStore(addresses[:2], [MOMENTS, BITS]) as store:
        for turn, wanted in enumerate([addresses[:2], addresses, addresses[:2], addresses[:1]]):
            store.rebalance(wanted)
            # Before the next step too: what a new server knows besides the rows, the scale of the bits, came with them.
            for name in ("moments", "bits"):
                assert torch.equal(store.lookup([singles(name)])[0], local.lookup([singles(name)])[0])
            for step in range(3):
                ids = rng.choice(IDS, size=500)
                values = torch.from_numpy(rng.standard_normal((500, 3), dtype=np.float32))
                gradients = [Gradient(bags=singles(name, ids), values=values) for name in ("moments", "bits")]
                for one in (store, local):
                    one.apply(gradients, step=3 * turn + step, event_time=1000 + turn)
        for name in ("moments", "bits"):
            assert torch.equal(store.lookup([singles(name)])[0], local.lookup([singles(name)])[0])
            assert store.stats()[name].rows == local.stats()[name].rows
            assert store.stats()[name].max_event_time == local.stats()[name].max_event_time


def test_who_knows_nothing_of_the_new_server_is_led_there(addresses: list[str]) -> None:
    with ServerStore(addresses[:2], [COUNTS]) as idle, ServerStore(addresses[:2], [COUNTS]) as store:
        idle.assign("counts", IDS, torch.ones(len(IDS), 2))
        store.rebalance(addresses)
        idle.assign_add("counts", IDS, torch.ones(len(IDS), 2))
        assert idle.lookup([singles("counts")])[0].eq(2.0).all()
        assert set(idle.ownership.addresses) == set(addresses)
        with ServerStore(addresses[:2]) as late:
            assert late.lookup([singles("counts")])[0].eq(2.0).all()
        existed = idle.reinitialize("counts", torch.arange(4) * 2**33 + 11)
        assert existed.tolist() == [1, 1, 1, 1]


def test_servers_that_left_may_end_and_nobody_misses_them() -> None:
    with ParameterServer() as one, ServerStore([one.address], [COUNTS]) as store:
        with ParameterServer() as two:
            store.rebalance([one.address, two.address])
            idle = ServerStore([one.address, two.address])
            store.assign("counts", IDS, torch.ones(len(IDS), 2))
            store.rebalance([one.address])
        with idle:
            assert idle.lookup([singles("counts")])[0].eq(1.0).all()
            assert store.stats()["counts"].rows == idle.stats()["counts"].rows == len(IDS)
            idle.assign_add("counts", IDS, torch.ones(len(IDS), 2))
        assert store.lookup([singles("counts")])[0].eq(2.0).all()


def test_a_rebalance_to_a_server_that_is_not_there_changes_nothing(addresses: list[str]) -> None:
    with ServerStore(addresses[:1], [COUNTS], config=ClientConfig(timeout=1.0)) as store:
        with pytest.raises(UnavailableError, match="start it first"):
            store.rebalance([addresses[0], "127.0.0.1:9"])
        assert store.ownership == OwnershipMap.even(addresses[:1])
        with pytest.raises(InvalidArgumentError, match="each server once"):
            store.rebalance([addresses[0], addresses[0]])


def test_a_second_rebalance_at_the_same_time_is_refused(addresses: list[str]) -> None:
    with ServerStore(addresses[:1], [COUNTS]) as first, ServerStore(addresses[:1], [COUNTS]) as second:
        refused: list[InvalidArgumentError] = []

        def try_too(moved: int, planned: int) -> None:
            with pytest.raises(InvalidArgumentError, match="another client is moving") as caught:
                second.rebalance([addresses[0], addresses[2]])
            refused.append(caught.value)

        first.rebalance(addresses[:2], report=try_too)
        assert refused
        assert set(second.rebalance(addresses).addresses) == set(addresses)


def test_new_servers_own_what_was_lost_only_if_told_so(addresses: list[str]) -> None:
    with ServerStore(addresses[:2], [COUNTS]) as store:
        store.assign("counts", IDS, torch.ones(len(IDS), 2))
        with ParameterServer() as lost:
            owned = store.rebalance([*addresses[:2], lost.address])
        left = [server for server in owned.servers if server.address in addresses]
        with pytest.raises(ConfigError, match="none of"):
            ServerStore(addresses, config=ClientConfig(timeout=0.5))
    with ServerStore(addresses, [COUNTS], replace_lost=True) as again, ServerStore(addresses) as other:
        assert other.ownership == again.ownership
        assert again.ownership.holes() == ()
        assert set(left) < set(again.ownership.servers)
        (rows,) = other.lookup([singles("counts")])
        # What the others own is untouched; what was lost begins anew, until it is restored.
        assert 0 < rows[:, 0].sum() < len(IDS)


def test_a_worker_that_comes_while_a_new_server_is_down_waits_for_it(tmp_path: Path) -> None:
    with ParameterServer() as one, ServerStore([one.address], [COUNTS]) as store:
        two = ParameterServer(ServerConfig(folder=tmp_path))
        store.rebalance([one.address, two.address])
        port = two.port
        two.close()
        found: list[int] = []

        def come() -> None:
            # It has never heard of the second one.
            with ServerStore([one.address]) as late:
                found.append(len(late.ownership.servers))

        coming = threading.Thread(target=come)
        coming.start()
        # Longer than a look at buckets that are missing takes.
        coming.join(3.5)
        with started_again(ServerConfig(folder=tmp_path, port=port)):
            coming.join(60)
            assert found == [2]


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_server_that_comes_and_goes_does_not_use_up_its_streams() -> None:
    with ExitStack() as stack:
        config = ServerConfig(max_streams=6)
        servers = [stack.enter_context(ParameterServer(config)).address for _ in range(2)]
        with ServerStore(servers, [COUNTS], config=ClientConfig(timeout=5)) as store:
            for _ in range(8):
                store.rebalance(servers[:1])
                store.rebalance(servers)
            assert set(store.ownership.addresses) == set(servers)
