"""Danger: a copy of a stream that is killed at any moment has a record twice, or never, or in another order than its key's."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

from forked import Forked
from jobs import join_process

from join_oracle import QUIET
from monolith.streams import open_stream
from monolith.streams.stream import partition_of_key

KEYS = 40


def test_a_copy_that_is_killed_has_every_record_once(tmp_path: Path) -> None:
    chance = random.Random(3)
    source = open_stream(f"{tmp_path}/source", partitions=3, settings=QUIET)
    open_stream(f"{tmp_path}/target", partitions=4, settings=QUIET)
    sent: dict[bytes, list[int]] = defaultdict(list)
    repeats, count = 0, 0
    with source.writer() as writer:
        for kill in range(8):
            process = Forked(join_process.repartition, str(tmp_path))
            try:
                # Killed before, at and after its start, and while records come.
                if kill % 4:
                    repeats += process.receive()["written"]
                for _ in range(chance.randint(0, 4)):
                    for _ in range(chance.randint(1, 400)):
                        key = chance.randrange(KEYS)
                        # Records of a key come in one partition of the source, or have no order.
                        writer.append(b'{"n":%d,"key":"%d"}' % (count, key), key=b"%d" % (key % 7))
                        sent[b"%d" % key].append(count)
                        count += 1
                    writer.flush()
                    if kill % 2:
                        process.receive()  # it has copied something
            finally:
                process.close()
    assert repeats > 0, "no kill came between a record and its checkpoint"
    process = Forked(join_process.repartition, str(tmp_path), True)
    assert process.join() == 0
    assert count > 500
    assert copied(tmp_path) == sent


def copied(folder: Path) -> dict[bytes, list[int]]:
    """Numbers by key in the order in which they are in the target."""
    found: dict[bytes, list[int]] = defaultdict(list)
    target = open_stream(f"{folder}/target")
    with target.reader() as reader:
        reader.assign(dict.fromkeys(target.partitions(), "start"))
        while batches := reader.poll(1000, 0):
            for records in batches:
                for key, value in zip(records.keys, records.values, strict=True):
                    assert key is not None
                    assert int(records.partition[-1]) == partition_of_key(key, range(4))
                    found[key].append(int(value[5 : value.index(b",")]))
    return found
