"""What exists for compatibility with the TensorFlow original, under the original's own names.

Everything here is a thin layer over the native packages. docs/parity.md lists every name of the original with its home.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monolith.original.async_functions import AsyncFunctionManager as AsyncFunctionManager
    from monolith.original.copy_files import copy_file as copy_file
    from monolith.original.copy_files import copy_recursively as copy_recursively
    from monolith.original.dump.export_dump import export_dump as export_dump
    from monolith.original.dump.export_dump import export_multi_dump as export_multi_dump
    from monolith.original.dump.import_dump import dump_counts as dump_counts
    from monolith.original.dump.import_dump import import_dump as import_dump
    from monolith.original.dump.import_dump import import_multi_dump as import_multi_dump
    from monolith.original.flows import CacheOneDataset as CacheOneDataset
    from monolith.original.flows import merge_flow as merge_flow
    from monolith.original.flows import split_flow as split_flow
    from monolith.original.fused_lookup import FusedLayout as FusedLayout
    from monolith.original.gradients import propagate_back_dict_gradients as propagate_back_dict_gradients
    from monolith.original.gradients import propagate_back_gradients as propagate_back_gradients
    from monolith.original.mlp import MLPEnv as MLPEnv
    from monolith.original.mlp_discovery import MLPServiceDiscovery as MLPServiceDiscovery
    from monolith.original.mlp_roles import DataServers as DataServers
    from monolith.original.mlp_roles import HandOver as HandOver
    from monolith.original.mlp_roles import mlp_pass as mlp_pass
    from monolith.original.mlp_servers import MlpDataServers as MlpDataServers
    from monolith.original.nested import NestedTensors as NestedTensors
    from monolith.original.ps_monitor import PsMonitor as PsMonitor
    from monolith.original.saver import PartialRecoverySaver as PartialRecoverySaver
    from monolith.original.touched_keys import TouchedKeySet as TouchedKeySet
    from monolith.original.yarn import create_primus_save_point as create_primus_save_point
    from monolith.original.yarn import get_local_host as get_local_host
    from monolith.original.yarn import maybe_finish_application as maybe_finish_application
    from monolith.original.yarn import maybe_kill_application as maybe_kill_application

__all__ = [
    "AsyncFunctionManager",
    "CacheOneDataset",
    "DataServers",
    "FusedLayout",
    "HandOver",
    "MLPEnv",
    "MLPServiceDiscovery",
    "MlpDataServers",
    "NestedTensors",
    "PartialRecoverySaver",
    "PsMonitor",
    "TouchedKeySet",
    "copy_file",
    "copy_recursively",
    "create_primus_save_point",
    "dump_counts",
    "export_dump",
    "export_multi_dump",
    "get_local_host",
    "import_dump",
    "import_multi_dump",
    "maybe_finish_application",
    "maybe_kill_application",
    "merge_flow",
    "mlp_pass",
    "propagate_back_dict_gradients",
    "propagate_back_gradients",
    "split_flow",
]

# Loaded when first used: one name of the original should not load every package below it.
_HOMES = {
    "AsyncFunctionManager": "async_functions",
    "CacheOneDataset": "flows",
    "DataServers": "mlp_roles",
    "FusedLayout": "fused_lookup",
    "HandOver": "mlp_roles",
    "MLPEnv": "mlp",
    "MLPServiceDiscovery": "mlp_discovery",
    "MlpDataServers": "mlp_servers",
    "NestedTensors": "nested",
    "PartialRecoverySaver": "saver",
    "PsMonitor": "ps_monitor",
    "TouchedKeySet": "touched_keys",
    "copy_file": "copy_files",
    "copy_recursively": "copy_files",
    "create_primus_save_point": "yarn",
    "dump_counts": "dump.import_dump",
    "export_dump": "dump.export_dump",
    "export_multi_dump": "dump.export_dump",
    "get_local_host": "yarn",
    "import_dump": "dump.import_dump",
    "import_multi_dump": "dump.import_dump",
    "maybe_finish_application": "yarn",
    "maybe_kill_application": "yarn",
    "merge_flow": "flows",
    "mlp_pass": "mlp_roles",
    "propagate_back_dict_gradients": "gradients",
    "propagate_back_gradients": "gradients",
    "split_flow": "flows",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"monolith.original.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
