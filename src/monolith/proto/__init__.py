"""The messages of the original: rows, features, layouts. Generated from `proto/` when the package is built.

`example_pb2` has Example and ExampleBatch, `instance_pb2` Instance, `layout_pb2` FeatureConfigs, `line_id_pb2` LineId,
`feature_pb2` Feature and its lists, `item_pool_pb2` ChannelCache, `table_dump_pb2` EntryDump,
`tf_example_pb2` tf.train.Example, `parameter_sync_pb2` PushRequest, `export_pb2` ServingModelState,
`primus_am_service_pb2` the calls to a Primus application master.

Example:
    >>> from monolith.proto import example_pb2
    >>> example = example_pb2.Example(label=[1.0])
    >>> example.named_feature.add(name="user").feature.fid_v2_list.value.append(7)
    >>> example_pb2.Example.FromString(example.SerializeToString()) == example
    True
"""
