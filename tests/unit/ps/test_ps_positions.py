"""Danger: a batch counts twice or not at all in buckets that have moved, or were restored, since a worker pushed it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith.ps import ClientConfig, DenseOptimizer, ParameterServer, ServerConfig, ServerParameters, ServerStore
from monolith.ps.protocol.messages import BucketsAt, HeldPosition, Joined
from monolith.ps.rebalance.moves import keep_transfer
from monolith.ps.server.ledger_state import progress_text
from monolith.ps.server.pushes import BucketProgress
from monolith.table import SGD, Bags, Gradient, Segment, TableConfig, Zeros
from monolith.table.buckets import NUM_BUCKETS, bucket_of
from monolith.table.store import Position
from monolith.transport.frames import Frame, decode, encode

TABLE = TableConfig(name="t", segments=(Segment(dim=1, optimizer=SGD(learning_rate=1.0), initializer=Zeros()),))
IDS = np.arange(400)
BAGS = Bags(table="t", ids=IDS, offsets=np.arange(len(IDS) + 1))
# Two ids each: one half of a bag may have had a batch that the other has not.
PAIRS = Bags(table="t", ids=IDS, offsets=np.arange(0, len(IDS) + 1, 2), pooling="mean")
SGD = DenseOptimizer.of(torch.optim.SGD, lr=1.0)


def at(batches: int, epoch: int = 1) -> HeldPosition:
    return HeldPosition(batches=batches, epoch=epoch)


def mask(first: int, end: int) -> np.ndarray:
    found = np.zeros(NUM_BUCKETS, dtype=np.bool_)
    found[first:end] = True
    return found


def described(progress: BucketProgress) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
    return [(part.position.batches, part.ranges) for part in progress.at()]


def opened(servers: Sequence[ParameterServer], epoch: int, worker: str = "w") -> ServerStore:
    return ServerStore([one.address for one in servers], [TABLE], config=ClientConfig(worker=worker, epoch=epoch))


def push(store: ServerStore, batch: int, bags: Bags = BAGS) -> None:
    values = torch.ones(len(bags.offsets) - 1, 1) * (1 if bags is BAGS else 2)
    store.apply([Gradient(bags=bags, values=values)], position=Position(batches=batch))


def counts(store: ServerStore) -> np.ndarray:
    return -store.lookup([BAGS])[0].flatten().numpy()


def push_to(server: ParameterServer, worker: ServerStore, batch: int) -> None:
    """What is left of a push when the worker dies before it has reached the other servers."""
    route = worker._routes.current
    number = [link.address for link in route.links].index(server.address)
    ids = IDS[route.owners[bucket_of(IDS)] == number]
    bags = Bags(table="t", ids=ids, offsets=np.arange(len(ids) + 1))
    others = [link for link in route.links if link.address != server.address]
    for link in others:
        link.begin, link.real = lambda *_, **__: Silent(), link.begin  # type: ignore[attr-defined]
    try:
        worker.apply([Gradient(bags=bags, values=torch.ones(len(ids), 1))], position=Position(batches=batch))
    finally:
        for link in others:
            link.begin = link.real  # type: ignore[attr-defined]


class Silent:
    """An exchange that never reaches its server."""

    def send(self) -> None: ...

    def finish(self) -> Frame:
        return decode(encode(call=0, request=1, text="{}"))


def test_a_push_to_all_buckets_leaves_one_position_and_others_are_kept_by_range() -> None:
    progress = BucketProgress()
    progress.advance(at(5), None)
    assert described(progress) == [(5, ((0, 4096),))]
    progress.put([BucketsAt(position=at(3), ranges=((10, 20),)), BucketsAt(position=at(4), ranges=((20, 30),))])
    assert described(progress) == [(5, ((0, 10), (30, 4096))), (3, ((10, 20),)), (4, ((20, 30),))]
    progress.advance(at(4), mask(10, 20))
    assert described(progress) == [(5, ((0, 10), (30, 4096))), (4, ((10, 30),))]
    progress.advance(at(6), None)
    assert described(progress) == [(6, ((0, 4096),))]


def test_only_buckets_that_an_earlier_epoch_has_given_a_batch_have_had_it() -> None:
    progress = BucketProgress()
    progress.advance(at(5), None)
    progress.put([BucketsAt(position=at(3), ranges=((10, 20),))])
    assert progress.had(Position(batches=5), epoch=1) is None
    assert progress.had(Position(batches=6), epoch=2) is None
    had = progress.had(Position(batches=4), epoch=2)
    assert had is not None
    assert had.tolist() == (~mask(10, 20)).tolist()


def test_buckets_that_come_without_a_position_have_had_no_batch() -> None:
    progress = BucketProgress()
    progress.advance(at(5), None)
    progress.put([], mask(0, 100))
    assert described(progress) == [(5, ((100, 4096),))]
    had = progress.had(Position(batches=1), epoch=2)
    assert had is not None
    assert not had[:100].any()


@pytest.mark.parametrize("bags", [BAGS, PAIRS], ids=["single", "mean"])
def test_a_successor_gives_a_batch_to_the_buckets_that_lack_it_wherever_they_are_now(bags: Bags) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(ParameterServer(ServerConfig(move_piece_bytes=512))) for _ in range(3)]
        with opened(servers[:2], 1) as first:
            push(first, 1)
            # The worker dies in its second batch, which only one server has had.
            push_to(servers[0], first, 2)
        with ServerStore([one.address for one in servers[:2]]) as mover:
            # Now both kinds of buckets are on the same servers.
            mover.rebalance([servers[1].address, servers[2].address])
        with opened(servers[1:], 2) as second:
            assert {position.batches for position in second.positions()[0]} == {1, 2}
            assert set(counts(second)) == {1.0, 2.0}
            push(second, 2, bags)
            assert set(counts(second)) == {2.0}
            push(second, 3)
            assert {position.batches for position in second.positions()[0]} == {3}
            assert set(counts(second)) == {3.0}


def test_a_push_that_does_not_know_of_a_gain_says_nothing_about_the_gained_buckets() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(ParameterServer()) for _ in range(2)]
        with opened(servers, 1) as worker:
            push(worker, 1)
            stale = worker._routes.current
            with ServerStore([one.address for one in servers]) as mover:
                mover.rebalance([servers[0].address])
            # The worker still believes that the other server has half of the buckets, and dies before it hears otherwise.
            worker._routes.current = stale
            push_to(servers[0], worker, 2)
        with opened(servers[:1], 2) as second:
            assert {position.batches for position in second.positions()[0]} == {1, 2}
            push(second, 2)
            assert set(counts(second)) == {2.0}


def test_buckets_that_are_kept_after_all_have_the_positions_they_had() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(ParameterServer()) for _ in range(2)]
        state, owned = servers[0]._dispatcher._state, servers[0]._dispatcher._owned
        with opened(servers[:1], 1) as worker:
            push(worker, 1)
            text = progress_text(state.pushes, buckets=mask(0, 2048))
            owned.begin_giving(destination="10.0.0.9:1", server=5, durable=False, buckets=(0, 2048), positions=text)
            # In transit, they are still reported, and a push that others get is not theirs.
            assert [one.batches for one in worker.positions()[0]] == [1, 1]
            state.pushes.records()["w"].buckets.advance(at(2), None)
            assert sorted(one.batches for one in worker.positions()[0]) == [1, 2]
            keep_transfer(state, owned)
            assert [one.batches for one in worker.positions()[0]] == [2, 1]


def test_a_position_waits_for_buckets_that_arrive_between_two_questions() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(ParameterServer()) for _ in range(2)]
        with opened(servers[:1], 1) as worker, ServerStore([servers[0].address]) as mover:
            push(worker, 1)
            asked, real = threading.Event(), worker._joined

            def joined() -> list[Joined]:
                found = real()
                if not asked.is_set():
                    asked.set()
                    mover.rebalance([servers[1].address])
                    found = [one.model_copy(update={"ranges": (), "tables": ()}) for one in found]
                return found

            worker._joined = joined  # type: ignore[method-assign]
            assert {position.batches for position in worker.positions()[0]} == {1}


def test_dense_parameters_have_positions_of_their_own_that_move_with_them() -> None:
    zeros = {name: torch.zeros(4) for name in ("a", "b", "c")}
    with ExitStack() as stack:
        servers = [stack.enter_context(ParameterServer()) for _ in range(2)]
        with opened(servers, 1) as first:
            origin = ServerParameters(first, zeros, SGD)
            origin.apply(dict.fromkeys(zeros, torch.ones(4)), position=Position(batches=1))
            # Without a gradient, and still it has had the batch.
            origin.apply({"a": torch.ones(4), "b": torch.ones(4)}, position=Position(batches=2))
            assert {position.batches for position in first.positions()[1]} == {2}
            # The worker dies when one of the servers has had its third batch.
            held = servers[0]._dispatcher._state.dense.declared()
            ServerParameters(first, {name: zeros[name] for name in held}, SGD).apply(
                dict.fromkeys(held, torch.ones(4)), position=Position(batches=3)
            )
            first.rebalance([servers[1].address])
        with opened(servers[1:], 2) as second:
            assert {position.batches for position in second.positions()[1]} == {2, 3}
            origin = ServerParameters(second, zeros, SGD)
            origin.apply(dict.fromkeys(zeros, torch.ones(4)), position=Position(batches=3))
            expected = {"a": -3.0, "b": -3.0, "c": -2.0}
            assert {name: value[0].item() for name, value in origin.read().items()} == expected


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_checkpoint_of_servers_at_different_batches_is_resumed_exactly_on_any_number_of_servers(
    tmp_path: Path, count: int
) -> None:
    with ExitStack() as stack:
        config = [ServerConfig(folder=tmp_path / "ps" / str(number)) for number in range(2)]
        servers = [stack.enter_context(ParameterServer(one)) for one in config]
        with opened(servers, 1) as first:
            origin = ServerParameters(first, {"d": torch.zeros(1)}, SGD)
            origin.apply({"d": torch.ones(1)}, position=Position(batches=1))
            push(first, 1)
            push_to(servers[0], first, 2)
            first.save(tmp_path / "model.ckpt-1")
    with ExitStack() as stack:
        config = [
            ServerConfig(folder=tmp_path / "other" / str(number), restore_roots=(str(tmp_path),))
            for number in range(count)
        ]
        servers = [stack.enter_context(ParameterServer(one)) for one in config]
        with opened(servers, 2) as second:
            origin = ServerParameters(second, {"d": torch.zeros(1)}, SGD)
            second.restore(tmp_path / "model.ckpt-1")
            assert min(position.batches for position in second.positions()[0]) == 1
            assert set(counts(second)) == {1.0, 2.0}
            for batch in (1, 2):
                origin.apply({"d": torch.ones(1)}, position=Position(batches=batch))
                push(second, batch)
            assert set(counts(second)) == {2.0}
            assert origin.read()["d"].item() == -2.0
