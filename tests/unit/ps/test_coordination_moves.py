"""Danger: a run that needs its first server: it hangs without it, forgets who has finished, or follows two at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from counting_model import COUNTED
from monolith.cluster.coordination import Members
from monolith.errors import FencedError, OwnershipChangedError, UnavailableError
from monolith.ps import ClientConfig, ParameterServer, ServerConfig, ServerStore, tables_of
from monolith.ps.client.coordination_client import CoordinationClient
from monolith.ps.client.server_group import link_to
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.messages import Greet
from monolith.table.store import Position
from monolith.transport.frames import decode, encode

FOREVER = 1000.0
"""A lease after which a test has long failed."""


@contextmanager
def servers(folder: Path | None, *numbers: int) -> Iterator[list[ParameterServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(server(folder, number)) for number in numbers]


def server(folder: Path | None, number: int, *, take_over: bool = False) -> ParameterServer:
    place = None if folder is None else folder / str(number)
    return ParameterServer(
        ServerConfig(folder=place, log_flush_secs=None if folder is None else 0.0, take_over=take_over)
    )


def addresses(of: Sequence[ParameterServer]) -> list[str]:
    return [one.address for one in of]


def member(at: Sequence[str], index: int, *, epoch: int = 1, find: Sequence[str] | None = None) -> CoordinationClient:
    look = None if find is None else lambda: find
    return CoordinationClient(at, index=index, epoch=epoch, lease=FOREVER, config=ClientConfig(timeout=20.0), find=look)


def store(at: Sequence[str], worker: str = "w0") -> ServerStore:
    return ServerStore(at, tables_of(COUNTED), config=ClientConfig(worker=worker, epoch=1, timeout=20.0))


def phases(found: Members) -> dict[int, str]:
    return {one.index: one.phase for one in found.members}


@pytest.mark.parametrize("durable", [True, False])
def test_the_first_server_is_drained_like_any_other(tmp_path: Path, durable: bool) -> None:
    with (
        servers(tmp_path if durable else None, 0, 1) as (first, second),
        store([first.address, second.address]) as rows,
    ):
        at = addresses([first, second])
        with member(at, 0) as chief, member(at, 1) as worker:
            with member(at, 2) as gone:
                gone.enter("finished")
            worker.enter("running")
            rows.count_from(40)
            rows.apply([], position=Position(batches=2))
            _, barrier = chief.place_barrier("Save")
            rows.rebalance([second.address])
            assert worker.hold(barrier.number)
            found = chief.members()
            assert phases(found) == {0: "joined", 1: "running", 2: "finished"}
            assert [one.held for one in found.members] == [False, True, False]
            assert (found.step, found.barrier) == (42, barrier)
            first.close()
            chief.remove_barrier()
            assert not worker.hold(barrier.number)
            rows.apply([], position=Position(batches=3))
            assert worker.newest().step == 43


def test_a_report_under_way_while_the_first_bucket_moves_costs_nothing() -> None:
    with (
        servers(None, 0, 1) as (first, second),
        store([first.address, second.address]) as rows,
        member([first.address, second.address], 1) as worker,
    ):
        worker.report()
        rows.rebalance([second.address])
        worker.report()
        assert worker.report().barrier is None


def test_who_comes_later_finds_the_server_that_coordinates_now(tmp_path: Path) -> None:
    with (
        servers(tmp_path, 0, 1, 2) as (first, second, third),
        store([first.address, second.address]) as rows,
        member([first.address, second.address], 0) as chief,
    ):
        rows.rebalance([third.address])
        # The third one is in no list of the worker: the others say that they have given it something.
        with member([first.address, second.address], 1):
            assert set(phases(chief.members())) == {0, 1}


def test_the_first_server_may_come_back_elsewhere(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(server(tmp_path, number)) for number in (0, 1))
        at = addresses([first, second])
        announced = list(at)
        stack.enter_context(store(at))
        chief, worker = (stack.enter_context(member(at, index, find=announced)) for index in (0, 1))
        worker.enter("running")
        with member(at, 2) as gone:
            gone.enter("finished")
        first.close()
        again = stack.enter_context(server(tmp_path, 0))
        announced[0] = again.address
        assert again.address != at[0]
        assert phases(chief.members()) == {0: "joined", 1: "running", 2: "finished"}
        assert worker.newest().barrier is None


def test_a_server_that_hung_and_was_replaced_does_not_answer_for_the_run(tmp_path: Path) -> None:
    with servers(tmp_path, 0) as (hung,), store([hung.address]), server(tmp_path, 0, take_over=True) as successor:
        config = ClientConfig(timeout=2.0)
        link = link_to(hung.address, config)
        try:
            greet = Greet(index=1, epoch=1, lease=FOREVER, phase="finished").model_dump_json()
            for call in (Call.GREET, Call.MEMBERS, Call.REMOVE_BARRIER):
                with pytest.raises(UnavailableError, match="another process has taken"):
                    link.call(call, greet)
        finally:
            link.close()
        with member([hung.address], 1, find=[successor.address]) as worker:
            assert phases(worker.members()) == {1: "joined"}


def test_what_the_successor_has_not_read_is_not_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server hangs after it has looked whether the folder is its own, and writes when it goes on."""
    with servers(tmp_path, 0) as (hung,), store([hung.address]), ExitStack() as later:
        dispatcher = hung._dispatcher
        common = dispatcher._state.coordination
        write = common.keep

        def hang(text: str) -> None:
            successor = later.enter_context(server(tmp_path, 0, take_over=True))
            with member([successor.address], 2) as other:
                other.enter("finished")
            write(text)

        monkeypatch.setattr(common, "keep", hang)
        greet = Greet(index=1, epoch=1, lease=FOREVER, phase="finished").model_dump_json()
        with pytest.raises(FencedError):
            dispatcher._called(decode(encode(call=Call.GREET, request=1, text=greet)))
    with servers(tmp_path, 0) as (third,), member([third.address], 0) as chief:
        # What the successor has acknowledged was not overwritten.
        assert phases(chief.members()) == {0: "joined", 2: "finished"}


def test_only_the_owner_of_the_first_bucket_answers_for_the_run() -> None:
    with servers(None, 0, 1) as (first, second), store([first.address, second.address]):
        link = link_to(second.address, ClientConfig())
        try:
            with pytest.raises(OwnershipChangedError, match="another server owns the first bucket"):
                link.call(Call.MEMBERS)
        finally:
            link.close()


def test_a_barrier_holds_across_a_restart_of_the_server(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(server(tmp_path, 0))
        announced = [first.address]
        stack.enter_context(store(announced))
        chief, worker = (stack.enter_context(member([first.address], index, find=announced)) for index in (0, 1))
        _, barrier = chief.place_barrier("Save")
        first.close()
        announced[:] = [stack.enter_context(server(tmp_path, 0)).address]
        assert worker.hold(barrier.number)
        chief.remove_barrier()
        assert not worker.hold(barrier.number)
