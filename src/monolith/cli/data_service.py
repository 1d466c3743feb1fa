"""`monolith dispatcher` and `data-worker`: the processes of a data service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from monolith.cli.options import Json, named, read_yaml, size_in_bytes
from monolith.cli.serving import (
    Grace,
    Host,
    MaxMessage,
    MaxStreams,
    Port,
    TlsCert,
    TlsKey,
    TokenFile,
    serve_until_asked,
)
from monolith.errors import ConfigError
from monolith.transport.tokens import read_token

if TYPE_CHECKING:
    from monolith.dataservice.dataset import MakeSource

__all__ = ["data_worker", "dispatcher"]


def dispatcher(
    host: Host = "127.0.0.1",
    port: Port = 0,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the journal, from which the dispatcher resumes. Without it the state is in memory only."
        ),
    ] = None,
    take_over: Annotated[bool, typer.Option(help="Take over the folder from a process that hangs.")] = False,
    dataset: Annotated[
        Path | None,
        typer.Option(help="YAML file with the fields of DatasetConfig. Without it the first trainer sends one."),
    ] = None,
    job: Annotated[str, typer.Option(help="Name of the job that reads --dataset.")] = "monolith_dataservice_task",
    lease_secs: Annotated[
        float, typer.Option(help="Seconds without a heartbeat after which a data worker counts as dead.", min=0.1)
    ] = 5.0,
    root: Annotated[
        list[str] | None,
        typer.Option(help="Folder or URL that may be read. May be repeated. '*' allows any."),
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    token_file: TokenFile = None,
    max_streams: MaxStreams = 1024,
    grace: Grace = 5.0,
    as_json: Json = False,
) -> None:
    """Run the dispatcher of a data service.

    It assigns each file or part of a dataset to one trainer, until SIGTERM, SIGINT or a client stops it. The first line of the
    output has the address.
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


def data_worker(
    dispatcher: Annotated[str, typer.Option(help="host:port of the dispatcher.")],
    host: Host = "127.0.0.1",
    port: Port = 0,
    advertise: Annotated[
        str | None, typer.Option(help="host:port at which trainers reach it, by default the address it listens on.")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="A source that datasets may use, such as clicks=my_package.data:read. May be repeated."),
    ] = None,
    root: Annotated[
        list[str] | None,
        typer.Option(help="Folder or URL that may be read. May be repeated. '*' allows any."),
    ] = None,
    read_ahead: Annotated[int, typer.Option(help="Batches of each split that are prefetched.", min=1)] = 4,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_root_certs: Annotated[
        Path | None, typer.Option(help="CA bundle (PEM) that signed the dispatcher's certificate.")
    ] = None,
    token_file: TokenFile = None,
    max_message: MaxMessage = "256MiB",
    max_streams: MaxStreams = 256,
    grace: Grace = 5.0,
    as_json: Json = False,
) -> None:
    """Run a data worker of a data service.

    It reads, parses and transforms splits for trainers, until SIGTERM, SIGINT or a client stops it. The first line of the
    output has the address. The token is also sent to the dispatcher.
    """
    from monolith.dataservice import DataClientConfig, DataWorker, DataWorkerConfig

    token = read_token(token_file)
    server = DataWorker(
        DataWorkerConfig(
            dispatcher=dispatcher.removeprefix("grpc://"),
            host=host,
            port=port,
            advertise=advertise,
            tls_cert=tls_cert,
            tls_key=tls_key,
            token=token,
            client=DataClientConfig(token=token, tls_root_certs=tls_root_certs),
            roots=tuple(root or ()),
            read_ahead=read_ahead,
            max_message_bytes=size_in_bytes(max_message, "--max-message"),
            max_streams=max_streams,
        ),
        dict(map(_kind, kind or ())),
    )
    serve_until_asked(server, grace=grace, as_json=as_json)


def _kind(text: str) -> tuple[str, MakeSource]:
    name, equals, function = text.partition("=")
    if not equals or not name.isidentifier() or ":" not in function:
        raise ConfigError(f"--kind: expected name=module:function, got {text!r}")
    return name, named(function)
