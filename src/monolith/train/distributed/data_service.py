"""The data service of a run: its processes, and the workers that read from it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from monolith.cluster.scheduler import DataServicePart, schedulers_of
from monolith.config import Config
from monolith.errors import ConfigError
from monolith.features.batch import Batch
from monolith.train.distributed.config import RunnerConfig
from monolith.transport.server import ListenConfig
from monolith.urls import is_remote

if TYPE_CHECKING:
    from monolith.dataservice import DatasetConfig

    TrainingData = Iterable[Batch] | DatasetConfig

__all__ = ["serve_data", "service_dispatcher", "service_source"]

JOURNAL_FOLDER = "data_service"
"""The folder of the model_dir with the dispatcher's journal."""


@contextmanager
def _scheduled(config: RunnerConfig, environ: Mapping[str, str] = os.environ) -> Iterator[DataServicePart]:
    """Take the part in the data service that the scheduler gives this process, for the time of a block."""
    listen = ListenConfig(**{name: getattr(config.server, name) for name in ListenConfig.model_fields})
    keeps = bool(config.model_dir) and not is_remote(config.model_dir)
    with ExitStack() as stack:
        parts = [
            stack.enter_context(
                scheduler.data_service(
                    listen=listen,
                    folder=Path(config.model_dir, JOURNAL_FOLDER) if keeps else None,
                    reads=config.use_dataservice,
                    num_extra_workers=config.num_extra_dsworker_on_gpu_worker,
                )
            )
            for scheduler in schedulers_of(environ)
        ]
        yield next((part for part in parts if part.finished or part.dispatcher), DataServicePart())


def serve_data(config: RunnerConfig) -> None:
    """Be the dispatcher or the data worker that the scheduler made of this process, until worker 0 has ended.

    Raises:
        ConfigError: no scheduler gave this process that role, so there is no worker 0 to wait for.
    """
    with _scheduled(config) as part:
        if not part.finished:
            raise ConfigError(
                f"RunnerConfig.server_type: {config.server_type!r} is a role that only the MLP scheduler gives, in MLP_ROLE, and "
                "it did not give it to this process; elsewhere run `monolith dispatcher` and `monolith data-worker`"
            )


@contextmanager
def service_dispatcher(config: RunnerConfig) -> Iterator[str]:
    """Yield the address of the dispatcher that this worker reads from, empty without `use_dataservice`.

    Waits until the data service that the scheduler started is ready.

    Raises:
        ConfigError: `use_dataservice` is set and nothing says where the data service is.
    """
    extra = config.num_extra_dsworker_on_gpu_worker
    if extra and (config.data_service_dispatcher or not config.use_dataservice):
        raise ConfigError(
            f"RunnerConfig.num_extra_dsworker_on_gpu_worker: {extra} data workers in each worker belong to the data service of "
            "an MLP job; set use_dataservice and leave data_service_dispatcher empty, or run `monolith data-worker`"
        )
    if config.data_service_dispatcher or not config.use_dataservice:
        yield config.data_service_dispatcher if config.use_dataservice else ""
        return
    with _scheduled(config) as part:
        if not part.dispatcher:
            raise ConfigError(
                "RunnerConfig.data_service_dispatcher: expected host:port of the data service to read from: use_dataservice is "
                "set, and there is no scheduler that says where it is. `monolith dispatcher` starts one"
            )
        yield part.dispatcher


def service_source(source: TrainingData, config: RunnerConfig, dispatcher: str) -> Iterable[Batch]:
    """Return what a worker trains on: `source` itself, or with `use_dataservice` the batches that `dispatcher` hands out.

    Raises:
        ConfigError: with `use_dataservice`, `source` would be read by this process. Without it, `source` is a `DatasetConfig`.
    """
    if not config.use_dataservice:
        if isinstance(source, Config):
            raise ConfigError(
                "RunnerConfig.use_dataservice: a DatasetConfig is read through a data service; set use_dataservice, or give a "
                "source that this process reads itself"
            )
        return source
    from monolith.dataservice import DataClientConfig, DataServiceSource, DatasetConfig

    if isinstance(source, DatasetConfig):
        talking = DataClientConfig(token=config.client.token, tls_root_certs=config.client.tls_root_certs)
        return DataServiceSource(dispatcher, source, config=talking)
    innermost: object = source
    while not isinstance(innermost, DataServiceSource) and hasattr(innermost, "_source"):
        innermost = innermost._source  # transforms and prefetching wrap a source
    if not isinstance(innermost, DataServiceSource):
        raise ConfigError(
            f"RunnerConfig.use_dataservice: the batches come from a {type(source).__name__}, which this process would read "
            "itself, past the data service; give `train` a DatasetConfig or a DataServiceSource, or unset use_dataservice"
        )
    return source
