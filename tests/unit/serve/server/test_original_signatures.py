"""Danger: callers of the original, who send serialized messages, get other predictions than with columns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from monolith.errors import InvalidArgumentError
from monolith.proto import example_pb2, instance_pb2
from monolith.serve import Client
from monolith.serve.replica import Replica
from monolith.serve.server.model_server import ModelServer

IDS = {"user": [[3], [4]], "item": [[5], [6]], "tags": [[1, 2], []]}
AGES = [0.5, 0.25]


def examples() -> list[bytes]:
    found = []
    for row in range(2):
        example = example_pb2.Example()
        for name, ids in IDS.items():
            example.named_feature.add(name=name).feature.fid_v2_list.value.extend(ids[row])
        example.named_feature.add(name="age").feature.float_list.value.append(AGES[row])
        found.append(example.SerializeToString())
    return found


def example_batch() -> list[bytes]:
    batch = example_pb2.ExampleBatch(batch_size=2)
    for name, ids in IDS.items():
        column = batch.named_feature_list.add(name=name)
        for row in ids:
            column.feature.add().fid_v2_list.value.extend(row)
    ages = batch.named_feature_list.add(name="age")
    for age in AGES:
        ages.feature.add().float_list.value.append(age)
    return [batch.SerializeToString()]


def instances() -> list[bytes]:
    found = []
    for row in range(2):
        instance = instance_pb2.Instance()
        for name, ids in IDS.items():
            instance.feature.add(name=name).fid.extend(ids[row])
        instance.feature.add(name="age").float_value.append(AGES[row])
        found.append(instance.SerializeToString())
    return found


@pytest.mark.parametrize(
    ("name", "made"), [("examples", examples), ("example_batch", example_batch), ("instances", instances)]
)
def test_messages_are_predicted_like_columns(
    clicks: tuple[ModelServer, Replica], name: str, made: Callable[[], list[bytes]]
) -> None:
    server, replica = clicks
    ages = np.array(AGES, np.float32)[:, None]
    expected = replica.predict({**IDS, "age": ages})
    with Client(server.http_address) as client:
        answer = client.infer({name: made()})
    for head, output in expected.items():
        np.testing.assert_array_equal(answer[head], output.numpy())


def test_a_message_that_cannot_be_read_is_the_clients_error(clicks: tuple[ModelServer, Replica]) -> None:
    server, _ = clicks
    with Client(server.http_address) as client:
        with pytest.raises(InvalidArgumentError, match=r"inputs\['examples'\]: records\[0\]: the record is not"):
            client.infer({"examples": [b"\xff\xff"]})
        with pytest.raises(InvalidArgumentError, match=r"inputs\['examples'\]: records\[0\]: .*age"):
            client.infer({"examples": [example_pb2.Example().SerializeToString()]})
