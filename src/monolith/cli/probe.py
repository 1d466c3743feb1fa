"""`monolith probe`: whether a parameter server answers, for probes of schedulers and for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from monolith.cli.options import Json
from monolith.cli.output import show
from monolith.transport.tokens import read_token

__all__ = ["probe"]


def probe(
    address: Annotated[str, typer.Argument(help="host:port of the server.")],
    timeout: Annotated[float, typer.Option(help="Seconds to wait for its answer.", min=0.1)] = 5.0,
    tls_root_certs: Annotated[
        Path | None, typer.Option(help="PEM of whom the server's certificate is signed by, if it has one.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that the server asks for; or $MONOLITH_PS_TOKEN.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask a parameter server how it is. The exit code is 0 if it answered."""
    from monolith.ps.client.server_group import ClientConfig, link_to
    from monolith.transport.calls import BasicCall

    config = ClientConfig(
        timeout=float(timeout), token=read_token(token_file), tls_root_certs=tls_root_certs, max_streams=1
    )
    link = link_to(address, config)
    try:
        answer = json.loads(link.call(BasicCall.HEALTH, "{}").text)
    finally:
        link.close()
    show({"address": address, **answer}, as_json=as_json)
