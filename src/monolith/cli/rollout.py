"""`monolith rollout`: split the traffic of a running model server, promote and roll back versions, send labels."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

import typer
from typer.core import TyperGroup

from monolith.cli.options import Json, read_yaml
from monolith.cli.output import show as show_answer
from monolith.errors import InvalidArgumentError, ModelNotFoundError, ProtocolError, UnavailableError
from monolith.serve.rollout.labels import ServedLabel, read_label_file
from monolith.serve.rollout.plan import RolloutPlan
from monolith.serve.rollout.router import RolloutRouter
from monolith.serve.watch import export_versions
from monolith.transport.errors import decode_error
from monolith.transport.server import is_loopback
from monolith.transport.tokens import read_token

if TYPE_CHECKING:
    from monolith.serve.replica import Replica
    from monolith.serve.repository import ModelRepository

__all__ = ["open_rollouts", "page_options", "rollout", "watch_options"]

Url = Annotated[str, typer.Argument(help="Address of the server, http://HOST:PORT.", metavar="URL")]
OperatorTokenFile = Annotated[
    Path | None, typer.Option(help="File with the token of the server. By default $MONOLITH_PS_TOKEN.")
]
RootCerts = Annotated[Path | None, typer.Option(help="CA bundle (PEM) that signed the server's certificate.")]
Model = Annotated[str | None, typer.Option(help="Name of the model. May be left out if the server has one.")]
_TIMEOUT_SECS = 60.0
_LABELS_OF_A_REQUEST = 5000


class _UrlFirst(TyperGroup):
    """Also takes the URL before the verb: `monolith rollout URL show`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - typer may bring its own click
        if len(args) > 1 and args[0] not in self.commands and args[1] in self.commands:
            args = [args[1], args[0], *args[2:]]
        return super().parse_args(ctx, args)


rollout = typer.Typer(
    name="rollout",
    cls=_UrlFirst,
    help="Split the traffic of a server between versions. Roll back.",
    no_args_is_help=True,
)


@rollout.command(name="show")
def show_rollouts(
    url: Url, token_file: OperatorTokenFile = None, tls_root_certs: RootCerts = None, as_json: Json = False
) -> None:
    """Show plans, events, and the quality of versions by labels."""
    state = _Server(url, token_file, tls_root_certs).call("GET", "/rollout")
    show_answer(state if as_json else _readable(state), as_json=as_json, title=url)


@rollout.command(name="set")
def set_plan(
    url: Url,
    model: Model = None,
    plan: Annotated[
        Path | None, typer.Option(help="YAML or JSON file with a plan. Without it, fields of the plan in force change.")
    ] = None,
    stable: Annotated[int | None, typer.Option(help="Version for all other requests.")] = None,
    candidate: Annotated[int | None, typer.Option(help="Version that is tried.")] = None,
    share: Annotated[float | None, typer.Option(help="Share of requests for the candidate, 0 to 1.")] = None,
    split_by: Annotated[str | None, typer.Option(help="Column that decides, such as user_id.")] = None,
    shadow: Annotated[list[int] | None, typer.Option(help="Version that answers unseen. May be repeated.")] = None,
    min_labels: Annotated[int | None, typer.Option(help="Labels of each version before there is a verdict.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Allow a candidate that was rolled back before.")] = False,
    token_file: OperatorTokenFile = None,
    tls_root_certs: RootCerts = None,
    as_json: Json = False,
) -> None:
    """Put a plan into force. It is durable when the command returns.

    Fields that are not given keep their values. A plan file has all fields, with bounds.
    """
    server = _Server(url, token_file, tls_root_certs)
    fields: dict[str, Any] = dict(read_yaml(plan)) if plan is not None else server.plan(model)
    given = {"model": model, "stable": stable, "candidate": candidate, "share": share, "split_by": split_by}
    fields.update({name: value for name, value in given.items() if value is not None})
    if shadow:
        fields["shadows"] = shadow
    if min_labels is not None:
        fields["bounds"] = {**fields.get("bounds", {}), "min_labels": min_labels}
    checked = RolloutPlan.from_json(json.dumps(fields))
    answer = server.call("POST", f"/rollout{'?again=true' if again else ''}", checked.model_dump(mode="json"))
    show_answer(answer, as_json=as_json, title=url)


