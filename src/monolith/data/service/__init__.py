"""The data service: a dispatcher hands out splits of the data, data workers read them, trainers take their batches."""

from monolith.data.service.client import DataClientConfig
from monolith.data.service.dataset import DatasetConfig, Split, TransformConfig
from monolith.data.service.dispatcher import DataDispatcher, DispatcherConfig
from monolith.data.service.kinds import open_split
from monolith.data.service.mlp_servers import MlpDataServers
from monolith.data.service.source import DataServiceSource
from monolith.data.service.worker import DataWorker, DataWorkerConfig

__all__ = [
    "DataClientConfig",
    "DataDispatcher",
    "DataServiceSource",
    "DataWorker",
    "DataWorkerConfig",
    "DatasetConfig",
    "DispatcherConfig",
    "MlpDataServers",
    "Split",
    "TransformConfig",
    "open_split",
]
