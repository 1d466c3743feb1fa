"""The data service: a dispatcher hands out splits of the data, data workers read them, trainers take their batches."""

from monolith.dataservice.client import DataClientConfig
from monolith.dataservice.dataset import DatasetConfig, Split, TransformConfig
from monolith.dataservice.dispatcher import DataDispatcher, DispatcherConfig
from monolith.dataservice.kinds import open_split
from monolith.dataservice.source import DataServiceSource
from monolith.dataservice.worker import DataWorker, DataWorkerConfig

__all__ = [
    "DataClientConfig",
    "DataDispatcher",
    "DataServiceSource",
    "DataWorker",
    "DataWorkerConfig",
    "DatasetConfig",
    "DispatcherConfig",
    "Split",
    "TransformConfig",
    "open_split",
]
