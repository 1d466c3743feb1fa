"""Danger: what a lost trainer had not read is never read, or is read again from the beginning."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import pytest

from monolith.dataservice import DataDispatcher, DataServiceSource, DatasetConfig, DispatcherConfig
from monolith.dataservice.jobs import Jobs
from monolith.dataservice.journal import JobEvent
from monolith.dataservice.protocol import JoinJob, LeaveJob, NextSplit, RegisterDataset
from monolith.errors import InvalidArgumentError, StalePushError
from monolith.features import Batch

JOB = "clicks"


def dataset(folder: Path, *, sharding: str = "dynamic") -> DatasetConfig:
    for number in range(4):
        rows = "".join(f"{100 * number + row}\n" for row in range(10))
        (folder / f"{number}.csv").write_text(f"user\n{rows}")
    columns = [{"name": "user", "shape": []}]
    fields = {"columns": columns, "batch_size": 2}
    return DatasetConfig(kind="csv", paths=(f"{folder}/*.csv",), fields=fields, sharding=sharding)  # type: ignore[arg-type]


ALL = [100 * number + row for number in range(4) for row in range(10)]


def users(batch: Batch) -> list[int]:
    return batch["user"].tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("taken", [0, 1, 3, 8])
def test_others_read_on_behind_the_state_and_every_row_counts_once(tmp_path: Path, taken: int) -> None:
    with DataDispatcher(DispatcherConfig(folder=tmp_path / "dispatcher")) as dispatcher:
        source = DataServiceSource(dispatcher.address, dataset(tmp_path), data_workers=False)
        lost, other = source.shard(0, 2), source.shard(1, 2)
        batches, others = iter(lost), iter(other)
        counted = users(next(others))
        for _ in range(taken):
            counted += users(next(batches))
        state = lost.state_dict()
        # Trained, but in no checkpoint.
        next(batches)
        next(batches)
        operator = source.shard(0, 2)
        operator.load_state_dict(state)
        operator.release()
        with pytest.raises(StalePushError):
            list(batches)
        for batch in others:
            counted += users(batch)
    assert sorted(counted) == ALL


def test_a_dispatcher_that_is_started_again_knows_where_they_begin(tmp_path: Path) -> None:
    config = DispatcherConfig(folder=tmp_path / "dispatcher")
    with DataDispatcher(config) as dispatcher:
        lost = DataServiceSource(dispatcher.address, dataset(tmp_path), data_workers=False).shard(0, 2)
        batches = iter(lost)
        counted = [user for _ in range(3) for user in users(next(batches))]
        lost.release()
        batches.close()  # type: ignore[attr-defined]
    with DataDispatcher(config) as dispatcher:
        # Its number, in a process that knows nothing, is as good as any other.
        again = DataServiceSource(dispatcher.address, data_workers=False).shard(0, 2)
        counted += [user for batch in again for user in users(batch)]
    assert sorted(counted) == ALL


def test_what_is_not_the_trainers_state_is_refused(tmp_path: Path) -> None:
    with DataDispatcher() as dispatcher:
        source = DataServiceSource(dispatcher.address, dataset(tmp_path), data_workers=False)
        with closing(iter(source.shard(0, 2))) as batches:  # type: ignore[type-var]
            next(batches)
            foreign = source.shard(1, 2)
            foreign.load_state_dict({"epoch": 0, "granted": 0, "open": '[[0, ""]]', "shard_index": 1, "shard_count": 2})
            with pytest.raises(InvalidArgumentError, match="split 0 of epoch 0 was not trainer 1's"):
                foreign.release()
            foreign.load_state_dict({"epoch": 0, "granted": 3, "open": "[]", "shard_index": 1, "shard_count": 2})
            with pytest.raises(InvalidArgumentError, match="it had 3 splits, the dispatcher knows of 0"):
                foreign.release()
            assert len(list(batches)) == 19
        fixed = dataset(tmp_path, sharding="static")
        static = DataServiceSource(dispatcher.address, fixed, job="static", data_workers=False).shard(0, 2)
        with closing(iter(static)) as batches:  # type: ignore[type-var]
            next(batches)
            with pytest.raises(InvalidArgumentError, match="has static sharding; only trainer 0"):
                static.release()


def ask(jobs: Jobs, trainer: int, session: int, granted: int) -> tuple[int | None, str]:
    given = jobs.next_split(NextSplit(job=JOB, trainer=trainer, session=session, epoch=0, granted=granted))
    return given.split, given.position


@pytest.mark.parametrize("seed", range(6))
def test_in_any_order_every_split_ends_up_with_one_trainer_behind_what_was_read_of_it(seed: int) -> None:
    rng = random.Random(seed)
    recorded: list[JobEvent] = []
    jobs = Jobs(record=recorded.append)
    jobs.register(RegisterDataset(job=JOB, dataset=DatasetConfig(kind="click_stream", splits=12)))
    session, live = dict.fromkeys(range(40), 0), list(range(3))
    had: dict[int, list[int]] = {number: [] for number in range(40)}
    read = dict.fromkeys(range(12), 0)
    began: dict[tuple[int, int], int] = {}

    def join(trainer: int) -> None:
        session[trainer] += 1
        asked = JoinJob(
            job=JOB,
            trainer=trainer,
            trainers=40,
            epoch=0,
            granted=0,
            session=session[trainer],
            nonce=rng.randrange(9**9),
        )
        assert jobs.join(asked).joined

    for trainer in live:
        join(trainer)
    for _ in range(60):
        trainer = rng.choice(live)
        if rng.random() < 0.25:
            # It goes for good, having read some of what it had, and another comes.
            opened = []
            for split in had[trainer]:
                read[split] = rng.randint(began[trainer, split], 5)
                if read[split] < 5:
                    opened.append((split, str(read[split])))
            session[trainer] += 1
            leave = LeaveJob(
                job=JOB,
                trainer=trainer,
                epoch=0,
                granted=len(had[trainer]),
                opened=tuple(opened),
                session=session[trainer],
                nonce=7,
            )
            assert jobs.leave(leave).joined
            assert jobs.leave(leave).joined  # the same request again
            live.remove(trainer)
            had[trainer] = []
            live.append(max(session, key=lambda number: (session[number] > 0, number)) + 1)
            join(live[-1])
        else:
            split, position = ask(jobs, trainer, session[trainer], len(had[trainer]))
            if split is not None:
                assert int(position or 0) == read[split]
                began[trainer, split] = read[split]
                had[trainer].append(split)
        if rng.random() < 0.2:
            # The dispatcher is started again, from all events or from what they led to.
            recorded = recorded[:] if rng.random() < 0.5 else jobs.states()
            jobs = Jobs(record=recorded.append)
            for event in recorded:
                jobs.apply(event)
        mine = [split for trainer in live for split in had[trainer]]
        assert len(set(mine)) == len(mine)
        assert not {split for split in mine if read[split] == 5}
