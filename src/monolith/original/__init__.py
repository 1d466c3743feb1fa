"""The names, files and schedulers of the TensorFlow original, as a thin layer over the native packages.

Every name of the original that has a counterpart is found here under the original's own name. docs/parity.md lists them all.
Names are loaded when they are first used, so that one of them does not load every package below.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

PS_JOB_NAME = "ps"
"""The job of parameter servers in a cluster."""

# By module: names that are the same there.
_SAME = {
    "monolith.cluster": """AddressFamily ConsulServiceDiscovery HostServiceDiscovery NodeAliveChecker ServiceDiscovery
        ServiceDiscoveryType TfConfigServiceDiscovery ZKServiceDiscovery add_mpi_exception_hook check_port clear_zk_path
        concat_ip_and_port default_zk_servers deregister_all get_discovery get_local_host get_local_ip get_local_server_addr
        is_ipv4_supported is_ipv6_address is_ipv6_only monolith_discovery retry_with_socket_error""",
    "monolith.cli": "add_siguser1_handler",
    "monolith.original.nested": "NestedTensors",
    "monolith.data.prefetch": "enqueue_dicts_with_queue_return",
    "monolith.features.ragged": "fused_value_rowids",
    "monolith.metrics.summary": """MONOLITH_FI_DATA MONOLITH_NAS_DATA PLUGIN_NAME SummaryType create_summary_metadata
        feature_insight_data get_nas_weight_json nas_data prepare_head""",
    "monolith.optim.optimizers": "apply_sparse_precond eigen_inverse_root",
    "monolith.original.assign_signatures": "ParameterSyncServer hashtable_assign raw_assign",
    "monolith.original.async_functions": "AsyncFunctionManager",
    "monolith.original.backends": "DiscoveryBackend SyncBackend refresh_sync_config",
    "monolith.original.ckpt_info": "FidSlotCountSaverListener",
    "monolith.original.controller_hooks": "QueryActionHook StopHelper",
    "monolith.original.copy_files": "copy_file copy_recursively",
    "monolith.original.cached_variables": "CachedVariables",
    "monolith.original.embedding_task": "BaseEmbeddingTask",
    "monolith.original.feature_columns": "EmbeddingTaskParams Env FeatureColumn3D FeatureColumnV1 FeatureSlice FeatureSlot",
    "monolith.original.host_calls": "BaseEmbeddingHostCall BaseHostCall",
    "monolith.original.installed_files": "find_main get_libops_path",
    "monolith.original.tasks": "BaseTask EvalParams InputParams TaskParams TrainParams",
    "monolith.original.tpu_runner": "TPUFlags TPURunner",
    "monolith.original.dump": "dump_counts export_dump export_multi_dump import_dump import_multi_dump",
    "monolith.original.export_hooks": """ExportSaverListener get_export_saver_listener_state get_global_step
        overwrite_export_saver_listener_state""",
    "monolith.original.exporters": """BaseExporter DistributedExporter ExportContext ExportMode StandaloneExporter create_exporter
        enter_export_mode get_current_export_ctx is_exporting is_exporting_distributed is_exporting_standalone""",
    "monolith.original.feature_list": "FeatureList",
    "monolith.original.flows": "CacheOneDataset merge_flow split_flow",
    "monolith.original.fused_layout": "FeatureConfig FeatureConfigs OutConfig OutType PoolingType SliceConfig",
    "monolith.original.fused_lookup": """FusedLayout batch_from_examples feature_configs_from_proto
        feature_configs_to_proto""",
    "monolith.original.gradients": "propagate_back_dict_gradients propagate_back_gradients",
    "monolith.original.kafka": "KafkaDataset create_plain_kafka_dataset",
    "monolith.original.mlp": "MLPEnv MLPServiceDiscovery",
    "monolith.original.mlp_scheduler": "DataServers HandOver MlpDataServers mlp_pass",
    "monolith.original.packing": """StaticReshapeNBuilder maybe_squeeze_3d_tensor merge_dicts pack_tensors
        pack_typed_keyed_tensors split_tensors_with_type static_reshape unpack_packed_tensors unpack_tensors""",
    "monolith.original.parameter_sync": "ParameterSyncClient split_request",
    "monolith.original.parameter_sync_hook": "ParameterSyncHook",
    "monolith.original.remote_predict": "AgentHeartbeat remote_predict",
    "monolith.original.saver": "PartialRecoverySaver PsMonitor",
    "monolith.original.slices": "EmbeddingSlices",
    "monolith.original.sync_training_hooks": """EofAwareTask ReqTimeControlDumpHook SyncTrainingBarrierSaverListener
        SyncTrainingForceDumpHook SyncTrainingInfoHook SyncTrainingSaverControlHook""",
    "monolith.original.tide": "TideStoppingHook before tide_available_now",
    "monolith.original.touched_keys": """TOUCHED_KEY_SET_CAPACITY TOUCHED_KEY_SET_CONCURRENCY_LEVEL TouchedKeySet
        create_touched_key_set""",
    "monolith.original.yarn": "create_primus_save_point maybe_finish_application maybe_kill_application",
    "monolith.ps.client.benchmark": "BenchmarkConfig",
    "monolith.serve": "import_saved_model",
    "monolith.original.checkpoint_state": "SaveHelper get_latest_checkpoint_state",
    "monolith.state.index": "get_monolith_checkpoint_state",
    "monolith.train": "RunnerConfig",
    "monolith.train.distributed.ranks": "distributed_sync_train",
    "monolith.train.distributed.run": "distributed_train",
    "monolith.train.config": "get_metric_prefix set_metric_prefix",
    "monolith.train.distributed.sync": "ChiefSyncHook SyncHelper TrainingHooksHelper WorkerSyncHook",
    "monolith.train.hooks": "CustomGlobalStepWaiterHook NoFirstSaveCheckpointSaverHook SecondOrStepTimerWithTideSetting",
}
# By name of the original: module and name of what replaces it.
_RENAMED = {
    "AdamomOptimizer": ("monolith.optim", "Adamom"),
    "AsyncFunctionMgr": ("monolith.original.async_functions", "AsyncFunctionManager"),
    "CachedVariableAssociates": ("monolith.original.cached_variables", "CachedVariables"),
    "CachedVariableMeta": ("monolith.original.cached_variables", "CachedVariables"),
    "ControllerHook": ("monolith.train.control", "Controller"),
    "CopyFile": ("monolith.original.copy_files", "copy_file"),
    "CopyRecursively": ("monolith.original.copy_files", "copy_recursively"),
    "CpuTraining": ("monolith.train", "Trainer"),
    "CpuTrainingConfig": ("monolith.train", "RunConfig"),
    "DistributedCpuTrainingConfig": ("monolith.train", "RunConfig"),
    "EnqueueHook": ("monolith.data.prefetch", "Prefetch"),
    "FetchAllCachedVariablesHook": ("monolith.train.hooks", "FetchCachedVariablesHook"),
    "GetParams": ("monolith.original.tasks", "get_params"),
    "MonolithKazooClient": ("monolith.cluster.zookeeper", "make_zk_client"),
    "MultiQueueRunner": ("monolith.data.prefetch", "Prefetch"),
    "PsHealthCheckerHook": ("monolith.train.distributed.health", "ServerHealthHook"),
    "PsBenchMarkTask": ("monolith.ps.client.benchmark", "measure_servers"),
    "RmspropOptimizer": ("monolith.optim", "RMSprop"),
    "SaverBuilder": ("monolith.original.saver", "PartialRecoverySaver"),
    "ShampooOptimizer": ("monolith.optim", "Shampoo"),
    "ZKListener": ("monolith.cluster", "ZKServiceDiscovery"),
    "assign_all_cached_variables": ("monolith.original.cached_variables", "CachedVariables.assign"),
    "cached_value": ("monolith.original.cached_variables", "CachedVariables.forward"),
    "cached_variable_creator": ("monolith.original.cached_variables", "CachedVariables"),
    "create_test_ps_cluster": ("monolith.ps", "ParameterServer"),
    "fetch_all_cached_variables": ("monolith.original.cached_variables", "CachedVariables.fetch"),
    "gen_get_checkpoint_state": ("monolith.original.checkpoint_state", "get_checkpoint_state"),
    "gen_monolith_ops_base": ("monolith._core", ""),
    "generate_test_hash_table_config": ("monolith.testing", "sgd_table_config"),
    "get_saved_model_path": ("monolith.serve", "load"),
    "isabs": ("monolith.state.paths", "is_absolute"),
    "local_train": ("monolith.train", "Estimator.train"),
    "params": ("monolith.config", "Config"),
    "print_stack_trace": ("monolith.cli", "add_siguser1_handler"),
    "profile_it": ("monolith.train.hooks", "ProfilerHook"),
    "with_params": ("monolith.config", "Config"),
    "write_deep_insight": ("monolith.train.hooks", "DeepInsightHook"),
}
_HOMES = {**{name: (module, name) for module, names in _SAME.items() for name in names.split()}, **_RENAMED}

__all__ = sorted([*_HOMES, "PS_JOB_NAME"])


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, path = _HOMES[name]
    value: Any = import_module(module)
    for part in filter(None, path.split(".")):
        value = getattr(value, part)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
