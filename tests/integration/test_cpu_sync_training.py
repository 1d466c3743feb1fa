"""Danger: tasks of the original's `cpu_sync_training_test` do not train over ranks, or train something else.

Each number of ranks is one launch of tests/sync_training_job.py, which makes all cases.
"""

from __future__ import annotations

from typing import Any

import pytest

import sync_training_job
from rank_processes import torchrun

LABELS = [[1.0, 0.0, 1.0, 0.5], [2.0, 1.0, 2.0, 1.5]]
FLOATS = [0.5, 1.0, 1.5, 2.0]


@pytest.fixture(scope="module", params=[1, 2, pytest.param(4, marks=pytest.mark.slow)])
def cases(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = torchrun(request.param, job=sync_training_job.__file__)
    assert len(found) == request.param
    return found


@pytest.mark.parametrize("task", ["ragged", "float", "sequence", "non_feature"])
def test_every_kind_of_task_trains_and_all_ranks_see_the_same_loss(cases: list[dict[str, Any]], task: str) -> None:
    assert [one[task]["steps"] for one in cases] == [2] * len(cases)
    assert all(one[task]["losses"] == cases[0][task]["losses"] for one in cases)
    if task != "non_feature":
        # Rows begin with zeros, so that the first loss is known. The second batch would have another one without training.
        begin = FLOATS if task == "float" else [0.0] * 4
        first, untrained = (sum((a - b) ** 2 for a, b in zip(begin, labels, strict=True)) / 4 for labels in LABELS)
        assert cases[0][task]["losses"][0] == pytest.approx(first)
        assert cases[0][task]["losses"][1] != pytest.approx(untrained)


def test_rows_of_a_hash_table_are_trained_as_those_of_a_dense_table(cases: list[dict[str, Any]]) -> None:
    for one in cases:
        assert one["equivalent"]["steps"] == 10
        # Equal up to the last bit of float32: the two add the gradients of an id in different orders.
        assert one["equivalent"]["difference"] < 1e-6


@pytest.mark.parametrize("steps", [2, 4])
def test_pipelines_miss_exactly_one_update(cases: list[dict[str, Any]], steps: int) -> None:
    plain, *pipelined = (cases[0][f"{steps} steps, {number}"] for number in range(len(sync_training_job.PIPELINES)))
    assert plain["steps"] == steps
    late = pipelined[0]["losses"]
    assert late[0] == plain["losses"][0]
    assert late[1] != plain["losses"][1], "the second lookup does not see the first update"
    for one in pipelined:
        assert one["steps"] == steps
        assert one["losses"] == pytest.approx(late, rel=1e-5), "whatever the pipeline, a lookup misses one update"
    assert all(one[f"{steps} steps, 7"]["losses"] == cases[0][f"{steps} steps, 7"]["losses"] for one in cases)
