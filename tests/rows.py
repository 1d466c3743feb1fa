"""Random rows of every format, as protobuf messages, and what a reader must make of them. The oracle of the record tests."""

from __future__ import annotations

import random
from typing import Any

from monolith.features import Ragged
from monolith.features.batch import Batch
from monolith.proto import example_pb2, instance_pb2, tf_example_pb2

__all__ = ["as_lists", "random_example", "random_instance", "random_tf_example"]

SIGNATURE_V2 = 2**48 - 1


def as_lists(batch: Batch) -> dict[str, list[Any]]:
    """A batch as nested lists, bytes columns as lists of byte values."""
    return {
        name: column.to_lists() if isinstance(column, Ragged) else column.tolist() for name, column in batch.items()
    }


def signed(value: int) -> int:
    """The int64 with the bits of a fixed64."""
    return value - 2**64 if value >= 2**63 else value


def fid_v2(fid: int) -> int:
    """A version 1 fid as version 2."""
    return (fid >> 54 << 48) | (fid & SIGNATURE_V2)


def random_tf_example(chance: random.Random) -> tuple[tf_example_pb2.Example, dict[str, Any]]:
    """A row with `ids` (ragged), `score` (two floats), `name` (a string), `tags` (strings) and fields nobody asks for."""
    row = {
        "ids": [chance.randrange(-(2**63), 2**63) for _ in range(chance.randrange(5))],
        "score": [chance.randrange(-1000, 1000) / 8 for _ in range(2)],
        "name": list(chance.randbytes(chance.randrange(6))),
        "tags": [list(chance.randbytes(chance.randrange(4))) for _ in range(chance.randrange(3))],
    }
    example = tf_example_pb2.Example()
    features = example.features.feature
    if row["ids"] or chance.random() < 0.5:
        features["ids"].int64_list.value.extend(row["ids"])
    features["score"].float_list.value.extend(row["score"])
    features["name"].bytes_list.value.append(bytes(row["name"]))
    features["tags"].bytes_list.value.extend(bytes(tag) for tag in row["tags"])
    for extra in range(chance.randrange(3)):
        features[f"extra{extra}"].float_list.value.append(1.0)
    return example, row


def random_example(chance: random.Random) -> tuple[example_pb2.Example, dict[str, Any]]:
    """A row of the original's with ids of both versions, nested ids, a dense feature, labels and a LineId."""
    v1 = [chance.randrange(2**64) for _ in range(chance.randrange(4))]
    v2 = [chance.randrange(2**63) for _ in range(chance.randrange(4))]
    nested = [[chance.randrange(2**63) for _ in range(chance.randrange(3))] for _ in range(chance.randrange(3))]
    labels = [chance.randrange(8) / 4 for _ in range(chance.randrange(3))]
    example = example_pb2.Example(label=labels, instance_weight=chance.choice([0.0, -2.0, 0.5, 2.0]))
    example.named_feature.add(name="old", id=1).feature.fid_v1_list.value.extend(v1)
    example.named_feature.add(name="unused").feature.int64_list.value.append(3)
    example.named_feature.add(name="new", sorted_id=2).feature.fid_v2_list.value.extend(v2)
    sequence = example.named_feature.add(name="seq").feature
    for inner in nested:
        sequence.fid_v2_lists.list.add().value.extend(inner)
    dense = [chance.randrange(100) / 4 for _ in range(3)]
    example.named_feature.add(name="dense").feature.double_list.value.extend(dense)
    example.named_raw_feature.add(name="old").raw_feature.feature.add().float_value = 1.0
    line = example.line_id
    line.uid, line.req_time = chance.randrange(2**64), chance.randrange(2**40)
    line.actions.extend(chance.randrange(-5, 5) for _ in range(chance.randrange(4)))
    line.user_id = "u" * chance.randrange(3)
    if chance.random() < 0.5:
        line.sample_rate = 0.25
    row = {
        "old": [fid_v2(fid) for fid in v1],
        "new": v2,
        "seq": [fid for inner in nested for fid in inner],
        "seq.lengths": [len(inner) for inner in nested],
        "dense": dense,
        "label": labels + [None] * (2 - len(labels)),
        "weight": example.instance_weight if example.instance_weight > 0 else 1.0,
        "uid": signed(line.uid),
        "req_time": line.req_time,
        "actions": list(line.actions),
        "user_id": list(line.user_id.encode()),
        "rate": line.sample_rate,
    }
    return example, row


def random_instance(chance: random.Random) -> tuple[instance_pb2.Instance, dict[str, Any]]:
    """A row with flat ids of the slots 3 and 600 among others, and named columns."""
    fids = [(chance.choice([3, 600, 7]) << 54) | chance.randrange(2**54) for _ in range(chance.randrange(8))]
    instance = instance_pb2.Instance(fid=fids, label=[1.0], instance_weight=3.0)
    named = instance.feature.add(name="named")
    named.fid.extend(chance.randrange(2**63) for _ in range(chance.randrange(3)))
    values = instance.feature.add(name="values")
    values.float_value.extend([0.5, chance.randrange(8) / 2])
    sequence = instance.feature.add(name="seq")
    for _ in range(chance.randrange(3)):
        sequence.int64_list.add().value.extend(chance.randrange(-9, 9) for _ in range(chance.randrange(3)))
    instance.line_id.chnid = chance.randrange(9)
    row = {
        "three": [fid_v2(fid) for fid in fids if fid >> 54 == 3],
        "fc_slot_600": [fid_v2(fid) for fid in fids if fid >> 54 == 600],
        "named": list(named.fid),
        "values": list(values.float_value),
        "seq": [value for inner in sequence.int64_list for value in inner.value],
        "seq.lengths": [len(inner.value) for inner in sequence.int64_list],
        "label": 1.0,
        "chnid": instance.line_id.chnid,
    }
    return instance, row