@rollout.command()
def promote(
    url: Url,
    model: Model = None,
    token_file: OperatorTokenFile = None,
    tls_root_certs: RootCerts = None,
    as_json: Json = False,
) -> None:
    """Make the candidate the stable version."""
    server = _Server(url, token_file, tls_root_certs)
    show_answer(server.call("POST", "/rollout/promote", {"model": server.model(model)}), as_json=as_json, title=url)


@rollout.command()
def rollback(
    url: Url,
    model: Model = None,
    to: Annotated[
        str | None,
        typer.Option(
            help="Moment of the followed run to go back to: 10m-ago, step=N, sequence=N, time=SECONDS, or now to follow again.",
            metavar="MOMENT",
        ),
    ] = None,
    reason: Annotated[str, typer.Option(help="For the record.")] = "asked by an operator",
    token_file: OperatorTokenFile = None,
    tls_root_certs: RootCerts = None,
    as_json: Json = False,
) -> None:
    """Send all requests to the stable version, or go back in time.

    Without a candidate, the version before the last promotion is stable again.
    """
    server = _Server(url, token_file, tls_root_certs)
    body = {"model": server.model(model), "to": to, "reason": reason}
    show_answer(server.call("POST", "/rollout/rollback", body), as_json=as_json, title=url)


@rollout.command()
def labels(
    url: Url,
    file: Annotated[Path, typer.Argument(help="JSON lines, or .parquet, with request_id and label.", metavar="FILE")],
    token_file: OperatorTokenFile = None,
    tls_root_certs: RootCerts = None,
    as_json: Json = False,
) -> None:
    """Send the labels in a file, and show how many were joined."""
    server = _Server(url, token_file, tls_root_certs)
    total: dict[str, int] = {}
    for batch in _parts(file):
        body = b"".join(label.model_dump_json(exclude_none=True).encode() + b"\n" for label in batch)
        for kind, count in server.call("POST", "/labels", body).items():
            total[kind] = total.get(kind, 0) + int(count)
    show_answer(total, as_json=as_json, title=url)


def _parts(file: Path) -> Iterator[list[ServedLabel]]:
    for batch in read_label_file(file):
        for start in range(0, len(batch), _LABELS_OF_A_REQUEST):
            yield batch[start : start + _LABELS_OF_A_REQUEST]


def open_rollouts(
    folder: Path, repository: ModelRepository, models: Mapping[str, Path], opener: Callable[[str, Path], Replica]
) -> RolloutRouter:
    """Return the rollouts whose state is in `folder`, for a server of the exports below the folders of `models`.

    The versions of plans in force are loaded by `opener` and added to `repository`.
    """

    def open_version(model: str, version: int) -> Replica:
        path = models.get(model)
        there = {} if path is None else export_versions(path)
        if version not in there:
            known = ", ".join(map(str, there)) or "no numbered exports"
            raise ModelNotFoundError(f"model {model!r}: has no version {version}; {path} has {known}")
        return opener(model, there[version])

    return RolloutRouter(repository, folder, open_version=open_version)


def page_options(router: RolloutRouter | None) -> dict[str, Any]:
    """Return the arguments of `Page` that show the rollouts of a server."""
    if router is None:
        return {}
    return {"quality": router.quality, "rollback": router.rollback_possible}


