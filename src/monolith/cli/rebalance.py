"""`monolith rebalance`: move the buckets of running parameter servers onto more, fewer or other ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from monolith.cli.options import Json
from monolith.cli.output import show
from monolith.cli.progress import showing_progress
from monolith.transport.tokens import read_token

if TYPE_CHECKING:
    from monolith.ps import ClientConfig

__all__ = ["rebalance"]


def rebalance(
    of: Annotated[str, typer.Option("--from", help="The servers now: host:port,host:port,...")],
    to: Annotated[
        str | None, typer.Option(help="The servers that shall own all buckets, in the same form; needed to move any.")
    ] = None,
    replace_lost: Annotated[
        bool,
        typer.Option(
            help="Servers were lost with their folders: new ones in --from own, empty, what nobody of --from owns."
        ),
    ] = False,
    take_back: Annotated[
        bool,
        typer.Option(
            help="Instead of moving: let servers of --from own again what is on its way to servers that do not come for it."
        ),
    ] = False,
    lost: Annotated[
        str,
        typer.Option(
            help="With --take-back: servers that are lost for good with their folders, and with whatever they had taken."
        ),
    ] = "",
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
    another step. If it fails in the middle nothing is lost; run it again. A piece that waits for a server which does not come
    back is settled by --take-back: its giver owns it again if that server has not got it, or is lost.
    """
    from monolith.ps import ClientConfig

    if take_back == (to is not None) or (lost and not take_back):
        raise typer.BadParameter("expected either --to, or --take-back with or without --lost", param_hint="--to")
    config = ClientConfig(timeout=float(timeout), token=read_token(token_file), tls_root_certs=tls_root_certs)
    if to is None:
        show(_taken_back(_addresses(of), _addresses(lost), config), as_json=as_json)
    else:
        show(_moved(_addresses(of), _addresses(to), config, replace_lost=replace_lost), as_json=as_json)


def _moved(of: list[str], to: list[str], config: ClientConfig, *, replace_lost: bool) -> dict[str, object]:
    from monolith.ps import ServerStore
    from monolith.transport.addresses import distinct_addresses

    distinct_addresses(to)  # before waiting for those of --from
    store = ServerStore(of, replace_lost=replace_lost, config=config)
    with store, showing_progress("moving buckets") as report:
        owned = store.rebalance(to, report=report)
    return {
        server.address: {"buckets": sum(end - first for first, end in server.ranges), "ranges": server.ranges}
        for server in owned.servers
    }


def _taken_back(of: list[str], lost: list[str], config: ClientConfig) -> dict[str, object]:
    from monolith.ps import take_back_buckets

    pieces = take_back_buckets(of, lost=lost, config=config)
    settled = {
        piece.giver: {"buckets": piece.buckets, "dense": piece.dense, "taker": piece.taker, "owner": piece.owner}
        for piece in pieces
    }
    return {"settled": len(settled), **settled}


def _addresses(text: str) -> list[str]:
    return [address.strip() for address in text.split(",") if address.strip()]
