"""`monolith rebalance`: move the buckets of running parameter servers onto more, fewer or other ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from monolith.cli.options import Json
from monolith.cli.output import show
from monolith.cli.progress import showing_progress
from monolith.cli.serving import read_token

__all__ = ["rebalance"]


def rebalance(
    of: Annotated[str, typer.Option("--from", help="The servers now: host:port,host:port,...")],
    to: Annotated[str, typer.Option(help="The servers that shall own all buckets, in the same form.")],
    replace_lost: Annotated[
        bool,
        typer.Option(
            help="Servers were lost with their folders: new ones in --from own, empty, what nobody of --from owns."
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a server that does not answer.", min=0.1)] = 60.0,
    tls_root_certs: Annotated[
        Path | None, typer.Option(help="PEM of whom the servers' certificates are signed by, if they have some.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that the servers ask for; or $MONOLITH_PS_TOKEN.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Give every server of --to an equal share of the buckets, while workers go on.

    As few buckets move as must. Servers that are only in --from own nothing in the end: stop them when every worker has made
    another step. If it fails in the middle nothing is lost; run it again.
    """
    from monolith.ps import ClientConfig, ServerStore

    config = ClientConfig(timeout=float(timeout), token=read_token(token_file), tls_root_certs=tls_root_certs)
    store = ServerStore(_addresses(of), replace_lost=replace_lost, config=config)
    with store, showing_progress("moving buckets") as report:
        owned = store.rebalance(_addresses(to), report=report)
    show(
        {
            server.address: {"buckets": sum(end - first for first, end in server.ranges), "ranges": server.ranges}
            for server in owned.servers
        },
        as_json=as_json,
    )


def _addresses(text: str) -> list[str]:
    return [address.strip() for address in text.split(",") if address.strip()]
