"""How `monolith serve` opens the replicas of models: from an export, following a run, or over embedding shards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from monolith.errors import ConfigError, InvalidArgumentError, MonolithError

if TYPE_CHECKING:
    from monolith.serve.follow import RunWriters
    from monolith.serve.predictor import Predictor
    from monolith.serve.replica import Replica

__all__ = ["exports_of", "following", "live_status", "open_replica", "over_shards", "run_of_export", "run_writers"]

_log = logging.getLogger(__name__)
FIRST_ROWS_SECS = 10.0
"""Seconds that a replica waits for the rows of its run before it serves what it has."""
_ANSWER_SECS = 2.0
"""Seconds in which a run must say how far it is."""


def open_replica(name: str, path: Path) -> Replica:
    """Return a replica of the export at `path`, or of the newest one below it, that is ready to answer."""
    from monolith.serve.predictor import load
    from monolith.serve.replica import Replica

    return _warmed(Replica(name, load(path)))


def _warmed(replica: Replica) -> Replica:
    from monolith.serve.server.model_server import warm_up

    try:
        warm_up(replica)
    except BaseException:
        replica.close()
        raise
    return replica


def exports_of(run: Path | None) -> list[Path]:
    """Return where the exports of a run are, if none are given."""
    if run is None:
        raise ConfigError("PATHS: expected folders of exports, or --run with the model_dir of a run that has some")
    folder = run / "exported_models"
    if not folder.is_dir():
        raise InvalidArgumentError(f"{folder}: the run has no export yet; run monolith export, or give the PATH of one")
    return [folder]


def run_of_export(path: Path) -> Path:
    """Return the model_dir of the run that the newest export of a folder comes from."""
    from monolith.serve.manifest import Signature, version_folder

    folder = version_folder(path)
    origin = Signature.from_json((folder / "signature.json").read_text()).run
    if origin is None:
        raise InvalidArgumentError(f"{folder}: does not say which run it comes from; give --run")
    return Path(origin.model_dir)


def run_writers(run: Path, token: str | None, root_certs: Path | None) -> RunWriters:
    """Return what finds the writers of a run."""
    from monolith.serve.follow import RunWriters

    return RunWriters(str(run), token=token, tls_root_certs=root_certs)


def following(
    run: Path | None, servers: str | None, token: str | None, root_certs: Path | None, rollout_dir: Path | None
) -> Callable[[str, Path], Replica]:
    """Return what opens a replica that follows a run or parameter servers."""
    from monolith.follow.run_service import known_identity
    from monolith.serve.follow import TrainingFollower, server_writers
    from monolith.serve.predictor import load
    from monolith.serve.replica import Replica

    def follower_of(name: str, predictor: Predictor) -> TrainingFollower:
        origin, found_run = predictor.signature.run, "" if run is None else known_identity(str(run))
        if origin is not None and found_run not in ("", origin.identity):
            # No amount of waiting would help.
            raise ConfigError(
                f"--run: {run} has run {found_run}, and the model {name!r} was exported from run {origin.identity}, in "
                f"{origin.model_dir}; follow that, or export the model from {run}"
            )
        held = None if rollout_dir is None else rollout_dir / f"{name}.held"
        if servers is None:
            assert run is not None
            return TrainingFollower.of_run(predictor, run_writers(run, token, root_certs), held_file=held)
        found, find = server_writers(servers.split(","), token=token, tls_root_certs=root_certs)
        folder = None if run is None else str(run)
        return TrainingFollower(predictor, found, find_writer=find, model_dir=folder, held_file=held)

    def open_following(name: str, path: Path) -> Replica:
        predictor = load(path)
        follower = follower_of(name, predictor)
        try:
            if not follower.wait_until_read(FIRST_ROWS_SECS):
                point = follower.catch_up()
                state = "the export" if point is None else f"step {point.step}, the newest that was saved"
                _log.warning("the run does not answer yet; serving %s until it does", state)
            elif missing := follower.unfollowed():
                names = ", ".join(missing[:5])
                _log.warning(
                    "the run does not publish %d weights of the model, which stay as exported: %s", len(missing), names
                )
            return _warmed(Replica(name, predictor, follower=follower))
        except BaseException:
            follower.close()
            raise

    return open_following


def over_shards(
    shards: str,
    timeout: float,
    partial: bool,
    root_certs: Path | None,
    token: str | None,
    run: RunWriters | None,
) -> Callable[[str, Path], Replica]:
    """Return what opens a replica whose rows are on shards."""
    from monolith.serve.shards.front_end import sharded_replica
    from monolith.serve.shards.shard_replica import ShardClientConfig

    config = ShardClientConfig(
        timeout=float(timeout), partial="initial" if partial else "refuse", tls_root_certs=root_certs, token=token
    )
    return lambda name, path: _warmed(sharded_replica(name, path, shards, config=config, run=run))


def live_status(model_dir: Path) -> Mapping[str, object] | None:
    """Return what a run says about itself, or why it does not answer. None if none goes on: it has ended, or has not begun."""
    from monolith.follow.run_service import service_address
    from monolith.train.control_server import ControlClient

    try:
        if service_address(str(model_dir)) is None:
            return None
        with ControlClient.of_run(str(model_dir), timeout=_ANSWER_SECS) as client:
            return {"answers": True, **asdict(client.status())}
    except MonolithError as error:
        return {"answers": False, "problem": str(error)}
