"""Danger: an id that leaves the set before its row is durable is an update that serving and restore never see."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from monolith.errors import InvalidArgumentError
from monolith.table.touched import ChangedIdSet

IDS = st.integers(min_value=-5, max_value=5) | st.integers(min_value=-(2**63), max_value=2**63 - 1)


class TwoPlainSets(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.changed = ChangedIdSet()
        self.waiting: set[int] = set()
        self.flight: set[int] | None = None

    @rule(ids=st.lists(IDS, max_size=40))
    def insert(self, ids: list[int]) -> None:
        self.changed.insert(torch.tensor(ids, dtype=torch.int64))
        self.waiting |= set(ids)

    @precondition(lambda self: self.flight is None)
    @rule()
    def steal(self) -> None:
        assert sorted(self.changed.steal().tolist()) == sorted(self.waiting)
        self.flight, self.waiting = self.waiting, set()

    @precondition(lambda self: self.flight is not None)
    @rule()
    def commit(self) -> None:
        self.changed.commit()
        self.flight = None

    @precondition(lambda self: self.flight is not None)
    @rule()
    def rollback(self) -> None:
        assert self.flight is not None
        self.changed.rollback()
        self.waiting |= self.flight
        self.flight = None

    @precondition(lambda self: self.flight is not None)
    @rule()
    def steal_again(self) -> None:
        with pytest.raises(InvalidArgumentError, match=r"call commit\(\) or rollback\(\) first"):
            self.changed.steal()

    @precondition(lambda self: self.flight is None)
    @rule()
    def end_nothing(self) -> None:
        with pytest.raises(InvalidArgumentError, match="nothing in flight"):
            self.changed.commit()
        with pytest.raises(InvalidArgumentError, match="nothing in flight"):
            self.changed.rollback()

    @invariant()
    def sizes_agree(self) -> None:
        assert len(self.changed) == len(self.waiting)
        assert self.changed.in_flight == len(self.flight or ())


TestAgainstTwoPlainSets = TwoPlainSets.TestCase
TestAgainstTwoPlainSets.settings = settings(max_examples=60, stateful_step_count=30)


def test_it_never_drops() -> None:
    changed = ChangedIdSet()
    ids = torch.arange(500_000) * 7919 - 10**9
    changed.insert(ids.reshape(500, 1000))
    assert len(changed) == ids.numel()
    assert torch.equal(changed.steal().sort().values, ids)


def test_what_was_stolen_is_the_callers_to_change() -> None:
    changed = ChangedIdSet()
    changed.insert([1, 2])
    changed.steal().zero_()
    changed.rollback()
    assert sorted(changed.steal().tolist()) == [1, 2]
