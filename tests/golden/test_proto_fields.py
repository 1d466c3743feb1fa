"""Danger: a field number or type that moves, so that files and streams written by the original are read as something else.

The table below is the wire contract. It may only grow; nothing in it may ever change.
"""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import FieldDescriptor

from monolith.proto import (
    example_pb2,
    feature_pb2,
    instance_pb2,
    item_pool_pb2,
    layout_pb2,
    line_id_pb2,
    table_dump_pb2,
    tf_example_pb2,
)

TYPES = {
    value: name.removeprefix("TYPE_").lower()
    for name, value in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}

# number:name:type, [] after the type of a repeated field, "!" where a repeated number is written unpacked.
FIELDS = {
    line_id_pb2.LineId: "2:uid:fixed64 3:req_time:int64 4:item_id:fixed64 6:actions:int32[] 19:chnid:int64 "
    "23:pre_actions:int32[] 27:sample_rate:float 39:special_strategies:int32[]! 41:device_type:string 48:cid:string "
    "49:user_id:string 87:is_draw:bool 145:rank:int32 235:data_source_name:string",
    feature_pb2.FidList: "1:value:fixed64[]",
    feature_pb2.FloatList: "1:value:float[]",
    feature_pb2.DoubleList: "1:value:double[]",
    feature_pb2.Int64List: "1:value:int64[]",
    feature_pb2.BytesList: "1:value:bytes[]",
    feature_pb2.FidLists: "1:list:FidList[]",
    feature_pb2.FloatLists: "1:list:FloatList[]",
    feature_pb2.DoubleLists: "1:list:DoubleList[]",
    feature_pb2.Int64Lists: "1:list:Int64List[]",
    feature_pb2.BytesLists: "1:list:BytesList[]",
    feature_pb2.Feature: "1:fid_v1_list:FidList 2:fid_v2_list:FidList 3:float_list:FloatList 4:double_list:DoubleList "
    "5:int64_list:Int64List 6:bytes_list:BytesList 7:fid_v2_lists:FidLists 8:float_lists:FloatLists "
    "9:double_lists:DoubleLists 10:int64_lists:Int64Lists 11:bytes_lists:BytesLists 12:int64_value:int64 "
    "13:float_value:float 14:double_value:double 15:bytes_value:bytes 16:fid_v1_lists:FidLists",
    feature_pb2.FeatureMap: "1:feature_map:FeatureMapEntry[]",
    feature_pb2.RawFeature: "1:feature:Feature[]",
    example_pb2.NamedFeature: "1:name:string 2:feature:Feature 3:id:int32 6:sorted_id:int32",
    example_pb2.NamedRawFeature: "1:name:string 2:raw_feature:RawFeature 3:id:int32",
    example_pb2.Example: "1:named_feature:NamedFeature[] 2:named_raw_feature:NamedRawFeature[] 100:line_id:LineId "
    "101:label:float[] 102:instance_weight:float 103:data_source_key:uint32",
    example_pb2.ExampleBatchRowMajor: "1:shared_feature:NamedFeature[] 2:shared_raw_feature:NamedRawFeature[] "
    "3:example:Example[]",
    example_pb2.NamedFeatureList: "1:name:string 2:feature:Feature[] 3:type:enum 4:id:int32",
    example_pb2.NamedRawFeatureList: "1:name:string 2:raw_feature:RawFeature[] 3:type:enum 4:id:int32",
    example_pb2.ExampleBatch: "1:named_feature_list:NamedFeatureList[] 2:named_raw_feature_list:NamedRawFeatureList[] "
    "3:batch_size:int32 100:data_source_key:uint32",
    instance_pb2.Fixed64List: "1:value:fixed64[]",
    instance_pb2.FloatList: "1:value:float[]",
    instance_pb2.Int64List: "1:value:int64[]",
    instance_pb2.BytesList: "1:value:bytes[]",
    instance_pb2.Feature: "1:name:string 2:fid:fixed64[] 3:float_value:float[] 4:int64_value:int64[] "
    "5:bytes_value:bytes[] 6:fid_list:Fixed64List[] 7:float_list:FloatList[] 8:int64_list:Int64List[] "
    "9:bytes_list:BytesList[]",
    instance_pb2.LabelTag: "1:key:int32 2:val:float",
    instance_pb2.Instance: "1:fid:fixed64[] 2:value:float[] 3:label:float[] 4:instance_weight:float 5:line_id:LineId "
    "6:dense:float[] 7:label_tag:LabelTag[] 8:next_fid:fixed64[] 9:feature:Feature[] 100:data_source_key:uint32",
    instance_pb2.Request: "1:req_id:string 2:ut:int32 3:uid:fixed64 4:req_time:int64 5:instances:Instance[] 6:user:string",
    item_pool_pb2.FeatureData: "1:gid:int64 2:fids:int64[] 3:feature_columns:NamedFeature[] 4:origin_cnt:int64 "
    "5:sample_cnt:int64",
    item_pool_pb2.ChannelCache: "1:channel_id:int64 2:feature_datas:FeatureData[]",
    item_pool_pb2.FilterValues: "1:float_list:FloatList 2:int64_list:Int64List 3:bytes_list:BytesList",
    layout_pb2.FeatureConfig: "1:table:string 2:pooling_type:enum 3:slice_dims:int32[] 4:max_sequence_length:int32",
    layout_pb2.SliceConfig: "1:feature_name:string 2:start:int32 3:end:int32 4:feature_idx:int32 5:slice_idx:int32 "
    "10:pooling_type:enum 11:max_sequence_length:int32",
    layout_pb2.TensorShape: "1:dims:int32[]",
    layout_pb2.OutConfig: "1:slice_configs:SliceConfig[] 2:out_type:enum 3:shape:TensorShape[]",
    layout_pb2.FeatureConfigs: "1:feature_configs:FeatureConfigsEntry[] 2:out_configs:OutConfigsEntry[]",
    table_dump_pb2.AdagradOptimizerDump: "1:norm:float[]!",
    table_dump_pb2.SgdOptimizerDump: "",
    table_dump_pb2.FtrlOptimizerDump: "1:zero:float[]! 2:norm:float[]!",
    table_dump_pb2.DynamicWdAdagradOptimizerDump: "1:norm:float[]! 2:last_update_step:int64",
    table_dump_pb2.AdadeltaOptimizerDump: "1:accum:float[]! 2:accum_update:float[]!",
    table_dump_pb2.AdamOptimizerDump: "1:m:float[]! 2:v:float[]! 3:beta1_power:float 4:beta2_power:float",
    table_dump_pb2.AmsgradOptimizerDump: "1:m:float[]! 2:v:float[]! 3:vhat:float[]! 4:beta1_power:float "
    "5:beta2_power:float",
    table_dump_pb2.MomentumOptimizerDump: "1:n:float[]!",
    table_dump_pb2.RmspropOptimizerDump: "1:n:float[]!",
    table_dump_pb2.RmspropV2OptimizerDump: "1:n:float[]!",
    table_dump_pb2.GroupFtrlOptimizerDump: "1:zero:float[]! 2:norm:float[]!",
    table_dump_pb2.BatchSoftmaxOptimizerDump: "1:global_step:int64",
    table_dump_pb2.GroupAdaGradOptimizerDump: "1:grad_square_sum:float",
    table_dump_pb2.SingleOptimizerDump: "1:adagrad:AdagradOptimizerDump 2:sgd:SgdOptimizerDump 3:ftrl:FtrlOptimizerDump "
    "4:dynamic_wd_adagrad:DynamicWdAdagradOptimizerDump 6:adadelta:AdadeltaOptimizerDump 7:adam:AdamOptimizerDump "
    "8:amsgrad:AmsgradOptimizerDump 9:momentum:MomentumOptimizerDump 11:rmsprop:RmspropOptimizerDump "
    "12:rmspropv2:RmspropV2OptimizerDump 13:group_ftrl:GroupFtrlOptimizerDump "
    "14:batch_softmax:BatchSoftmaxOptimizerDump 15:group_adagrad:GroupAdaGradOptimizerDump",
    table_dump_pb2.OptimizerDump: "1:dump:SingleOptimizerDump[]",
    table_dump_pb2.EntryDump: "1:id:sfixed64 2:num:float[]! 3:opt:OptimizerDump 4:last_update_ts_sec:int64",
    table_dump_pb2.MultiHashTableMetadata: "1:table_name:string 2:num_entries:uint64",
    tf_example_pb2.BytesList: "1:value:bytes[]",
    tf_example_pb2.FloatList: "1:value:float[]",
    tf_example_pb2.Int64List: "1:value:int64[]",
    tf_example_pb2.Feature: "1:bytes_list:BytesList 2:float_list:FloatList 3:int64_list:Int64List",
    tf_example_pb2.Features: "1:feature:FeatureEntry[]",
    tf_example_pb2.Example: "1:features:Features",
}
FILES = [example_pb2, feature_pb2, instance_pb2, item_pool_pb2, layout_pb2, line_id_pb2, table_dump_pb2, tf_example_pb2]


