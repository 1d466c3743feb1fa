"""`monolith serve-shard`: hold some of the rows of an export, for front ends that look them up."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from monolith.cli.options import Json, size_in_bytes
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
from monolith.cluster.launch.reporting import beating
from monolith.cluster.launch.roles import SHARDS_VARIABLE
from monolith.cluster.liveness import Liveness
from monolith.transport.tokens import read_token

if TYPE_CHECKING:
    from monolith.serve.shards.following import ShardFollower
    from monolith.serve.shards.shard_server import ShardServer

__all__ = ["serve_shard"]

_ANY_ADDRESS = ("0.0.0.0", "::")


def serve_shard(
    export: Annotated[
        Path, typer.Argument(help="An export, or a folder of numbered exports: the newest.", metavar="EXPORT")
    ],
    shard: Annotated[int, typer.Option(help="Number of this shard, from 0.", min=0)] = 0,
    shards: Annotated[int, typer.Option(help="How many shards hold the export together.", min=1, max=4096)] = 1,
    run: Annotated[
        str | None,
        typer.Option(help="Follow the run in this model_dir: rows of the shard are those of training a moment ago."),
    ] = None,
    run_root_certs: Annotated[
        Path | None, typer.Option(help="With --run: CA bundle (PEM) that signed the certificates of the run.")
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    discovery: Annotated[
        str | None,
        typer.Option(
            help="Announce the shard: file=FOLDER, consul=NAME, zk=NAME[@HOSTS] or ray=NAME[@HOST:PORT]. "
            "Front ends find it with the same value of --shards.",
            envvar=SHARDS_VARIABLE,
        ),
    ] = None,
    replica: Annotated[int, typer.Option(help="With --discovery: number of this replica of the shard.", min=0)] = 0,
    advertise: Annotated[
        str | None,
        typer.Option(help="With --discovery: host:port at which front ends reach it, by default where it listens."),
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    token_file: TokenFile = None,
    max_message: MaxMessage = "256MiB",
    max_streams: MaxStreams = 1024,
    max_requests: Annotated[
        int | None, typer.Option(help="Requests in progress at the same time, by default one per stream.", min=1)
    ] = None,
    transport: Annotated[
        Literal["socket", "flight"] | None,
        typer.Option(help="Transport of requests. By default Flight with a certificate, plain sockets without one."),
    ] = None,
    grace: Grace = 5.0,
    as_json: Json = False,
) -> None:
    """Run an embedding shard of an export.

    It holds the rows of some buckets, about 1/N of all for shard I of N, and answers lookups of them. Start each shard several
    times, on several machines, and front ends use another replica when one fails. The shard serves until SIGTERM, SIGINT or a
    client stops it. The first line of the output has the address.
    """
    from monolith.serve.shards.shard_server import ShardConfig, ShardServer

    follower: list[ShardFollower] = []
    server = ShardServer(
        ShardConfig(
            export=export,
            shard=shard,
            shards=shards,
            host=host,
            port=port,
            tls_cert=tls_cert,
            tls_key=tls_key,
            token=read_token(token_file),
            max_message_bytes=size_in_bytes(max_message, "--max-message"),
            max_streams=max_streams,
            max_requests=max_requests,
            transport=transport,
        ),
        lag=lambda: follower[0].lag() if follower else None,
    )
    if run is not None:
        follower.append(_following(run, server, read_token(token_file), run_root_certs))
    announced = None if discovery is None else _announced(discovery, server, replica, advertise)
    with beating(Liveness().heartbeat_secs):
        serve_until_asked(server, grace=grace, as_json=as_json, announced=announced)


def _following(run: str, server: ShardServer, token: str | None, root_certs: Path | None) -> ShardFollower:
    from monolith.serve.follow import RunWriters
    from monolith.serve.shards.following import ShardFollower

    return ShardFollower(server.tables, RunWriters(run, token=token, tls_root_certs=root_certs))


def _announced(
    discovery: str, server: ShardServer, replica: int, advertise: str | None
) -> AbstractContextManager[object]:
    from monolith.cluster.net import concat_ip_and_port, get_local_host
    from monolith.serve.shards.addresses import announced_shard, open_discovery

    host = get_local_host() if server.config.host in _ANY_ADDRESS else server.config.host
    address = advertise or concat_ip_and_port(host, server.port)
    stack = ExitStack()
    found = stack.enter_context(open_discovery(discovery))
    stack.enter_context(announced_shard(found, server.config.shard, replica, address))
    return stack
