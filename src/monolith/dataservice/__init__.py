"""The data service: a dispatcher assigns splits of the data, data workers read them, trainers get their batches."""

from monolith.dataservice.dataset import DatasetConfig, Split, TransformConfig, open_split
from monolith.dataservice.dispatcher import DataDispatcher, DispatcherConfig
from monolith.dataservice.protocol import DataClientConfig
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
