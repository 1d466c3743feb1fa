"""Parameter servers inside this process: a run over servers that one debugger sees whole."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from monolith.errors import ConfigError
from monolith.ps.client.server_store import ServerStore
from monolith.ps.server.parameter_server import ParameterServer, ServerConfig
from monolith.state.model_dir import SERVERS
from monolith.state.storage import is_remote
from monolith.train.config import RunConfig, other_runs
from monolith.train.placement import Placement
from monolith.train.runner import RunnerConfig
from monolith.train.worker_attempt import client_config

if TYPE_CHECKING:
    from monolith.train.trainer import Trainer

__all__ = ["LocalServers"]


class LocalServers:
    """`runner.num_ps` servers in threads of this process, on which the rows of a trainer's model are from then on.

    Every lookup and update goes through the frames, sockets and handlers of a run over processes. Dense parameters stay in the
    model, as with one worker. With a model_dir the servers keep their parts in it, where servers of a run over processes, or a
    run without any, find them.

    Example:
        >>> import torch
        >>> from monolith.features import Feature
        >>> from monolith.nn import EmbeddingBagCollection
        >>> from monolith.train import RunnerConfig, Trainer
        >>> model = torch.nn.Sequential(EmbeddingBagCollection([Feature(name="user", dim=8)]))
        >>> servers = LocalServers(Trainer(model), RunnerConfig(is_local=True, num_ps=2))
        >>> len(servers.store.addresses)
        2
        >>> servers.close()
    """

    def __init__(self, trainer: Trainer, runner: RunnerConfig) -> None:
        self._open = ExitStack()
        try:
            self.servers = [
                self._open.enter_context(ParameterServer(_server_config(runner, trainer.config, index)))
                for index in range(runner.num_ps)
            ]
            placement = Placement(trainer, dense=False)
            self.store = self._open.enter_context(
                ServerStore(
                    [server.address for server in self.servers],
                    placement.tables,
                    config=client_config(runner, time.time_ns()),
                )
            )
            """The rows of the model."""
            placement.use(self.store)
        except BaseException:
            self._open.close()
            raise

    def close(self) -> None:
        """End the servers: what they hold is in the model_dir, or gone."""
        self._open.close()


def _server_config(runner: RunnerConfig, config: RunConfig, index: int) -> ServerConfig:
    model_dir = config.model_dir
    server = runner.server.model_copy(update={"restore_roots": (*runner.server.restore_roots, *other_runs(config))})
    if model_dir is None:
        return server
    if is_remote(model_dir):
        raise ConfigError(
            f"RunConfig.model_dir: servers in this process keep their rows on a local disk, got {model_dir!r}; or num_ps=0"
        )
    return server.model_copy(update={"folder": Path(model_dir, SERVERS, str(index)), "take_over": True})
