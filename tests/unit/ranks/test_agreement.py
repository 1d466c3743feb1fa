"""Ranks begin steps together, and any of them may ask the others for something in between."""

from __future__ import annotations

import pytest

from monolith.errors import InvalidArgumentError, MonolithError, RankLostError, RanksDisagreeError
from monolith.ranks.agreement import Agreement
from monolith.ranks.mesh import Kind, Mesh
from monolith.testing.rank_threads import run_ranks


def test_every_rank_knows_the_rows_and_ends_of_all() -> None:
    def rank(mesh: Mesh) -> object:
        plan = Agreement(mesh).next_step(rows=mesh.rank, ended=mesh.rank == 0, last=mesh.rank == 2)
        return plan.rows, plan.ended, plan.last, plan.total_rows, plan.is_over, plan.stops

    assert run_ranks(3, rank) == [((0, 1, 2), (True, False, False), True, 3, False, {})] * 3


def test_a_wish_to_stop_reaches_all() -> None:
    def rank(mesh: Mesh) -> object:
        return Agreement(mesh).next_step(rows=1, stop="a signal" if mesh.rank == 1 else None).stops

    assert run_ranks(2, rank) == [{1: "a signal"}] * 2


def test_actions_of_two_ranks_are_done_by_all_one_after_the_other() -> None:
    def rank(mesh: Mesh) -> object:
        agreement, seen = Agreement(mesh), []
        agreement.actions["note"] = lambda what: seen.append(what) or mesh.rank
        answers = agreement.run("note", mesh.rank) if mesh.rank < 2 else None
        agreement.next_step(rows=1)
        return answers, seen

    assert run_ranks(3, rank) == [([0, 1, 2], [0, 1]), ([0, 1, 2], [0, 1]), (None, [0, 1])]


def test_a_rank_without_steps_serves_until_it_is_released() -> None:
    def rank(mesh: Mesh) -> object:
        agreement = Agreement(mesh)
        agreement.actions["where"] = lambda _: mesh.rank
        if mesh.rank == 0:
            found = agreement.run("where")
            agreement.release("end")
            return found
        agreement.serve("end")
        return None

    assert run_ranks(2, rank) == [[0, 1], None]


def test_an_error_of_an_action_reaches_the_rank_that_asked_and_only_it() -> None:
    def rank(mesh: Mesh) -> object:
        agreement = Agreement(mesh)

        def full(_: object) -> None:
            if mesh.rank == 1:
                raise InvalidArgumentError("the disk is full")

        agreement.actions["save"] = full
        if mesh.rank == 0:
            with pytest.raises(InvalidArgumentError, match="rank 1: the disk is full"):
                agreement.run("save")
        return agreement.next_step(rows=1).rows

    assert run_ranks(2, rank) == [(1, 1), (1, 1)]


def test_an_error_of_another_ranks_action_is_not_raised_by_a_rank_that_asked_for_something_else() -> None:
    def rank(mesh: Mesh) -> object:
        agreement = Agreement(mesh)

        def full(_: object) -> None:
            raise InvalidArgumentError("the disk is full")

        agreement.actions.update({"save": full, "where": lambda _: mesh.rank})
        if mesh.rank == 0:
            with pytest.raises(InvalidArgumentError, match="the disk is full"):
                agreement.run("save")
            agreement.next_step(rows=1)
            return None
        answers = agreement.run("where")
        agreement.next_step(rows=1)
        return answers

    assert run_ranks(2, rank) == [None, [0, 1]]


def test_an_action_within_an_action_is_done_by_each_rank_for_itself() -> None:
    def rank(mesh: Mesh) -> object:
        agreement, done = Agreement(mesh), []
        agreement.actions["settle"] = lambda _: done.append("settle")
        agreement.actions["save"] = lambda _: agreement.run("settle") and done.append("save")
        agreement.run("save") if mesh.rank == 1 else agreement.next_step(rows=1)
        if mesh.rank == 1:
            agreement.next_step(rows=1)
        return done

    assert run_ranks(2, rank) == [["settle", "save"]] * 2


def test_ranks_in_different_exchanges_are_named() -> None:
    def rank(mesh: Mesh) -> None:
        mesh.exchange(Kind.IDS if mesh.rank else Kind.ROWS, [[], []], step=3)

    with pytest.raises(RanksDisagreeError, match=r"rank [01] is in (ROWS|IDS) of step 3, rank [01] in"):
        run_ranks(2, rank)


def test_a_step_with_a_rank_that_has_ended_its_loop_is_refused() -> None:
    def rank(mesh: Mesh) -> None:
        agreement = Agreement(mesh)
        if mesh.rank:
            agreement.serve("end")
        agreement.next_step(rows=1)

    with pytest.raises((RanksDisagreeError, RankLostError), match=r"have ended their loop|begin a step|failed"):
        run_ranks(2, rank)


def test_an_action_within_a_step_is_refused() -> None:
    def rank(mesh: Mesh) -> None:
        agreement = Agreement(mesh)
        agreement.actions["save"] = lambda _: None
        agreement.next_step(rows=1)
        with pytest.raises(InvalidArgumentError, match="within step 1"):
            agreement.run("save")
        agreement.step_ended()
        agreement.run("save") if mesh.rank == 0 else agreement.next_step(rows=1)

    with pytest.raises(MonolithError, match="rank 0 has left"):
        run_ranks(2, rank)


def test_a_rank_that_leaves_serves_those_that_do_not_yet() -> None:
    def rank(mesh: Mesh) -> object:
        agreement = Agreement(mesh)
        agreement.actions["where"] = lambda _: mesh.rank
        found = [agreement.run("where") for _ in range(mesh.rank)]
        agreement.leave()
        return found

    assert run_ranks(3, rank) == [[], [[0, 1, 2]], [[0, 1, 2]] * 2]


def test_a_rank_does_not_leave_one_that_trains() -> None:
    def rank(mesh: Mesh) -> object:
        agreement = Agreement(mesh)
        return agreement.leave() if mesh.rank else agreement.next_step(rows=1)

    with pytest.raises(RanksDisagreeError, match="ranks"):
        run_ranks(2, rank)


def test_every_rank_knows_the_parts_of_all_and_who_was_interrupted() -> None:
    def rank(mesh: Mesh) -> object:
        plan = Agreement(mesh).next_step(rows=8, parts=mesh.rank, stop="a signal", interrupted=mesh.rank == 1)
        return plan.parts, plan.interrupted

    assert run_ranks(2, rank) == [((0, 1), True)] * 2
