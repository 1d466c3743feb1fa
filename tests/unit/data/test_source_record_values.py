"""Danger: a row is read from a file with other values than were written. Protobuf's own messages are the oracle."""

from __future__ import annotations

import random
from typing import Any

import pytest

from monolith.data import INVALID_LABEL, Column, parse_records
from monolith.errors import InvalidArgumentError
from monolith.proto import example_pb2, feature_pb2, instance_pb2, line_id_pb2, tf_example_pb2
from rows import as_lists, random_example, random_instance, random_tf_example, signed

TF_COLUMNS = [
    Column(name="ids"),
    Column(name="score", dtype="float32", shape=(2,)),
    Column(name="name", dtype="bytes"),
    Column(name="tags", dtype="bytes", nested=True),
]
EXAMPLE_COLUMNS = [
    Column(name="old"),
    Column(name="new"),
    Column(name="seq", nested=True),
    Column(name="dense", dtype="float32", shape=(3,)),
    Column(name="label", dtype="float32", shape=(2,)),
    Column(name="weight", field="instance_weight", dtype="float32", shape=()),
    Column(name="uid", field="line_id.uid", shape=()),
    Column(name="req_time", field="line_id.req_time", shape=()),
    Column(name="actions", field="line_id.actions"),
    Column(name="user_id", field="line_id.user_id", dtype="bytes"),
    Column(name="rate", field="line_id.sample_rate", dtype="float32", shape=()),
]
INSTANCE_COLUMNS = [
    Column(name="three", field="slot_3"),
    Column(name="fc_slot_600"),
    Column(name="named"),
    Column(name="values", dtype="float64", shape=(2,)),
    Column(name="seq", nested=True),
    Column(name="label", dtype="float32", shape=()),
    Column(name="chnid", field="line_id.chnid", shape=()),
]


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.parametrize("seed", range(3))
def test_tf_examples(seed: int) -> None:
    chance = random.Random(seed)
    messages, rows = zip(*(random_tf_example(chance) for _ in range(200)), strict=True)
    batch = as_lists(parse_records([m.SerializeToString() for m in messages], TF_COLUMNS, format="tf_example"))
    expected = columns_of(list(rows))
    lengths = [[len(tag) for tag in row] for row in expected["tags"]]
    expected["tags"] = [[byte for tag in row for byte in tag] for row in expected["tags"]]
    assert batch == {**expected, "tags.lengths": lengths}


@pytest.mark.parametrize("seed", range(3))
def test_examples(seed: int) -> None:
    chance = random.Random(seed)
    messages, rows = zip(*(random_example(chance) for _ in range(200)), strict=True)
    batch = as_lists(parse_records([m.SerializeToString() for m in messages], EXAMPLE_COLUMNS))
    expected = columns_of(list(rows))
    expected["label"] = [[INVALID_LABEL if v is None else v for v in row] for row in expected["label"]]
    assert batch == expected


@pytest.mark.parametrize("seed", range(3))
def test_instances(seed: int) -> None:
    chance = random.Random(seed)
    messages, rows = zip(*(random_instance(chance) for _ in range(200)), strict=True)
    batch = as_lists(parse_records([m.SerializeToString() for m in messages], INSTANCE_COLUMNS, format="instance"))
    assert batch == columns_of(list(rows))


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_of_examples_has_the_rows_of_its_examples(seed: int) -> None:
    chance = random.Random(seed)
    examples = [random_example(chance)[0] for _ in range(50)]
    batch = example_pb2.ExampleBatch(batch_size=50, data_source_key=5)
    for name in ("old", "new", "seq", "dense"):
        column = batch.named_feature_list.add(name=name)
        for example in examples:
            column.feature.append(next(f.feature for f in example.named_feature if f.name == name))
    label, weight, line_id = (
        batch.named_feature_list.add(name=name) for name in ("__LABEL__", "instance_weight", "__LINE_ID__")
    )
    for example in examples:
        label.feature.add().float_list.value.extend(example.label)
        weight.feature.add().float_value = example.instance_weight
        line_id.feature.add().bytes_list.value.append(example.line_id.SerializeToString())
    columns = [*EXAMPLE_COLUMNS, Column(name="key", field="data_source_key", shape=())]
    read = as_lists(parse_records([batch.SerializeToString()] * 2, columns, format="example_batch"))
    expected = as_lists(parse_records([e.SerializeToString() for e in examples] * 2, EXAMPLE_COLUMNS))
    assert read == {**expected, "key": [5] * 100}


