"""`monolith dispatcher`: hands out the splits of a dataset to trainers, until it is asked to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from monolith.cli.given_files import read_yaml
from monolith.cli.options import Json
from monolith.cli.serving import (
    Grace,
    Host,
    MaxStreams,
    Port,
    TlsCert,
    TlsKey,
    TokenFile,
    serve_until_asked,
)
from monolith.transport.tokens import read_token

__all__ = ["dispatcher"]


def dispatcher(
    host: Host = "127.0.0.1",
    port: Port = 0,
    folder: Annotated[
        Path | None,
        typer.Option(help="Keep the journal here, and go on from it at start; without it, in memory only."),
    ] = None,
    take_over: Annotated[bool, typer.Option(help="Take the folder from a process that hangs.")] = False,
    dataset: Annotated[
        Path | None,
        typer.Option(help="YAML with the fields of DatasetConfig; without it, the first trainer brings one."),
    ] = None,
    job: Annotated[str, typer.Option(help="The job that reads --dataset.")] = "monolith_dataservice_task",
    lease_secs: Annotated[
        float, typer.Option(help="A data worker not heard for so long counts as dead.", min=0.1)
    ] = 5.0,
    root: Annotated[
        list[str] | None,
        typer.Option(help="Folder or URL that files of datasets must be below. May be repeated; '*' allows any."),
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    token_file: TokenFile = None,
    max_streams: MaxStreams = 1024,
    grace: Grace = 5.0,
    as_json: Json = False,
) -> None:
    """Hand out files or parts of a dataset to trainers, each to one; end on SIGTERM, SIGINT, or when a client asks for it.

    The first line of the output tells the address.
    """
    from monolith.dataservice import DataDispatcher, DatasetConfig, DispatcherConfig

    described = None if dataset is None else DatasetConfig.from_json(json.dumps(read_yaml(dataset)))
    server = DataDispatcher(
        DispatcherConfig(
            host=host,
            port=port,
            tls_cert=tls_cert,
            tls_key=tls_key,
            token=read_token(token_file),
            max_streams=max_streams,
            folder=folder,
            roots=tuple(root or ()),
            take_over=take_over,
            lease_secs=lease_secs,
        )
    )
    if described is not None:
        server.register(job, described)
    serve_until_asked(server, grace=grace, as_json=as_json)
