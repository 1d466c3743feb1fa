"""A model server with a rollout, in a process of its own: `python rollout_server.py FOLDER` prints its address and waits."""

from __future__ import annotations

import sys
from pathlib import Path

from monolith.serve.rollout.router import RolloutRouter
from monolith.serve.rollout.routes import rollout_routes
from monolith.serve.server.config import ServingConfig
from monolith.serve.server.model_server import ModelServer
from rollout_models import replica, repository_of

TOKEN = "a-token-of-tests-only"


def serve(folder: Path) -> tuple[ModelServer, RolloutRouter]:
    """Start a server of version 7, version 8 that is poisoned, and version 9 that is good."""
    repository = repository_of(replica(7), replica(8, poisoned=True), replica(9))
    router = RolloutRouter(repository, folder)
    config = ServingConfig(token=TOKEN, grpc_port=None)
    server = ModelServer(repository, config, router=router, observers=[router], extra_routes=rollout_routes(router))
    return server, router


if __name__ == "__main__":
    server, router = serve(Path(sys.argv[1]))
    sys.stdout.write(f"{server.http_address}\n")
    sys.stdout.flush()
    server.wait()
