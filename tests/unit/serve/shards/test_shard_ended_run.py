"""Danger: a shard or a front end that does not hear its run while it ends stays without its last changes, and the shards of one
model differ; or one follows another run than that of its export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest
import torch

from followed_run import HEADS, PROBE, Run
from followed_tables import rows_of, until
from monolith.follow.run_service import run_identity
from monolith.nn import dense_state_dict
from monolith.serve import export_model, load
from monolith.serve.follow import RunWriters
from monolith.serve.manifest import RunOrigin
from monolith.serve.shards.following import FrontEndFollower, ShardFollower
from monolith.serve.shards.shard_group import ShardGroup
from monolith.serve.shards.shard_server import load_shard


class NoLag:
    """Shards that say nothing of how far they are."""

    def lag(self) -> None:
        return None


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    one = Run(tmp_path / "run", batches=20).start()
    try:
        yield one
    finally:
        one.finish()


def test_shards_and_a_front_end_have_what_an_ended_run_has_saved(run: Run, tmp_path: Path) -> None:
    run.steps(3)
    export = export_model(run.model, PROBE, tmp_path / "export", heads=HEADS)
    run.finish()
    writers = RunWriters(str(run.folder))
    trained = run.estimator.trainer.tables()
    with ExitStack() as stack:
        shards = [load_shard(export, number, 2) for number in range(2)]
        for shard in shards:
            stack.callback(ShardFollower(shard, writers, silent_secs=0.05).close)
        predictor = load(export)
        group = cast(ShardGroup, NoLag())
        front_end = FrontEndFollower(predictor, writers, group, silent_secs=0.05)
        stack.callback(front_end.close)

        def rows(name: str) -> dict[int, tuple[float, ...]]:
            tables = [table for shard in shards for one in shard.collections for table in one.all()]
            return {id_: row for table in tables if table.name == name for id_, row in rows_of(table).items()}

        for name, copies in trained.items():
            until(lambda name=name, copies=copies: rows(name) == rows_of(copies[0]), name)  # type: ignore[misc]
        weights = {name: value for name, value in dense_state_dict(run.model).items() if name in predictor.weights}
        assert len(weights) >= 5
        until(lambda: all(torch.equal(predictor.weights[name], value) for name, value in weights.items()), "weights")
        assert front_end.lag().step == run.estimator.trainer.step


def test_another_run_than_that_of_the_export_is_refused(run: Run, tmp_path: Path) -> None:
    run.steps(3)
    other = RunOrigin(identity="f" * 32, model_dir=str(run.folder))
    export = export_model(run.model, PROBE, tmp_path / "export", heads=HEADS, run=other)
    identity = run_identity(str(run.folder))
    writers = RunWriters(str(run.folder))
    with ExitStack() as stack:
        shard = ShardFollower(load_shard(export), writers)
        stack.callback(shard.close)
        front_end = FrontEndFollower(load(export), writers, cast(ShardGroup, NoLag()))
        stack.callback(front_end.close)
        for follower in (shard, front_end):
            until(lambda follower=follower: identity in str(follower.describe()), "the refusal")  # type: ignore[misc]
            assert follower.lag().sequence == 0
