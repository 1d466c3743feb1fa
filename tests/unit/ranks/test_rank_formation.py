"""Danger: a run of the wrong processes: two with one rank, one that was replaced, or ranks that expect different things."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from torch.distributed import HashStore

from mesh_ranks import LIMITS, as_threads, in_folder
from monolith.errors import FencedError, MonolithError, RankLostError, RanksDisagreeError
from monolith.ranks import Kind, MeshConfig, RankMember, SocketMesh, StoreRendezvous, form_mesh, leader
from monolith.ranks.messages import JoinCall, RankJoin, receive_message, send_message
from monolith.ranks.peers import dial
from real_servers import until

CONFIG = MeshConfig(**LIMITS)
IMPATIENT = MeshConfig(**{**LIMITS, "formation_secs": 0.5})


def closed(mesh: SocketMesh) -> SocketMesh:
    """Close the mesh of a rank that only had to be formed, after all ranks were."""
    mesh.exchange(Kind.WORD, [[]] * mesh.size)
    mesh.close()
    return mesh


def failures(results: list[SocketMesh | BaseException]) -> list[BaseException]:
    assert all(isinstance(result, MonolithError) for result in results), results
    return [result for result in results if isinstance(result, BaseException)]


def test_each_formation_has_a_larger_generation(tmp_path: Path) -> None:
    after = 0
    for _ in range(3):
        meshes = as_threads(
            [
                lambda rank=rank, after=after: closed(
                    form_mesh(rank, 2, in_folder(tmp_path), config=CONFIG, after=after if rank else 0)
                )
                for rank in range(2)
            ]
        )
        generations = {mesh.generation for mesh in meshes if isinstance(mesh, SocketMesh)}
        assert len(generations) == 1
        (generation,) = generations
        assert generation > after
        # A clock that was far ahead, as another machine's may be that led before.
        after = generation + 10**9


def test_ranks_find_each_other_through_a_store_of_torch() -> None:
    store = HashStore()
    meshes = as_threads(
        [
            lambda rank=rank: closed(form_mesh(rank, 3, StoreRendezvous(store, job="ads"), config=CONFIG))
            for rank in range(3)
        ]
    )
    assert [mesh.rank for mesh in meshes if isinstance(mesh, SocketMesh)] == [0, 1, 2]


def test_an_address_of_a_leader_that_died_is_not_final(tmp_path: Path) -> None:
    rendezvous = in_folder(tmp_path)
    rendezvous.announce("127.0.0.1:1")

    def late() -> SocketMesh:
        time.sleep(0.3)
        return closed(form_mesh(0, 2, rendezvous, config=CONFIG))

    meshes = as_threads([late, lambda: closed(form_mesh(1, 2, rendezvous, config=CONFIG))])
    assert all(isinstance(mesh, SocketMesh) for mesh in meshes), meshes


def test_ranks_that_expect_another_size_are_named(tmp_path: Path) -> None:
    results = failures(
        as_threads(
            [
                lambda: form_mesh(0, 3, in_folder(tmp_path), config=CONFIG),
                lambda: form_mesh(1, 3, in_folder(tmp_path), config=IMPATIENT),
                lambda: form_mesh(2, 4, in_folder(tmp_path), config=CONFIG),
            ]
        )
    )
    for error in (results[0], results[2]):
        assert isinstance(error, RanksDisagreeError)
        assert "rank 2 expects 4 ranks, rank 0 expects 3" in str(error)


def test_two_processes_with_one_rank_are_both_named(tmp_path: Path) -> None:
    results = failures(
        as_threads(
            [
                lambda: form_mesh(0, 3, in_folder(tmp_path), config=CONFIG),
                lambda: form_mesh(1, 3, in_folder(tmp_path), config=CONFIG, incarnation=7),
                lambda: form_mesh(1, 3, in_folder(tmp_path), config=CONFIG, incarnation=8),
            ]
        )
    )
    for error in results:
        assert isinstance(error, RanksDisagreeError)
        assert "two processes are rank 1: process " in str(error)
        assert str(error).count("(127.0.0.1:") == 2


def test_a_process_that_joins_a_run_with_its_rank_taken_is_refused(tmp_path: Path) -> None:
    meshes = as_threads(
        [lambda r=r: form_mesh(r, 2, in_folder(tmp_path), config=CONFIG, incarnation=5) for r in (0, 1)]
    )
    try:
        with pytest.raises(FencedError, match=r"rank 1 was given to process"):
            form_mesh(1, 2, in_folder(tmp_path), config=CONFIG, incarnation=4)
        with pytest.raises(RanksDisagreeError, match=r"two processes are rank 1"):
            form_mesh(1, 2, in_folder(tmp_path), config=CONFIG, incarnation=6)
        assert isinstance(meshes[0], SocketMesh)
        assert meshes[0].newcomers() == []
        # The run itself has not noticed.
        as_threads([lambda mesh=mesh: mesh.exchange(Kind.IDS, [[], []]) for mesh in meshes])
    finally:
        for mesh in meshes:
            mesh.close()


def test_a_second_leader_is_refused_while_the_first_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "LEADER_SECONDS", 0.2)
    meshes = as_threads([lambda r=r: form_mesh(r, 2, in_folder(tmp_path), config=CONFIG) for r in (0, 1)])
    try:
        with pytest.raises(FencedError, match=r"two processes are rank 0: .* leads the run already"):
            form_mesh(0, 2, in_folder(tmp_path), config=CONFIG, incarnation=3)
    finally:
        for mesh in meshes:
            mesh.close()


def test_a_rank_that_comes_late_waits_and_is_seen(tmp_path: Path) -> None:
    def lead() -> tuple[int, list[int], int]:
        mesh = form_mesh(0, 3, in_folder(tmp_path), config=CONFIG, min_ranks=2, replacement_secs=0.0)
        until(lambda: mesh.newcomers() == [2], seconds=20)
        found = mesh.newcomers()
        mesh.exchange(Kind.STATE, [[]] * mesh.size)
        size = mesh.size
        mesh.close()
        return size, found, closed(form_mesh(0, 3, in_folder(tmp_path), config=CONFIG, after=mesh.generation)).size

    def follow() -> int:
        mesh = form_mesh(1, 3, in_folder(tmp_path), config=CONFIG)
        mesh.exchange(Kind.STATE, [[]] * mesh.size)
        mesh.close()
        return closed(form_mesh(1, 3, in_folder(tmp_path), config=CONFIG, after=mesh.generation)).size

    def late() -> int:
        until(lambda: in_folder(tmp_path).find() is not None, seconds=20)
        time.sleep(1.0)
        return closed(form_mesh(2, 3, in_folder(tmp_path), config=CONFIG)).size

    assert as_threads([lead, follow, late]) == [(2, [2], 3), 3, 3]


def test_ranks_of_fewer_processes_have_no_gaps(tmp_path: Path) -> None:
    meshes = as_threads(
        [
            lambda rank=rank: closed(
                form_mesh(rank, 4, in_folder(tmp_path), config=CONFIG, min_ranks=3, replacement_secs=1.0)
            )
            for rank in (0, 1, 3)
        ]
    )
    found = [(mesh.rank, mesh.size, mesh.members[mesh.rank].rank) for mesh in meshes if isinstance(mesh, SocketMesh)]
    assert found == [(0, 3, 0), (1, 3, 1), (2, 3, 3)]


def test_waiting_for_others_ends_and_names_them(tmp_path: Path) -> None:
    with pytest.raises(RankLostError, match=r"ranks 1, 2 of 3 did not join rank 0") as error:
        form_mesh(0, 3, in_folder(tmp_path), config=IMPATIENT)
    assert error.value.rank == 1
    with pytest.raises(
        RankLostError, match=r"rank 2 could not join within 0 s: rank 0 does not answer.*only its own machine"
    ):
        form_mesh(2, 3, in_folder(tmp_path), config=IMPATIENT)


def test_a_survivor_that_joins_again_gives_way_to_no_stale_process(tmp_path: Path) -> None:
    # Rank 1 was stopped, replaced by another process in generation 20, and wakes up with generation 10.
    results = as_threads(
        [
            lambda: closed(form_mesh(0, 3, in_folder(tmp_path), config=CONFIG, after=20)),
            lambda: form_mesh(1, 3, in_folder(tmp_path), config=CONFIG, after=10, incarnation=1),
            lambda: closed(form_mesh(1, 3, in_folder(tmp_path), config=CONFIG, after=20, incarnation=2)),
            lambda: time.sleep(2.0) or closed(form_mesh(2, 3, in_folder(tmp_path), config=CONFIG, after=20)),  # type: ignore[func-returns-value]
        ]
    )
    assert isinstance(results[1], FencedError), results
    assert [type(results[number]) for number in (0, 2, 3)] == [SocketMesh] * 3
    assert np.unique([mesh.generation for mesh in results if isinstance(mesh, SocketMesh)]).size == 1


def test_a_rank_that_dies_while_the_run_is_formed_is_named_without_a_time_limit(tmp_path: Path) -> None:
    patient = MeshConfig(**{**LIMITS, "rank_timeout_secs": 3600.0})

    def dies() -> str:
        until(lambda: in_folder(tmp_path).find() is not None, seconds=20)
        address, deadline = in_folder(tmp_path).find(), time.monotonic() + 30
        assert address is not None
        connection = dial(address, patient, None, deadline=deadline)
        member = RankMember(rank=2, incarnation=1, address="127.0.0.1:1", host="there", process=77)
        send_message(connection, JoinCall.JOIN, RankJoin(member=member, size=3, after=0), deadline=deadline)
        assert receive_message(connection, deadline=deadline).call == JoinCall.FORMED
        connection.close()
        return "died"

    leads, follows, died = as_threads(
        [
            lambda: form_mesh(0, 3, in_folder(tmp_path), config=patient),
            lambda: form_mesh(1, 3, in_folder(tmp_path), config=patient),
            dies,
        ]
    )
    assert died == "died"
    for error in (leads, follows):
        assert isinstance(error, RankLostError)
        assert error.rank == 2
        assert "process 77 of there" in str(error)
