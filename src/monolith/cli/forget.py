"""`monolith forget`: remove the rows of ids from a run that is going on, with a receipt of what still has a copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from monolith.cli.control import RunningModelDir, RunTokenFile, TlsRootCerts
from monolith.cli.options import Json
from monolith.cli.output import show
from monolith.errors import InvalidArgumentError, MonolithError
from monolith.follow.calls import Confirm, Confirmed, FollowCall
from monolith.follow.follower import Writer
from monolith.follow.run_service import service_address
from monolith.serve.follow import RunWriters
from monolith.state.copies import CopiesOnDisk, FileCopy, SavedCopy, find_copies
from monolith.state.paths import base_name
from monolith.train.control_server import ControlClient
from monolith.train.forgetting import Forgotten
from monolith.transport.tokens import read_token

__all__ = ["forget"]

REPLICA_SECS = 5.0
"""Seconds to wait until replicas have confirmed."""
NOTES = (
    "dense weights and rows of other ids keep what they have learnt from examples with these ids",
    "an id that comes again in the data gets a new row; remove it from the data too",
    "a replica that does not follow the run at this moment keeps its copy until it follows again",
)


def forget(
    model_dir: RunningModelDir,
    ids: Annotated[list[int], typer.Argument(help="Ids as they are in the data. Write -- before negative ones.")],
    table: Annotated[list[str] | None, typer.Option(help="Only from this table. May be repeated.")] = None,
    feature: Annotated[list[str] | None, typer.Option(help="Only ids of this feature. May be repeated.")] = None,
    purge: Annotated[
        bool, typer.Option("--purge", help="Write a new snapshot now, and remove older checkpoints with a copy.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the run.", min=0.1)] = 600.0,
    token_file: RunTokenFile = None,
    tls_root_certs: TlsRootCerts = None,
    as_json: Json = False,
) -> None:
    """Remove the rows of ids from a run that is going on, and print a receipt.

    The rows leave training, its servers or ranks and its replicas. A checkpoint without them is written before the receipt. The
    receipt says which older files still have a copy, and until when.
    """
    if outside := [one for one in ids if not -(2**63) <= one < 2**63]:
        raise InvalidArgumentError(f"ID: expected int64, got {', '.join(map(str, outside))}")
    if service_address(model_dir) is None:
        raise InvalidArgumentError(
            f"{model_dir}: no run is going on here; start it and forget then: rows are removed by the run that holds them"
        )
    token = None if token_file is None else read_token(token_file)
    with ControlClient.of_run(model_dir, token=token, timeout=timeout, tls_root_certs=tls_root_certs) as client:
        forgotten = client.forget(ids, tables=table or (), features=feature or (), renew=purge)
        run = RunWriters(model_dir, token=token, tls_root_certs=tls_root_certs)
        writers = [*run.writers(), *map(run.server, client.describe().servers)]
        replicas = _replicas(writers)
        wanted = {name: one.ids for name, one in forgotten.tables.items()}
        copies = find_copies(model_dir, wanted)
        dropped = _purged(client, forgotten, copies) if purge else []
        if dropped:
            copies = find_copies(model_dir, wanted)
    receipt = _receipt(model_dir, ids, forgotten, copies, replicas, dropped)
    if as_json:
        show(receipt, as_json=True)
    else:
        _print(receipt, copies)


def _replicas(writers: Iterable[Writer]) -> dict[str, dict[str, object]]:
    """Ask every process that holds rows how many replicas follow it, and how many of them have applied the removal."""
    found: dict[str, dict[str, object]] = {}
    for writer in writers:
        try:
            with closing(writer.connect()) as link:
                asked = Confirm(wait=REPLICA_SECS)
                answer = link.call(FollowCall.CONFIRM, asked.model_dump_json(), timeout=REPLICA_SECS + 5.0)
            found[writer.name] = dict(Confirmed.from_json(answer.text))
        except MonolithError as error:
            found[writer.name] = {"followers": None, "confirmed": None, "error": str(error)}
    return found


def _purged(client: ControlClient, forgotten: Forgotten, copies: CopiesOnDisk) -> list[str]:
    """Remove the checkpoints that would bring rows back or that need files with copies. Returns their names."""
    newest = "" if forgotten.checkpoint is None else base_name(forgotten.checkpoint)
    kept = {copy.name for copy in copies.checkpoints if not copy.removable}
    holding = {copy.name for copy in copies.checkpoints} | {name for copy in copies.files for name in copy.needed_by}
    doomed = sorted(holding - kept - {newest})
    if doomed:
        client.drop_checkpoints(doomed)
    return doomed


def _receipt(
    model_dir: str,
    ids: Sequence[int],
    forgotten: Forgotten,
    copies: CopiesOnDisk,
    replicas: dict[str, dict[str, object]],
    dropped: Sequence[str],
) -> dict[str, object]:
    return {
        "model_dir": model_dir,
        "ids": list(ids),
        "step": forgotten.step,
        "removed": sum(one.removed for one in forgotten.tables.values()),
        "tables": {name: asdict(one) for name, one in forgotten.tables.items()},
        "absent_since": {"checkpoint": forgotten.checkpoint, "sequence": forgotten.sequence},
        "replicas": replicas,
        "purged": list(dropped),
        "checkpoints": [asdict(copy) for copy in copies.checkpoints],
        "files": [asdict(copy) for copy in copies.files],
        "unread": list(copies.unread),
        "notes": list(NOTES),
    }


def _print(receipt: dict[str, object], copies: CopiesOnDisk) -> None:
    shown = {name: receipt[name] for name in ("ids", "step", "removed", "absent_since", "replicas", "purged")}
    tables = receipt["tables"]
    assert isinstance(tables, dict)
    rows = {name: f"{one['removed']} rows, of {', '.join(one['features'])}" for name, one in tables.items()}
    show({**shown, "tables": rows}, as_json=False, title=str(receipt["model_dir"]))
    console = Console(highlight=False, soft_wrap=True)
    for line in (
        *_lines("checkpoints that would bring rows back", copies.checkpoints),
        *_lines("files that still have bytes of the rows", copies.files),
        *(f"not searched: {problem}" for problem in copies.unread),
        *(f"note: {note}" for note in NOTES),
    ):
        console.print(line, markup=False)


def _lines(title: str, found: Sequence[SavedCopy] | Sequence[FileCopy]) -> list[str]:
    if not found:
        return [f"{title}: none"]
    names = [(copy.name if isinstance(copy, SavedCopy) else copy.path, copy.until) for copy in found]
    return [f"{title}:", *(f"  {name}: until {until}" for name, until in names)]