def test_a_shared_feature_is_given_to_every_row() -> None:
    batch = example_pb2.ExampleBatch(batch_size=3)
    user = batch.named_feature_list.add(name="user", type=example_pb2.SHARED)
    user.feature.add().fid_v1_list.value.extend([1 << 54 | 5, 6])
    user.feature.add().fid_v1_list.value.extend([7])  # the first one is the shared one
    lists = batch.named_feature_list.add(name="lists", type=example_pb2.SHARED).feature.add().float_lists
    lists.list.add().value.extend([1.0, 2.0])
    lists.list.add()
    columns = [
        Column(name="user"),
        Column(name="lists", dtype="float32", nested=True),
        Column(name="absent", shape=(2,), default=9),
    ]
    assert as_lists(parse_records([batch.SerializeToString()], columns, format="example_batch")) == {
        "user": [[1 << 48 | 5, 6]] * 3,
        "lists": [[1.0, 2.0]] * 3,
        "lists.lengths": [[2, 0]] * 3,
        "absent": [[9, 9]] * 3,
    }


FEATURES = {
    "fid_v1_list": (feature_pb2.FidList(value=[7]), Column(name="f"), [7]),
    "fid_v2_list": (feature_pb2.FidList(value=[7]), Column(name="f"), [7]),
    "float_list": (feature_pb2.FloatList(value=[0.5]), Column(name="f", dtype="float64"), [0.5]),
    "double_list": (feature_pb2.DoubleList(value=[0.5]), Column(name="f", dtype="float32"), [0.5]),
    "int64_list": (feature_pb2.Int64List(value=[-7]), Column(name="f"), [-7]),
    "int64_value": (-7, Column(name="f"), [-7]),
    "float_value": (0.5, Column(name="f", dtype="float32"), [0.5]),
    "double_value": (0.5, Column(name="f", dtype="float64"), [0.5]),
    "bytes_value": (b"ab", Column(name="f", dtype="bytes"), [97, 98]),
}
LISTS = {
    "fid_v1_lists": (feature_pb2.FidLists(list=[feature_pb2.FidList(value=[7, 8])]), "int64", [7, 8]),
    "fid_v2_lists": (feature_pb2.FidLists(list=[feature_pb2.FidList(value=[7, 8])]), "int64", [7, 8]),
    "float_lists": (feature_pb2.FloatLists(list=[feature_pb2.FloatList(value=[7, 8])]), "float32", [7.0, 8.0]),
    "double_lists": (feature_pb2.DoubleLists(list=[feature_pb2.DoubleList(value=[7, 8])]), "float64", [7.0, 8.0]),
    "int64_lists": (feature_pb2.Int64Lists(list=[feature_pb2.Int64List(value=[7, 8])]), "int64", [7, 8]),
    "bytes_list": (feature_pb2.BytesList(value=[b"ab"]), "bytes", [97, 98]),
}


@pytest.mark.parametrize("kind", FEATURES)
def test_every_kind_of_feature(kind: str) -> None:
    value, column, expected = FEATURES[kind]
    example = example_pb2.Example()
    example.named_feature.add(name="f").feature.MergeFrom(feature_pb2.Feature(**{kind: value}))
    assert as_lists(parse_records([example.SerializeToString()], [column])) == {"f": [expected]}


@pytest.mark.parametrize("kind", LISTS)
def test_every_kind_of_nested_feature(kind: str) -> None:
    value, dtype, expected = LISTS[kind]
    example = example_pb2.Example()
    example.named_feature.add(name="f").feature.MergeFrom(feature_pb2.Feature(**{kind: value}))
    column = Column.model_validate({"name": "f", "dtype": dtype, "nested": True})
    batch = as_lists(parse_records([example.SerializeToString()], [column]))
    assert batch == {"f": [expected], "f.lengths": [[2]]}