def watch_options(router: RolloutRouter | None, model: str) -> dict[str, Any]:
    """Return the arguments of `VersionWatch` with which a rollout of the model decides about its versions."""
    return {} if router is None else {"wanted": lambda: not router.plans(model), "swap": router.swap}


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Follow none: the token is for the server that was named."""


class _Server:
    """A model server, as its operator sees it."""

    def __init__(self, url: str, token_file: Path | None, tls_root_certs: Path | None) -> None:
        address = url if "://" in url else f"http://{url}"
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InvalidArgumentError(f"URL: expected http://HOST:PORT or https://HOST:PORT, got {url!r}")
        self._token = read_token(token_file)
        if self._token and parts.scheme == "http" and not is_loopback(parts.hostname):
            raise InvalidArgumentError(
                f"URL: {url!r} would send the token unencrypted to another machine; use https:// and --tls-root-certs"
            )
        self._url = address.rstrip("/")
        self._context = ssl.create_default_context(cafile=None if tls_root_certs is None else str(tls_root_certs))

    def call(self, method: str, path: str, body: Mapping[str, object] | bytes | None = None) -> dict[str, Any]:
        """Send a request and return the JSON of its answer."""
        data = json.dumps(body).encode() if isinstance(body, Mapping) else body
        headers = {"content-type": "application/json"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        opener = build_opener(_NoRedirect, HTTPSHandler(context=self._context), ProxyHandler({}))
        try:
            request = Request(self._url + path, data=data, headers=headers, method=method)
            with opener.open(request, timeout=_TIMEOUT_SECS) as answer:
                return _object(answer, self._url)
        except HTTPError as error:
            with error:
                said = _error_text(error)
            name = error.headers.get("monolith-error") or "ServerError"
            raise decode_error(json.dumps({"error": name, "message": said}), self._url) from None
        except (OSError, HTTPException) as error:
            raise UnavailableError(f"{self._url}: no answer: {getattr(error, 'reason', error)}") from None

    def model(self, given: str | None) -> str:
        """Return the model that is meant: the one that was named, the only one that is served, or the only one with a plan."""
        if given is not None:
            return given
        state = self.call("GET", "/rollout")
        for models in (list(state["served"]), list(state["models"])):
            if len(models) == 1:
                return str(models[0])
        known = ", ".join(map(repr, state["served"])) or "none"
        raise InvalidArgumentError(f"--model: expected the name of a model; models that are served: {known}")

    def plan(self, model: str | None) -> dict[str, Any]:
        """Return the fields of the plan in force. Empty if there is none."""
        models = self.call("GET", "/rollout")["models"]
        if model is None and len(models) == 1:
            (model,) = models
        return dict(models[model]["plan"]) if model in models else {}


def _object(answer: HTTPResponse, url: str) -> dict[str, Any]:
    try:
        tree = json.loads(answer.read())
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        raise ProtocolError(f"{url}: expected a JSON object, got something else; is it a monolith server?")
    return tree


def _error_text(error: HTTPError) -> str:
    try:
        return str(json.loads(error.read(65536))["error"])
    except (ValueError, KeyError, TypeError, OSError):
        return f"HTTP status {error.code} {error.reason}; is it a monolith server with a rollout?"


def _readable(state: Mapping[str, Any]) -> dict[str, object]:
    """Return what a person wants to know first."""
    rows: dict[str, object] = {} if state["models"] else {"plans": "none"}
    for name, rollout_of in state["models"].items():
        plan = RolloutPlan.from_json(json.dumps(rollout_of["plan"]))
        rows[name] = plan.describe()
        for version, answers in rollout_of["answers"].items():
            rows[f"{name}.{version}.answers"] = answers
        for version, known in rollout_of["quality"].items():
            for head, parts in known["heads"].items():
                rows[f"{name}.{version}.{head}"] = _quality_text(parts)
            if "shadow" in known:
                rows[f"{name}.{version}.shadow"] = _difference_text(known["shadow"])
        for event in rollout_of["events"][-3:]:
            when = datetime.fromtimestamp(event["time"], UTC).isoformat(" ", "seconds")
            by = "automatic " if event["automatic"] else ""
            rows[f"{name} {when}"] = f"{by}{event['kind']} {event['version']}: {event['reason']}"
    rows.update(state["labels"])
    if not state["saved"]:
        rows["saved"] = "no: the state could not be written to disk"
    return rows


def _quality_text(parts: Mapping[str, Mapping[str, float | None]]) -> str:
    # A change of the plan begins another window. Until it has labels, the numbers of all time are of more use.
    since = "window" if parts["window"]["labels"] else "total"
    numbers = parts[since]
    shown = ", ".join(f"{name} {_number(numbers[name])}" for name in ("log_loss", "calibration", "auc"))
    return f"{since}: {numbers['labels']} labels, {shown}"


def _difference_text(shadow: Mapping[str, float | None]) -> str:
    mean, most = (_number(shadow[f"{what}_absolute_difference"]) for what in ("mean", "max"))
    return f"{shadow['predictions']} predictions, mean difference {mean}, largest {most}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
