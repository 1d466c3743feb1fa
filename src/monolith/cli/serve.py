"""`monolith serve`: answer requests with exported models."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from monolith.cli.options import Json, size_in_bytes
from monolith.cli.serve_replicas import (
    exports_of,
    following,
    live_status,
    open_replica,
    over_shards,
    run_of_export,
    run_writers,
)
from monolith.cli.serve_streams import ServedStreams
from monolith.cli.serving import Grace, TlsCert, TlsKey, TokenFile
from monolith.cluster.launch.reporting import beating
from monolith.cluster.launch.roles import SHARD_TOKEN_VARIABLE, SHARDS_VARIABLE
from monolith.cluster.liveness import Liveness
from monolith.errors import ConfigError, CorruptFileError, InvalidArgumentError
from monolith.transport.tokens import read_token

if TYPE_CHECKING:
    from monolith.serve.metrics import ServingMetrics
    from monolith.serve.replica import Replica
    from monolith.serve.rollout.router import RolloutRouter
    from monolith.serve.server.config import ServingConfig
    from monolith.serve.server.http import HttpRoute
    from monolith.serve.server.routing import Observer

__all__ = ["serve_models"]

_print_lock = threading.Lock()


def serve_models(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folders of exports: the newest version below each is served. With --run, by default its exports.",
            metavar="[PATHS]",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="Follow the run in this model_dir: answer with the rows and weights it has at the moment."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Follow the run that the export comes from.")] = False,
    servers: Annotated[
        str | None,
        typer.Option(help="Follow these parameter servers, as host:port,host:port. A run says itself where they are."),
    ] = None,
    run_token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token of the run or its servers, if its model_dir does not say it."),
    ] = None,
    run_root_certs: Annotated[
        Path | None, typer.Option(help="CA bundle (PEM) that signed the certificates of the run or its servers.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="Name of the model, by default that of its run or folder. Repeat it for every PATH."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Other than loopback needs TLS and a token.")
    ] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="Port of HTTP. 0 takes a free one.", min=0, max=65535)] = 8000,
    grpc_port: Annotated[int, typer.Option(help="Port of gRPC. 0 takes a free one.", min=0, max=65535)] = 8001,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    token_file: TokenFile = None,
    max_concurrency: Annotated[
        int | None, typer.Option(help="Predictions at the same time, by default one per processor.", min=1)
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Requests that may wait for their turn. Further ones are refused.", min=0)
    ] = 128,
    deadline_secs: Annotated[float, typer.Option(help="Seconds that a request may take at most.", min=0.001)] = 10.0,
    max_message: Annotated[str, typer.Option(help="Largest request that is accepted.")] = "64MiB",
    max_batch_rows: Annotated[
        int, typer.Option(help="Join requests that wait into predictions of up to so many rows. 0: do not.", min=0)
    ] = 0,
    batch_wait_ms: Annotated[
        float, typer.Option(help="How long a request waits for others, with --max-batch-rows.", min=0)
    ] = 1.0,
    poll_secs: Annotated[float, typer.Option(help="Seconds between two looks for newer versions.", min=0.05)] = 1.0,
    shards: Annotated[
        str | None,
        typer.Option(
            help="Embedding shards that hold the rows: host:port,host:port with ; between shards, or file=FOLDER, consul=NAME, "
            "zk=NAME[@HOSTS] or ray=NAME[@HOST:PORT]. See monolith serve-shard.",
            envvar=SHARDS_VARIABLE,
        ),
    ] = None,
    shard_timeout: Annotated[float, typer.Option(help="Seconds that a lookup on shards may take.", min=0.001)] = 1.0,
    partial: Annotated[
        bool, typer.Option(help="Read ids of shards that do not answer as unseen, instead of failing requests.")
    ] = False,
    shard_root_certs: Annotated[
        Path | None, typer.Option(help="CA bundle (PEM) that signed the certificates of shards.")
    ] = None,
    rollout_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the state of rollouts. With it, `monolith rollout` splits and rolls back traffic."
        ),
    ] = None,
    log_requests: Annotated[
        str | None,
        typer.Option(
            help="Write served predictions with their features to this stream, in a folder, on Kafka or on Redis. "
            "It is made if there is none.",
            metavar="STREAM",
        ),
    ] = None,
    log_share: Annotated[float, typer.Option(help="Share of requests that is written, by a hash of their id.")] = 1.0,
    log_without: Annotated[
        list[str] | None, typer.Option(help="Column that is not written. May be repeated.", metavar="COLUMN")
    ] = None,
    labels_from: Annotated[
        str | None,
        typer.Option(
            help="Take labels of served predictions from this stream, such as joined examples. Needs --rollout-dir.",
            metavar="STREAM",
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            help="Column of --labels-from, and the head that it is a label of if there are several. May be repeated. "
            "By default label.",
            metavar="COLUMN[=HEAD]",
        ),
    ] = None,
    stream_settings: Annotated[
        Path | None,
        typer.Option(help="YAML file with settings of these streams that are not in their URL, such as a password."),
    ] = None,
    grace: Grace = 5.0,
    as_json: Json = False,
) -> None:
    """Answer requests with exported models.

    Serves the Open Inference Protocol v2 over HTTP and gRPC until SIGTERM or SIGINT, which let running requests finish. When a
    newer version appears in a folder it replaces the old one without a failed request. The first line of the output has the
    addresses.

    With --run the rows and weights are those that training had a moment ago, and every answer says how old they are. If the run
    does not answer, the newest state that it has saved is served until it does.
    """
    from monolith.serve.server.config import ServingConfig

    given: dict[str, Any] = {
        "host": host,
        "http_port": http_port,
        "grpc_port": grpc_port,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "token": read_token(token_file),
        "max_message_bytes": size_in_bytes(max_message, "--max-message"),
        "max_queue": max_queue,
        "deadline_secs": float(deadline_secs),
        "max_batch_rows": max_batch_rows,
        "batch_wait_ms": float(batch_wait_ms),
    }
    if max_concurrency is not None:
        given["max_concurrency"] = max_concurrency
    models = _names(paths or exports_of(run), name or [])
    if follow and run is None:
        run = run_of_export(next(iter(models.values())))
    if (run is not None or servers is not None) and len(models) > 1:
        raise ConfigError(f"--run: expected one model, which follows the run, got {', '.join(models)}")
    opener: Callable[[str, Path], Replica] = open_replica
    run_token = None if run_token_file is None else read_token(run_token_file)
    if shards is not None:
        if servers is not None:
            raise ConfigError("--servers: shards follow them, not the front end; give it --run for the dense weights")
        token = os.environ.get(SHARD_TOKEN_VARIABLE) or read_token(token_file)
        followed = None if run is None else run_writers(run, run_token, run_root_certs)
        opener = over_shards(shards, shard_timeout, partial, shard_root_certs, token, followed)
    elif run is not None or servers is not None:
        opener = following(run, servers, run_token, run_root_certs, rollout_dir)
    with beating(Liveness().heartbeat_secs):
        _serve(
            models,
            ServingConfig(**given),
            opener,
            rollout_dir,
            ServedStreams(
                log_requests=log_requests,
                log_share=log_share,
                log_without=log_without or (),
                labels_from=labels_from,
                labels=label or (),
                settings_file=stream_settings,
            ),
            run=run,
            poll_secs=poll_secs,
            grace=grace,
            as_json=as_json,
        )


def _serve(
    models: dict[str, Path],
    config: ServingConfig,
    opener: Callable[[str, Path], Replica],
    rollout_dir: Path | None,
    streams: ServedStreams,
    *,
    run: Path | None,
    poll_secs: float,
    grace: float,
    as_json: bool,
) -> None:
    from monolith.cli.rollout import open_rollouts, watch_options
    from monolith.serve.metrics import ServingMetrics
    from monolith.serve.repository import ModelRepository
    from monolith.serve.server.model_server import ModelServer
    from monolith.serve.shards.front_end import ShardCollector
    from monolith.serve.watch import VersionWatch, export_versions

    def swapped(replica: Replica) -> None:
        event = {"event": "version", "model": replica.name, "version": replica.version}
        _say(event, f"{replica.name}: version {replica.version}", as_json)

    repository = ModelRepository()
    with contextlib.ExitStack() as stack:
        stack.callback(repository.close)
        router = None if rollout_dir is None else open_rollouts(rollout_dir, repository, models, opener)
        if router is not None:
            stack.callback(router.close)
        for name, path in models.items():
            if not (path / "manifest.json").is_file() and not export_versions(path):
                raise CorruptFileError(f"{path}: has no complete export; run monolith export first")
            if not repository.ready(name):  # a rollout has loaded its versions
                repository.add(opener(name, path))
        metrics = ServingMetrics(repository)
        metrics.collectors.append(ShardCollector(repository))
        observers, routes = _observers_and_routes(metrics, router, run)
        log = streams.open_log()
        if log is not None:
            stack.callback(log.close)  # after the server, whose last requests it writes
            observers.append(log)
            metrics.collectors.append(log)
        labels = streams.open_labels(router, rollout_dir)
        if labels is not None:
            stack.callback(labels.close)
            metrics.collectors.append(labels)
        server = stack.enter_context(
            ModelServer(
                repository,
                config,
                router=router,
                observers=observers,
                extra_routes=routes,
                assigns_ids=log is not None,
            )
        )
        metrics.in_flight = lambda: server.handler.admission.admitted
        metrics.start()
        stack.callback(metrics.close)
        _stop_on_signals(server.ask_to_stop)
        for name, path in models.items():
            if (path / "manifest.json").is_file():
                continue  # one export: it never changes

            def open_version(folder: Path, name: str = name) -> Replica:
                return opener(name, folder)

            current = repository.default(name)
            watch = VersionWatch(
                repository,
                path,
                current=current,
                open_version=open_version,
                poll_secs=poll_secs,
                on_swap=swapped,
                **watch_options(router, name),
            )
            stack.callback(watch.close)
        served = {name: repository.default(name) for name in models}
        addresses = {"http": server.http_address, "grpc": server.grpc_address}
        text = ", ".join(f"{name} version {version}" for name, version in served.items())
        _say(
            {"event": "serving", **addresses, "models": served, "pid": os.getpid()},
            f"serving {text} on {_url(config, server.http_address)} and gRPC {server.grpc_address}",
            as_json,
        )
        server.wait()
        clean = server.close(grace=grace)
    _say({"event": "stopped", "clean": clean}, "stopped" if clean else "stopped, requests were still running", as_json)


def _observers_and_routes(
    metrics: ServingMetrics, router: RolloutRouter | None, run: Path | None
) -> tuple[list[Observer], tuple[HttpRoute, ...]]:
    from monolith.cli.rollout import page_options
    from monolith.serve.page import Overview, Page, RunCollector, row_history
    from monolith.serve.rollout.routes import RolloutCollector, rollout_routes

    history = None if run is None else row_history(run)
    runs: Callable[[], list[dict[str, object]]] = list
    if run is not None:
        runs = Overview([], [run], live=live_status).runs
        metrics.collectors.append(RunCollector(runs))
    routes = Page(metrics, history=history, runs=runs, **page_options(router)).routes()
    if router is None:
        return [metrics], routes
    metrics.collectors.append(RolloutCollector(router))
    return [metrics, router], (*routes, *rollout_routes(router))


def _names(paths: Sequence[Path], names: Sequence[str]) -> dict[str, Path]:
    if names and len(names) != len(paths):
        raise ConfigError(f"--name: expected {len(paths)}, one for each PATH, got {len(names)}")
    models: dict[str, Path] = {}
    for number, path in enumerate(paths):
        name = names[number] if names else _default_name(path)
        if not name or "/" in name:
            raise ConfigError(f"--name: expected a name without slashes for {path}, got {name!r}")
        if name in models:
            raise ConfigError(f"--name: {name!r} stands for {models[name]} and {path}; give each PATH a --name")
        if not path.is_dir():
            raise InvalidArgumentError(f"{path}: expected the folder of an export, or one with numbered exports")
        models[name] = path
    return models


def _default_name(path: Path) -> str:
    """Return the last part of a path that is not a version or the usual name of the folder of exports."""
    parts = [part for part in path.resolve().parts if not part.isdecimal() and part not in ("exported_models", "/")]
    return parts[-1] if parts else "model"


def _url(config: ServingConfig, address: str) -> str:
    return f"{'http' if config.tls_cert is None else 'https'}://{address}"


def _stop_on_signals(stop: Callable[[], None]) -> None:
    def ask(number: int, frame: FrameType | None) -> None:
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)


def _say(event: dict[str, object], text: str, as_json: bool) -> None:
    with _print_lock:
        sys.stdout.write((json.dumps(event) if as_json else text) + "\n")
        sys.stdout.flush()
