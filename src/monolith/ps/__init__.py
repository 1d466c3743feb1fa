"""Parameter servers: tables and dense parameters in other processes, for many workers."""

from monolith.ps.client.server_group import ClientConfig
from monolith.ps.client.server_parameters import CachedParameters, ServerOptimizer, ServerParameters
from monolith.ps.client.server_store import ReadAhead, ServerStore, tables_of
from monolith.ps.protocol.dense_optimizers import DenseOptimizer
from monolith.ps.rebalance.client import take_back_buckets
from monolith.ps.server.parameter_server import ParameterServer, ServerConfig

__all__ = [
    "CachedParameters",
    "ClientConfig",
    "DenseOptimizer",
    "ParameterServer",
    "ReadAhead",
    "ServerConfig",
    "ServerOptimizer",
    "ServerParameters",
    "ServerStore",
    "tables_of",
    "take_back_buckets",
]
