"""Danger: a server with a memory limit takes more than that, in rows or in anything else, or refuses half of a push."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from monolith import Segment, TableConfig
from monolith.errors import MemoryLimitError, MonolithError, UnavailableError
from monolith.ps import ClientConfig, ParameterServer, ServerConfig, ServerStore
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.messages import Apply, DeclaredTable, Join, Push, TableGradient
from monolith.ps.server.memory_limit import MemoryLimit
from monolith.ps.server.served_tables import ServedTables
from monolith.table import Bags, Gradient
from monolith.table.store import Position
from moving_buckets import wait_for

TABLES = [TableConfig(name=name, segments=(Segment(dim=dim),)) for name, dim in (("a", 8), ("b", 64), ("c", 16))]
QUICK = ClientConfig(timeout=2.0)


@contextmanager
def limited(limit: int) -> Iterator[tuple[ParameterServer, MemoryLimit]]:
    with ParameterServer(ServerConfig(memory_limit=limit)) as server:
        yield server, server._dispatcher._state.memory


def push(store: ServerStore, ids: np.ndarray, position: Position | None = None) -> None:
    bags = [Bags(table=table.name, ids=ids, offsets=np.arange(len(ids) + 1)) for table in TABLES]
    gradients = [Gradient(bags=b, values=torch.ones(len(ids), t.dim)) for b, t in zip(bags, TABLES, strict=True)]
    store.apply(gradients, position=position)


def until_refused(action: Callable[[int], object], what: str) -> int:
    """Call `action` with 0, 1, 2, ... until there is no room for it. Returns how often there was."""
    done = 0

    def go_on() -> None:
        nonlocal done
        while done < 100_000:
            action(done)
            done += 1

    with pytest.raises(MemoryLimitError, match=f"{what}.*raise --memory-limit"):
        go_on()
    return done


def rows(store: ServerStore) -> dict[str, int]:
    return {name: stats.rows for name, stats in store.stats().items()}


@pytest.mark.parametrize("limit", [500_000, 1_100_000, 2_500_000, 9_000_000, 30_000_000])
def test_a_push_that_does_not_fit_changes_no_table_and_the_limit_is_never_exceeded(limit: int) -> None:
    with limited(limit) as (server, memory), ServerStore([server.address], TABLES) as store:

        def push_more(number: int) -> None:
            push(store, np.arange(1500 * number, 1500 * number + 1500))
            assert memory.used <= limit

        pushes = until_refused(push_more, "tables")
        assert rows(store) == dict.fromkeys("abc", 1500 * pushes)
        assert memory.used <= limit


def test_a_push_for_which_the_system_has_no_memory_changes_no_table() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        outcome = "nothing"
        try:
            outcome = rows_at_the_limit_of_the_process()
        finally:
            os.write(writer, outcome.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "MemoryLimitError {1}"
    os.waitpid(child, 0)


def rows_at_the_limit_of_the_process() -> str:
    tables = ServedTables()
    tables.declare([DeclaredTable(config=table) for table in TABLES])
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 2**28
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    pushed, size = 0, 20_000
    try:
        while pushed < 100:
            ids = np.arange(pushed * size, pushed * size + size)
            arrays = [array for table in TABLES for array in (ids, np.ones((size, table.dim), np.float32))]
            gradients = tuple(TableGradient(table=table.name, pooling="none") for table in TABLES)
            tables.apply(Apply(push=Push(worker="w", epoch=1, sequence=1), tables=gradients), arrays)
            pushed += 1
    except Exception as error:
        held = {stats.rows / max(1, pushed * size) for stats in tables.stats().values()}
        return f"{type(error).__name__} {{{', '.join(f'{one:g}' for one in held)}}}"
    return "never refused"


def test_positions_of_workers_count() -> None:
    with limited(3_000_000) as (server, memory):

        def push_far(number: int) -> None:
            with ServerStore([server.address], TABLES, config=ClientConfig(worker=f"w{number}")) as store:
                store.apply([], position=Position(batches=1, state="x" * 2**18))

        assert until_refused(push_far, "workers") * 2**18 <= memory.used <= 3_000_000


def test_a_state_of_a_source_has_a_limit_of_its_own() -> None:
    with pytest.raises(MonolithError, match="1048576"):
        Position(batches=1, state="x" * (2**20 + 1))


def test_names_of_workers_count() -> None:
    with limited(400_000) as (server, memory), ServerStore([server.address]) as store:

        def join(number: int, epoch: int = 1) -> None:
            store.links[0].call(Call.JOIN, Join(worker=f"w{number}", epoch=epoch, nonce=1).model_dump_json())

        until_refused(join, "workers")
        assert memory.used <= 400_000
        # Whoever is known may go on.
        join(0, epoch=2)


def test_tables_without_a_row_count() -> None:
    with limited(1_000_000) as (server, memory), ServerStore([server.address]) as store:
        until_refused(lambda n: store.declare([TableConfig(name=f"t{n}", segments=(Segment(dim=4),))]), "tables")
        assert memory.used <= 1_000_000


def test_keys_of_coordination_count() -> None:
    with limited(1_000_000) as (server, memory):
        common = server._dispatcher._state.coordination
        until_refused(lambda number: common.set_key(f"k{number}", "x" * 60_000), "coordination")
        assert memory.used <= 1_000_000


def test_requests_beyond_the_memory_for_frames_wait_and_health_checks_do_not() -> None:
    with limited(64_000_000) as (server, memory), ServerStore([server.address], TABLES, config=QUICK) as store:
        push(store, np.arange(2000))
        # A client has its answer a moment before the server is done with it.
        wait_for(lambda: memory.frames.in_use == 0)
        assert memory.frames.take(63_000_000)
        with pytest.raises(UnavailableError, match="bytes are in memory, no memory for 752,"):
            push(store, np.arange(2000))
        # A small question with a large answer.
        with pytest.raises(UnavailableError, match="none is left for one"):
            store.lookup([Bags(table="b", ids=np.arange(200), offsets=np.arange(201))])
        assert store.health()[0]["tables"] == 3
        memory.frames.give_back(63_000_000)
        push(store, np.arange(2000))
        wait_for(lambda: memory.frames.in_use == 0)


def test_a_frame_that_is_alone_is_taken_even_if_rows_have_all_the_memory() -> None:
    memory = MemoryLimit(1_000_000)
    memory.count("tables", lambda: 1_000_000)
    assert memory.frames.take(500_000)
    assert not memory.frames.take(500_000)
    assert memory.frames.take(1000)
    memory.frames.give_back(501_000)
    assert memory.frames.take(30_000)
    assert memory.frames.take(30_000)
