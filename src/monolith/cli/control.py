"""`monolith control`: stop, resume, save, end and look into a run that is going on."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from monolith.cli.options import Json
from monolith.cli.output import show
from monolith.errors import DeadlineExceededError, InvalidArgumentError
from monolith.train.control import BlockStatus, FeatureRows
from monolith.train.control_server import ControlClient
from monolith.transport.tokens import read_token

__all__ = ["control"]

POLL_SECS = 0.5

RunningModelDir = Annotated[
    str, typer.Argument(help="The model_dir of a run that is going on, a path or URL.", metavar="MODEL_DIR")
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait until the run is between two steps.", min=0.1)]
RunTokenFile = Annotated[
    Path | None,
    typer.Option(help="File with the token of the run. By default the one in MODEL_DIR, then $MONOLITH_PS_TOKEN."),
]
TlsRootCerts = Annotated[Path | None, typer.Option(help="CA bundle (PEM) that signed the certificate of the run.")]
VariableNames = Annotated[
    list[str] | None, typer.Argument(help="Names of dense values. Without any, list them.", metavar="NAME")
]

control = typer.Typer(
    name="control", help="Stop, resume, save, end or look into a run that is going on.", no_args_is_help=True
)


@control.command()
def status(
    model_dir: RunningModelDir,
    timeout: Timeout = 60.0,
    token_file: RunTokenFile = None,
    tls_root_certs: TlsRootCerts = None,
    as_json: Json = False,
) -> None:
    """Show how far the run is.

    It answers also while a step takes long: `seconds_since_step` says for how long.
    """
    with _client(model_dir, timeout, token_file, tls_root_certs) as client:
        show({**asdict(client.status()), **asdict(client.block_status())}, as_json=as_json, title=model_dir)


@control.command()
def stop(
    model_dir: RunningModelDir,
    timeout: Timeout = 60.0,
    token_file: RunTokenFile = None,
    tls_root_certs: TlsRootCerts = None,
    as_json: Json = False,
) -> None:
    """Hold all workers between two steps until `resume`.

    Returns when all are held. The run goes on by itself if the chief is restarted.
    """
    deadline = time.monotonic() + timeout
    with _client(model_dir, timeout, token_file, tls_root_certs) as client:
        blocked = client.stop()
        while blocked.unblocked and time.monotonic() < deadline:
            time.sleep(POLL_SECS)
            blocked = client.block_status()
    show(asdict(blocked), as_json=as_json, title=model_dir)
    if blocked.unblocked:
        raise DeadlineExceededError(_late(blocked, timeout))


@control.command()
def resume(
    model_dir: RunningModelDir,
    timeout: Timeout = 60.0,
    token_file: RunTokenFile = None,
    tls_root_certs: TlsRootCerts = None,
) -> None:
    """Let a run that was stopped continue."""
    with _client(model_dir, timeout, token_file, tls_root_certs) as client:
        client.resume()


@control.command()
def save(
    model_dir: RunningModelDir,
    timeout: Timeout = 600.0,
    token_file: RunTokenFile = None,
    tls_root_certs: TlsRootCerts = None,
    as_json: Json = False,
) -> None:
    """Save a checkpoint now, and print its path when it is durable."""
    with _client(model_dir, timeout, token_file, tls_root_certs) as client:
        show({"checkpoint": client.save()}, as_json=as_json, title=model_dir)


@control.command()
def end(
    model_dir: RunningModelDir,
    timeout: Timeout = 60.0,
    token_file: RunTokenFile = None,
    tls_root_certs: TlsRootCerts = None,
) -> None:
    """End the run in all workers, with a checkpoint.

    It can be resumed later with the same model_dir.
    """
    with _client(model_dir, timeout, token_file, tls_root_certs) as client:
        client.end_run()


@control.command()
def variables(
    model_dir: RunningModelDir,
    names: VariableNames = None,
    timeout: Timeout = 60.0,
    token_file: RunTokenFile = None,
    tls_root_certs: TlsRootCerts = None,
    as_json: Json = False,
) -> None:
    """Show dense values of the model as they are now."""
    with _client(model_dir, timeout, token_file, tls_root_certs) as client:
        if not names:
            shapes = {name: list(shape) for name, shape in client.describe().variables.items()}
            show(shapes, as_json=as_json, title=model_dir)
            return
        found = client.variables(names)
        _require(names, found, "variable", client.describe().variables)
    values: Mapping[str, object] = {
        name: value.tolist() if as_json or value.numel() == 1 else _summary(value) for name, value in found.items()
    }
    show(values, as_json=as_json, title=model_dir)


@control.command()
def rows(
    model_dir: RunningModelDir,
    feature: Annotated[
        list[str] | None, typer.Option(help="Name of a feature. May be repeated. Without any, list them.")
    ] = None,
    ids: Annotated[list[int] | None, typer.Option("--id", help="Id, as it is in the data. May be repeated.")] = None,
    timeout: Timeout = 60.0,
    token_file: RunTokenFile = None,
    tls_root_certs: TlsRootCerts = None,
    as_json: Json = False,
) -> None:
    """Show rows of features with their optimizer state."""
    with _client(model_dir, timeout, token_file, tls_root_certs) as client:
        if not feature:
            show(client.describe().features, as_json=as_json, title=model_dir)
            return
        if not ids:
            raise InvalidArgumentError("--id: expected at least one id")
        found = client.features(feature, ids)
        _require(feature, found, "feature", client.describe().features)
    show({name: _rows(one, as_json=as_json) for name, one in found.items()}, as_json=as_json, title=model_dir)


def _client(model_dir: str, timeout: float, token_file: Path | None, tls_root_certs: Path | None) -> ControlClient:
    token = None if token_file is None else read_token(token_file)
    return ControlClient.of_run(model_dir, token=token, timeout=float(timeout), tls_root_certs=tls_root_certs)


def _late(blocked: BlockStatus, timeout: float) -> str:
    late = ", ".join(map(str, blocked.unblocked))
    return f"stop: workers {late} are still in a step after {timeout:g} s; they will be held when they have made it"


def _require(names: Iterable[str], found: Mapping[str, object], what: str, known: Mapping[str, object]) -> None:
    """Raise `InvalidArgumentError` for a name that the model does not have."""
    if missing := [name for name in names if name not in found]:
        raise InvalidArgumentError(
            f"the model has no {what} {', '.join(map(repr, missing))}; it has {', '.join(map(repr, known))}"
        )


def _summary(value: torch.Tensor) -> str:
    first = ", ".join(f"{one:.6g}" for one in value.flatten()[:4].tolist())
    numbers = value.double()
    return f"{list(value.shape)} mean {numbers.mean():.6g} min {numbers.min():.6g} max {numbers.max():.6g}: {first}" + (
        ", ..." if value.numel() > 4 else ""
    )


def _rows(found: FeatureRows, *, as_json: bool) -> dict[str, object]:
    entries = found.entries
    shown: dict[str, object] = {}
    for at, (wanted, there) in enumerate(zip(found.ids, entries.found.tolist(), strict=True)):
        if not there:
            shown[str(wanted)] = None if as_json else "no row"
            continue
        row: dict[str, object] = {
            "table": found.table,
            "id": int(entries.ids[at]),
            "time": int(entries.times[at]),
            "values": entries.values[at].tolist(),
            "slots": {name: slot[at].tolist() for name, slot in entries.slots.items()},
        }
        shown[str(wanted)] = row
    return shown
