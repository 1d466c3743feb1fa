"""`monolith page`: one page for several replicas and runs."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from monolith.cli.options import Json
from monolith.cli.serve_replicas import live_status
from monolith.serve.page import Overview, PageServer
from monolith.transport.tokens import read_token

__all__ = ["page"]


def page(
    sources: Annotated[list[str], typer.Argument(help="URLs of replicas, and model_dirs of runs.", metavar="SOURCES")],
    host: Annotated[str, typer.Option(help="Address to listen on: one of this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on. 0 takes a free one.", min=0, max=65535)] = 8080,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token of the replicas. By default $MONOLITH_PS_TOKEN.")
    ] = None,
    tls_root_certs: Annotated[
        Path | None, typer.Option(help="CA bundle (PEM) that signed the replicas' certificates.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve one page for several replicas and runs.

    It listens until it is interrupted. It shows for each replica what the replica's own page shows, and for each run its
    step, newest checkpoint and log, and if it trains on a stream, how far it is behind.
    """
    replicas = [source for source in sources if "://" in source]
    runs = [source for source in sources if "://" not in source]
    overview = Overview(replicas, runs, token=read_token(token_file), tls_root_certs=tls_root_certs, live=live_status)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    with PageServer(overview.routes(), host=host, port=port) as server:
        told = json.dumps({"event": "listening", "address": server.address}) if as_json else f"page on {server.address}"
        sys.stdout.write(f"{told}\n")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            stop.wait()