def describe(field: FieldDescriptor) -> str:
    kind = field.message_type.name if field.message_type else TYPES[field.type]
    unpacked = field.is_repeated and kind not in ("string", "bytes") and not field.message_type and not field.is_packed
    return f"{field.number}:{field.name}:{kind}{'[]' if field.is_repeated else ''}{'!' if unpacked else ''}"


@pytest.mark.parametrize("message", FIELDS, ids=lambda message: message.DESCRIPTOR.full_name)
def test_fields_keep_number_and_type(message: type) -> None:
    assert [describe(field) for field in message.DESCRIPTOR.fields] == FIELDS[message].split()


def test_no_message_is_missing_from_the_contract() -> None:
    defined = {message.full_name for file in FILES for message in file.DESCRIPTOR.message_types_by_name.values()}
    assert {message.DESCRIPTOR.full_name for message in FIELDS} == defined


def test_enum_values() -> None:
    assert dict(layout_pb2.PoolingType.items()) == {"SUM": 0, "MEAN": 1, "FIRSTN": 3}
    assert dict(layout_pb2.OutType.items()) == {"CONCAT": 0, "STACK": 1, "ADDN": 2, "NONE": 3}
    assert dict(example_pb2.FeatureListType.items()) == {"INDIVIDUAL": 0, "SHARED": 1}


def test_a_row_without_a_sample_rate_was_kept_with_certainty() -> None:
    assert line_id_pb2.LineId().sample_rate == 1.0


def test_bytes_of_an_example() -> None:
    example = example_pb2.Example(label=[1.0], line_id=line_id_pb2.LineId(uid=7, actions=[1, 2]))
    example.named_feature.add(name="f", id=3).feature.fid_v2_list.value.extend([1, 2**63])
    expected = (
        "0a1b 0a0166 1214 1212 0a10 0100000000000000 0000000000000080 1803"  # named_feature
        "a206 0d 11 0700000000000000 32020102"  # line_id
        "aa06 04 0000803f"  # label
    )
    assert example.SerializeToString(deterministic=True).hex() == expected.replace(" ", "")
