"""Danger: a key in two units, a unit in two processes, a unit that loses its windows on the way, or records skipped unnoticed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from join_oracle import (
    QUIET,
    Acted,
    Shown,
    action,
    config_for,
    impression,
    join_all,
    joined,
    labels_by_key,
    write_events,
    written,
)
from monolith.data.join import Joiner
from monolith.data.join.lmdb_store import LmdbStore
from monolith.data.join.unit import Unit
from monolith.errors import FencedError, InvalidArgumentError, StorageError, StreamGapError, UnavailableError
from monolith.streams import FolderStream, open_stream
from monolith.testing.mock_kafka import MockKafka

SHOWN = [Shown(f"k{n}", 1_000_000 + 100 * n) for n in range(60)]
ACTED = [Acted(f"k{n}", 1_003_000 + 100 * n, "click") for n in range(0, 60, 4)]


def test_units_move_between_any_number_of_processes_with_their_windows(tmp_path: Path) -> None:
    config = config_for(tmp_path, out_of_order_secs=100)
    write_events(tmp_path, SHOWN, [], partitions=3)
    for index in range(2):
        with Joiner(config, index=index, count=2) as joiner:
            assert joiner._open_units()
            for _ in range(6):
                joiner._join(joiner._read())
            assert joiner.status().open_windows == sum(len(unit.windows) for unit in joiner.units) > 0
            joiner.checkpoint()
    assert written(tmp_path / "examples") == []
    write_events(tmp_path, [], ACTED, partitions=3)
    counts = join_all(config)  # one process has all three units now
    assert counts["impressions"] == len(SHOWN)
    assert labels_by_key(written(tmp_path / "examples")) == joined(SHOWN, ACTED, config)


def test_inputs_with_other_partitions_are_refused(tmp_path: Path) -> None:
    open_stream(f"{tmp_path}/shown", partitions=3, settings=QUIET)
    open_stream(f"{tmp_path}/acted", partitions=2, settings=QUIET)
    with pytest.raises(InvalidArgumentError, match=r"actions\.stream: expected .* 0, 1, 2, got 0, 1\. .* copy them"):
        join_all(config_for(tmp_path))


def test_more_processes_than_partitions_are_refused(tmp_path: Path) -> None:
    write_events(tmp_path, SHOWN, [])
    with pytest.raises(InvalidArgumentError, match="count: expected at most 1, one process for each partition, got 2"):
        join_all(config_for(tmp_path), index=1, count=2)
    with pytest.raises(InvalidArgumentError, match="index: expected 0 to 1"):
        Joiner(config_for(tmp_path), index=2, count=2)


def test_a_unit_has_one_process(tmp_path: Path) -> None:
    sides = {"shown/0": True, "acted/0": False}
    config = config_for(tmp_path)
    first = Unit(config, 0, sides, limit=1 << 20)
    with pytest.raises(StorageError, match="another writer"):
        Unit(config, 0, sides, limit=1 << 20)
    second = Unit(config, 0, sides, limit=1 << 20, take_over=True)
    assert second.epoch == first.epoch + 1
    second.commit()
    with pytest.raises(FencedError):
        first.commit()
    first.close()
    second.close()
    third = Unit(config, 0, sides, limit=1 << 20)
    assert third.epoch == second.epoch + 1
    third.close()


def test_a_store_of_an_older_epoch_cannot_write(tmp_path: Path) -> None:
    """It passed the check of the lock, was then stopped, and goes on when its successor has begun."""
    stale = LmdbStore(tmp_path, epoch=3, max_bytes=1 << 24)
    stale.commit(b"old", {b"a": b"1"}, {}, [])
    with stale._env.begin(write=True) as transaction:
        transaction.put(b"epoch", b"4", db=stale._meta)
    with pytest.raises(FencedError, match="a joiner of epoch 4 has taken it over"):
        stale.commit(b"new", {b"a": b"2"}, {}, [])
    assert (stale.meta(), stale.get(b"a")) == (b"old", b"1")
    stale.close()
    with pytest.raises(FencedError):
        LmdbStore(tmp_path, epoch=3, max_bytes=1 << 24)


def test_records_that_were_removed_before_they_were_read_are_an_error(tmp_path: Path) -> None:
    small = {**QUIET, "segment_bytes": "4096", "retention_bytes": "1"}
    for name in ("shown", "acted"):
        open_stream(f"{tmp_path}/{name}", partitions=1, settings=small)
    config = config_for(tmp_path)
    write_events(tmp_path, SHOWN[:2], [])
    join_all(config)
    with open_stream(f"{tmp_path}/shown").writer() as writer:
        for number in range(2000):
            writer.append(b'{"key":"k%d","time":1000000,"user":1}' % number)
            if number % 100 == 0:
                writer.flush()
    with pytest.raises(StreamGapError):
        join_all(config)


def test_partitions_that_are_added_get_a_unit(tmp_path: Path) -> None:
    write_events(tmp_path, SHOWN[:10], [])
    open_stream(f"{tmp_path}/examples", partitions=2, settings=QUIET)
    with Joiner(config_for(tmp_path)) as joiner:
        assert joiner._open_units()
        joiner._join(joiner._read())
        for name in ("shown", "acted"):
            stream = open_stream(f"{tmp_path}/{name}")
            assert isinstance(stream, FolderStream)
            stream.add_partitions(1)
            joiner._refresh()  # after the first, the inputs do not fit each other
            assert len(joiner.units) == (1 if name == "shown" else 2)
        write_events(tmp_path, SHOWN[10:], [], partitions=2)
        joiner.run(until_end=True)
    assert labels_by_key(written(tmp_path / "examples")).keys() == {one.key for one in SHOWN}


def test_a_broker_that_does_not_answer_when_partitions_are_looked_for_ends_no_joiner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> list[str]:
        raise UnavailableError("shown: no answer")

    write_events(tmp_path, SHOWN, [])
    with Joiner(config_for(tmp_path)) as joiner:
        assert joiner._open_units()
        with monkeypatch.context() as patched:
            patched.setattr(joiner._inputs[0], "partitions", away)
            joiner._refresh()
        joiner.run(until_end=True)
    assert labels_by_key(written(tmp_path / "examples")).keys() == {one.key for one in SHOWN}


def test_kafka_partitions_are_joined_once_also_after_a_kill() -> None:
    quick = {"fetch.wait.max.ms": "5"}
    topics = ("shown", "acted", "examples")
    with MockKafka(dict.fromkeys(topics, 2)) as kafka, tempfile.TemporaryDirectory() as folder:
        source = {"key": ["key"], "time": "time", "time_unit": "ms", "settings": quick}
        config = config_for(
            Path(folder),
            impressions={"stream": kafka.url("shown"), **source},
            actions={"stream": kafka.url("acted"), **source},
            output={"stream": kafka.url("examples"), "settings": quick},
            out_of_order_secs=1,
        )
        for name, events in (("shown", SHOWN), ("acted", ACTED)):
            with open_stream(kafka.url(name), settings=quick).writer() as writer:
                for number, event in enumerate(events):
                    value = impression(event) if isinstance(event, Shown) else action(event)
                    writer.append(value, key=event.key.encode(), partition=int(event.key[1:]) % 2)
                    assert number < len(events)
        with Joiner(config) as joiner:
            assert joiner._open_units()
            while joiner.status().counts.get("impressions", 0) < len(SHOWN):
                joiner._join(joiner._read())
            joiner._close_windows(end=True)
            joiner._flush()  # and no checkpoint
        counts = join_all(config)
        assert counts["repeated_examples"] == len(SHOWN)
        found = written(kafka.url("examples"))
        assert labels_by_key(found).keys() == {one.key for one in SHOWN}
        assert len(found) == len(SHOWN)


def test_an_output_with_too_few_partitions_is_refused(tmp_path: Path) -> None:
    write_events(tmp_path, SHOWN, [], partitions=2)
    open_stream(f"{tmp_path}/examples", partitions=1, settings=QUIET)
    with pytest.raises(InvalidArgumentError, match="partitions"):
        join_all(config_for(tmp_path))


def test_beginning_at_the_end_stays_where_it_began(tmp_path: Path) -> None:
    write_events(tmp_path, SHOWN[:5], [])
    config = config_for(tmp_path, start="end")
    with Joiner(config) as joiner:
        assert joiner._open_units()
    write_events(tmp_path, SHOWN[5:8], [])
    join_all(config)
    assert set(labels_by_key(written(tmp_path / "examples"))) == {"k5", "k6", "k7"}


def test_partitions_that_are_added_are_read_whole_although_the_others_began_at_the_end(tmp_path: Path) -> None:
    write_events(tmp_path, SHOWN[:5], [])
    open_stream(f"{tmp_path}/examples", partitions=2, settings=QUIET)
    config = config_for(tmp_path, start="end")
    join_all(config)
    for name in ("shown", "acted"):
        stream = open_stream(f"{tmp_path}/{name}")
        assert isinstance(stream, FolderStream)
        stream.add_partitions(1)
    write_events(tmp_path, SHOWN[5:], [], partitions=2)
    assert join_all(config)["impressions"] == len(SHOWN[5:])
    assert set(labels_by_key(written(tmp_path / "examples"))) == {one.key for one in SHOWN[5:]}


def test_another_output_needs_another_state(tmp_path: Path) -> None:
    from monolith.errors import ConfigError

    write_events(tmp_path, SHOWN, [])
    join_all(config_for(tmp_path))
    with pytest.raises(
        ConfigError, match=r"output\.stream: the state .* belongs to the output examples/0, got other/0"
    ):
        join_all(config_for(tmp_path, output={"stream": f"{tmp_path}/other", "settings": QUIET}))
    shutil.rmtree(tmp_path / "state")
