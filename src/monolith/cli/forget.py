"""`monolith forget`: remove the rows of ids from a run that is going on, with a receipt of what still has a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from monolith.cli.control import RunningModelDir, RunTokenFile, TlsRootCerts
from monolith.cli.options import Json
from monolith.cli.output import show
from monolith.errors import InvalidArgumentError, MonolithError
from monolith.follow.calls import Confirm, Confirmed, FollowCall
from monolith.follow.follower import Writer
from monolith.follow.run_service import ADDRESS_FILE, service_address
from monolith.serve.follow import RunWriters
from monolith.state.copies import CopiesOnDisk, FileCopy, SavedCopy, find_copies
from monolith.state.forget import drop_saved, forget_saved
from monolith.state.paths import base_name
from monolith.train.control_server import ControlClient
from monolith.train.forgetting import Forgotten, ForgottenTable
from monolith.transport.tokens import read_token
from monolith.urls import is_remote

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
    ids: Annotated[
        list[int], typer.Argument(help="Id, as it is in the data. Write -- before negative ones.", metavar="ID")
    ],
    table: Annotated[list[str] | None, typer.Option(help="Only from this table. May be repeated.")] = None,
    feature: Annotated[list[str] | None, typer.Option(help="Only ids of this feature. May be repeated.")] = None,
    purge: Annotated[
        bool, typer.Option("--purge", help="Write a new snapshot now, and remove older checkpoints with a copy.")
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="No run is going on: read its newest state and save it without the rows.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the run.", min=0.1)] = 600.0,
    token_file: RunTokenFile = None,
    tls_root_certs: TlsRootCerts = None,
    as_json: Json = False,
) -> None:
    """Remove the rows of ids from a run, and print a receipt.

    The rows leave training, its servers or ranks and its replicas. A checkpoint without them is written before the receipt. The
    receipt says which older files still have a copy, and until when. With --offline, ids are those of the tables.
    """
    if outside := [one for one in ids if not -(2**63) <= one < 2**63]:
        raise InvalidArgumentError(f"ID: expected int64, got {', '.join(map(str, outside))}")
    asked = _Asked(model_dir=model_dir, ids=tuple(ids), tables=tuple(table or ()), features=tuple(feature or ()))
    token = None if token_file is None else read_token(token_file)
    if offline:
        receipt, copies = _offline(asked, token, purge=purge)
    else:
        receipt, copies = _online(asked, token, tls_root_certs, purge=purge, timeout=timeout)
    if as_json:
        show(receipt, as_json=True)
    else:
        _print(receipt, copies)


@dataclass(frozen=True, kw_only=True)
class _Asked:
    model_dir: str
    ids: tuple[int, ...]
    tables: tuple[str, ...]
    features: tuple[str, ...]


def _online(
    asked: _Asked, token: str | None, tls_root_certs: Path | None, *, purge: bool, timeout: float
) -> tuple[dict[str, object], CopiesOnDisk]:
    if service_address(asked.model_dir) is None:
        raise InvalidArgumentError(
            f"{asked.model_dir}: no run is going on here; start it, or forget in its saved state with --offline"
        )
    with ControlClient.of_run(asked.model_dir, token=token, timeout=timeout, tls_root_certs=tls_root_certs) as client:
        forgotten = client.forget(asked.ids, tables=asked.tables, features=asked.features, renew=purge)
        run = RunWriters(asked.model_dir, token=token, tls_root_certs=tls_root_certs)
        replicas = _replicas([*run.writers(), *map(run.server, client.describe().servers)])
        return _searched(asked, forgotten, replicas, client.drop_checkpoints if purge else None)


def _offline(asked: _Asked, token: str | None, *, purge: bool) -> tuple[dict[str, object], CopiesOnDisk]:
    if asked.features:
        raise InvalidArgumentError("--feature: a saved state has tables, not features; use --table")
    _refuse_running(asked.model_dir, token)
    saved = forget_saved(asked.model_dir, asked.ids, tables=asked.tables, full=purge)
    tables = {name: ForgottenTable(features=(), ids=asked.ids, removed=count) for name, count in saved.removed.items()}
    forgotten = Forgotten(step=saved.step, checkpoint=saved.checkpoint, sequence=saved.sequence, tables=tables)
    return _searched(asked, forgotten, {}, partial(drop_saved, asked.model_dir) if purge else None)


def _refuse_running(model_dir: str, token: str | None) -> None:
    """Raise if a run goes on. One with a local model_dir that cannot be asked is recognised by the lock of its log."""
    address = service_address(model_dir)
    if address is None:
        return
    if not is_remote(model_dir):
        try:
            ControlClient.of_run(model_dir, token=token).close()
        except InvalidArgumentError:
            return
    raise InvalidArgumentError(
        f"{model_dir}: a run is going on here, at {address}; leave --offline out, or remove {ADDRESS_FILE} if it was killed"
    )


def _searched(
    asked: _Asked,
    forgotten: Forgotten,
    replicas: dict[str, dict[str, object]],
    drop: Callable[[Sequence[str]], None] | None,
) -> tuple[dict[str, object], CopiesOnDisk]:
    """Return the receipt and the copies that are left, after `drop` was called with checkpoints that hold some."""
    wanted = {name: one.ids for name, one in forgotten.tables.items()}
    copies = find_copies(asked.model_dir, wanted)
    doomed = [] if drop is None else _holding(forgotten, copies)
    if drop is not None and doomed:
        drop(doomed)
        copies = find_copies(asked.model_dir, wanted)
    return _receipt(asked, forgotten, copies, replicas, doomed), copies


def _replicas(writers: Iterable[Writer]) -> dict[str, dict[str, object]]:
    """Ask every process that holds rows how many replicas follow it, and how many of them have applied the removal."""
    found: dict[str, dict[str, object]] = {}
    for writer in writers:
        try:
            with closing(writer.connect()) as link:
                text = Confirm(wait=REPLICA_SECS).model_dump_json()
                answer = link.call(FollowCall.CONFIRM, text, timeout=REPLICA_SECS + 5.0)
            found[writer.name] = dict(Confirmed.from_json(answer.text))
        except MonolithError as error:
            found[writer.name] = {"followers": None, "confirmed": None, "error": str(error)}
    return found


def _holding(forgotten: Forgotten, copies: CopiesOnDisk) -> list[str]:
    """Return the names of checkpoints that would bring rows back, or need files with copies, and may be removed."""
    newest = "" if forgotten.checkpoint is None else base_name(forgotten.checkpoint)
    kept = {copy.name for copy in copies.checkpoints if not copy.removable}
    holding = {copy.name for copy in copies.checkpoints} | {name for copy in copies.files for name in copy.needed_by}
    return sorted(holding - kept - {newest})


def _receipt(
    asked: _Asked,
    forgotten: Forgotten,
    copies: CopiesOnDisk,
    replicas: dict[str, dict[str, object]],
    dropped: Sequence[str],
) -> dict[str, object]:
    return {
        "model_dir": asked.model_dir,
        "ids": list(asked.ids),
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
    rows = {name: _text(one["removed"], one["features"]) for name, one in tables.items()}
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
    """Return one line for all copies that stay equally long."""
    if not found:
        return [f"{title}: none"]
    alike: dict[str, list[str]] = {}
    for copy in found:
        alike.setdefault(copy.until, []).append(copy.name if isinstance(copy, SavedCopy) else copy.path)
    more = {until: f" and {len(names) - 1} more" if len(names) > 1 else "" for until, names in alike.items()}
    return [f"{title}:", *(f"  {names[0]}{more[until]}: until {until}" for until, names in alike.items())]


def _text(removed: int, features: Sequence[str]) -> str:
    return f"{removed} row{'' if removed == 1 else 's'}" + (f", of {', '.join(features)}" if features else "")