def test_every_field_of_a_line_id() -> None:
    line = line_id_pb2.LineId(
        uid=2**63 + 1, req_time=-1, item_id=3, actions=[1, -2], chnid=5, pre_actions=[6], sample_rate=0.5,
        special_strategies=[8], device_type="d", cid="c", user_id="u", is_draw=True, rank=-3, data_source_name="s",
    )  # fmt: skip
    columns, expected = [], {}
    for field in line_id_pb2.LineId.DESCRIPTOR.fields:
        value = getattr(line, field.name)
        options: dict[str, Any] = {"shape": ()}
        if field.is_repeated:
            options, value = {}, list(value)
        if field.cpp_type == field.CPPTYPE_STRING:
            options, value = {"dtype": "bytes"}, list(value.encode())
        if field.cpp_type == field.CPPTYPE_FLOAT:
            options["dtype"] = "float32"
        columns.append(Column.model_validate({"name": field.name, "field": f"line_id.{field.name}", **options}))
        expected[field.name] = [signed(value) if isinstance(value, int) else value]
    record = example_pb2.Example(line_id=line).SerializeToString()
    assert as_lists(parse_records([record], columns)) == expected


def test_what_is_missing_gets_the_default() -> None:
    columns = [
        *[column for column in EXAMPLE_COLUMNS if column.name != "dense"],
        Column(name="dense", dtype="float32", shape=(2,), default=0.5),
        Column(name="key", field="data_source_key", shape=()),
    ]
    assert as_lists(parse_records([b""], columns)) == {
        "old": [[]],
        "new": [[]],
        "seq": [[]],
        "seq.lengths": [[]],
        "dense": [[0.5, 0.5]],
        "label": [[INVALID_LABEL] * 2],
        "weight": [1.0],
        "uid": [0],
        "req_time": [0],
        "actions": [[]],
        "user_id": [[]],
        "rate": [1.0],
        "key": [0],
    }


def test_numbers_are_read_packed_or_not() -> None:
    # 101: label as two single floats, as old writers of proto2 do.
    unpacked = bytes.fromhex("ad06 0000803f ad06 00000040")
    assert as_lists(parse_records([unpacked], [Column(name="label", dtype="float32")])) == {"label": [[1.0, 2.0]]}
    # The list of a tf.train.Feature, unpacked: 0a04 0801 0802 = {value: 1, value: 2}.
    tf = tf_example_pb2.Example()
    tf.features.feature["f"].ParseFromString(bytes.fromhex("1a04 0801 0802"))
    raw = bytes.fromhex("0a0d 0a0b 0a0166 1206 1a04 0801 0802")
    assert tf_example_pb2.Example.FromString(raw) == tf
    assert as_lists(parse_records([raw], [Column(name="f")], format="tf_example")) == {"f": [[1, 2]]}


def test_of_a_oneof_the_last_member_counts() -> None:
    first = feature_pb2.Feature(int64_list=feature_pb2.Int64List(value=[1])).SerializeToString()
    second = feature_pb2.Feature(fid_v2_list=feature_pb2.FidList(value=[2])).SerializeToString()
    example = example_pb2.Example()
    example.named_feature.add(name="f")
    for parts, expected in (([first, second], [2]), ([second, second, first], [1]), ([first, first], [1, 1])):
        body = b"\x0a\x01f\x12" + bytes([sum(map(len, parts))]) + b"".join(parts)
        raw = b"\x0a" + bytes([len(body)]) + body
        assert as_lists(parse_records([raw], [Column(name="f")])) == {"f": [expected]}


def test_a_named_column_of_an_instance_goes_before_the_flat_ids() -> None:
    instance = instance_pb2.Instance(fid=[3 << 54 | 1])
    instance.feature.add(name="slot_3").fid.append(9)
    batch = parse_records([instance.SerializeToString()], [Column(name="slot_3")], format="instance")
    assert as_lists(batch) == {"slot_3": [[9]]}


@pytest.mark.parametrize(
    ("column", "says"),
    [
        (Column(name="x", field="line_id.nobody"), "line_id.nobody"),
        (Column(name="x", field="label", shape=()), "another type"),
        (Column(name="x", field="line_id.cid", shape=()), "another type"),
        (Column(name="x", field="line_id.actions", nested=True), "no lists of lists"),
    ],
)
def test_columns_that_no_record_can_have_are_refused_at_once(column: Column, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        parse_records([], [column])
    with pytest.raises(InvalidArgumentError, match="slot 3"):
        parse_records([], [Column(name="slot_3"), Column(name="fc_slot_3")], format="instance")
