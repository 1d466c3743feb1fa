"""A process of the MLP scheduler that is neither server nor worker: the data service's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from monolith.checkpoint.storage import is_remote
from monolith.cluster.mlp_roles import HandOver, mlp_pass
from monolith.train.runner import RunnerConfig
from monolith.transport.frame_server import ListenConfig

__all__ = ["handed_over"]

FOLDER = "data_service"
"""The folder of the model_dir with the dispatcher's journal."""


@contextmanager
def handed_over(config: RunnerConfig) -> Iterator[HandOver]:
    """Do what the scheduler wants of this process before, or instead of, training; see `mlp_pass`.

    A dispatcher or data worker serves here until worker 0 is gone. Data workers that a worker starts beside itself live as long
    as the block.
    """
    from monolith.data.service.mlp_servers import MlpDataServers

    listen = ListenConfig(**{name: getattr(config.server, name) for name in ListenConfig.model_fields})
    keeps = bool(config.model_dir) and not is_remote(config.model_dir)
    found = mlp_pass(
        data_servers=MlpDataServers(listen=listen, folder=Path(config.model_dir, FOLDER) if keeps else None),
        use_dataservice=config.use_dataservice,
        num_extra_dsworkers=config.num_extra_dsworker_on_gpu_worker,
    )
    try:
        yield found
    finally:
        for server in found.servers:
            server.close()
