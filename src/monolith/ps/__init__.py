"""Parameter servers: tables and dense parameters in other processes, for many workers."""

from monolith.ps.dense_optimizers import DenseAdagrad, DenseAdam, DenseSgd
from monolith.ps.read_ahead import ReadAhead
from monolith.ps.remote_store import RemoteStore
from monolith.ps.server import ParameterServer, ServerConfig
from monolith.ps.server_group import ClientConfig
from monolith.ps.server_parameters import CachedParameters, ServerOptimizer, ServerParameters
from monolith.ps.server_store import ServerStore, tables_of

__all__ = [
    "CachedParameters",
    "ClientConfig",
    "DenseAdagrad",
    "DenseAdam",
    "DenseSgd",
    "ParameterServer",
    "ReadAhead",
    "RemoteStore",
    "ServerConfig",
    "ServerOptimizer",
    "ServerParameters",
    "ServerStore",
    "tables_of",
]
