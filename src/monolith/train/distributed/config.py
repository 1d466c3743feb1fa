"""`RunnerConfig`: how a run is spread over processes, and which of them this one is."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, SecretStr

from monolith.cluster.discovery.config import DiscoveryConfig
from monolith.cluster.discovery.service_discovery import ServiceDiscoveryType
from monolith.cluster.launch.roles import SHARD_TOKEN_VARIABLE, SHARDS_VARIABLE
from monolith.cluster.liveness import Liveness
from monolith.cluster.role import LOCAL_RANK_VARIABLE, LOCAL_SIZE_VARIABLE, role_from_environment
from monolith.cluster.scheduler import ServerType
from monolith.config import NonNegative, Positive, nearest_name
from monolith.errors import ConfigError
from monolith.exit_codes import HEARTBEAT_VARIABLE
from monolith.ps.client.server_group import ClientConfig
from monolith.ps.server.parameter_server import ServerConfig
from monolith.state.paths import RESTORE_ROOTS
from monolith.train.config import METRIC_PREFIX
from monolith.transport.server import ListenConfig
from monolith.transport.tokens import TOKEN_VARIABLE

__all__ = [
    "ControllerConfig",
    "OTHER_VARIABLES",
    "PREFIX",
    "RunnerConfig",
    "require_known_variables",
]

PREFIX = "MONOLITH_"
"""What the variable of a field is called before the field's name in capitals."""
SECOND_CHANCES = 6
"""Losses after which a run that recovers servers continues, unless the configuration says how many."""

_Count = Annotated[int, Field(ge=0)]
# With one of these said, a run is not of this process alone.
_SPREADS = ("server_type", "num_ps", "discovery_type", "discovery_folder")
_NESTED = ("client", "server", "liveness", "controller")

OTHER_VARIABLES = frozenset(
    {
        METRIC_PREFIX,
        RESTORE_ROOTS,
        HEARTBEAT_VARIABLE,
        LOCAL_RANK_VARIABLE,
        LOCAL_SIZE_VARIABLE,
        SHARDS_VARIABLE,
        SHARD_TOKEN_VARIABLE,
        TOKEN_VARIABLE,
        "MONOLITH_ZK_HOSTS",
        "MONOLITH_ZK_HOSTS_IPV6",
    }
)
"""Every variable that Monolith reads and that is not a field of `RunnerConfig`."""

_FRAMES = "ranks exchange rows and gradients over connections of their own, for which there is nothing to choose"
_FUSED = "dense gradients always travel in one buffer"
# Switches of the original's communication, and why they change nothing here. The first that matches counts.
_SWITCHES = (
    (r"MONOLITH_WITH_ALLREDUCE_FUSION", _FUSED),
    (r"MONOLITH_WITH_ALLREDUCE_FP16", "set MONOLITH_DENSE_WIRE=float16, which does the same"),
    (r"MONOLITH_WITH_BYTEPS_BWD_(FAKE_)?CAST", "set client.wire, which is that of ranks too"),
    (r"MONOLITH_WITH_(OPTIMIZED_)?(HOROVOD|BYTEPS)(_\w+)?", _FRAMES),
    (r"MONOLITH_FORCE_GPU_COMPATIBLE", "tables stay in main memory, and RunConfig.device places the dense part"),
    (r"MONOLITH_GPU_FEATURE_FACTORY_FUSION_LEVEL", "one call looks up the rows of all features"),
    (r"MONOLITH_SYNC_EMPTY_RANK0_PS_SHARD", "every rank owns rows, rank 0 too, so that ranks can be added and removed"),
    (r"MONOLITH_SAVE_SUMMARY_INTERVAL", "set RunConfig.save_summary_steps"),
    (r"MONOLITH_ROOT_LOG_INTERVAL", "set RunConfig.log_step_count_steps"),
)
_SKIP_ALLREDUCE = "MONOLITH_SKIP_ALLREDUCE"

_log = logging.getLogger(__name__)


class ControllerConfig(ListenConfig):
    """Where the chief of a run answers `monolith control`. Without a token it draws one, which only its user can read.

    Example:
        >>> ControllerConfig().host, ControllerConfig().enabled
        ('127.0.0.1', True)
    """

    enabled: bool = True
    """False: nobody can ask."""
    max_streams: Annotated[int, Field(gt=0)] = 16
    """Open streams, one for each client. Requests on further ones are refused."""


class RunnerConfig(DiscoveryConfig):
    """Which processes a run has, how they find each other and how they deal with failures. `RunConfig` is what they do.

    Every field is a key of `runner:` in a configuration file, of `--set runner.<field>`, and the environment variable
    MONOLITH_<FIELD>. See `from_env`.

    Example:
        >>> runner = RunnerConfig(discovery_folder="/mnt/job", discovery_type="file", num_ps=2, num_workers=3, index=1)
        >>> runner.is_chief, runner.num_required_ps, runner.max_losses
        (False, 2, 0)
        >>> RunnerConfig(num_pss=2)
        Traceback (most recent call last):
        monolith.errors.ConfigError: RunnerConfig.num_pss: unknown field; did you mean 'num_ps'?
    """

    config_group: ClassVar[str] = "run"

    server_type: ServerType = "worker"
    """What this process is: "ps" holds tables, "worker" trains. "dispatcher" and "dsworker" serve the job's data service, under
    the MLP scheduler."""
    index: _Count = 0
    """Its number among those of its kind. Worker 0 is the chief: it restores, saves, and ends the servers."""
    num_ps: _Count = 0
    """Parameter servers that hold the tables. In a local run they are threads of this process, for debugging. With 0 the
    tables are in the process itself."""
    num_workers: Annotated[int, Field(ge=1)] = 1
    """Workers, the chief included. With several, dense parameters are on the servers too. Without servers they are the ranks
    of a synchronous run."""
    enable_sync_training: bool | None = None
    """Train synchronously over ranks: every step is one step of all workers on a global batch. None: if there are several
    workers and no servers."""
    enable_partial_sync_training: bool = False
    """Rows are on parameter servers, and the workers are ranks that make every step together and add their dense gradients."""
    end_of_data: Literal["drain", "stop"] = "drain"
    """Of ranks: "drain" trains all data, and a rank whose data has ended serves the others until theirs has. "stop" ends the pass
    of all ranks with the step in which one of them has had its last batch, as the original does."""
    data_shards: Annotated[int, Field(ge=1)] | None = None
    """Parts into which the data of ranks is divided for the whole life of a run, whatever the number of ranks. Give as many as
    there may ever be ranks. None: the number of ranks at the first start."""
    micro_batches: Annotated[int, Field(ge=1)] | None = None
    """Reproducible mode: every step consists of so many batches, one of each part of the data, added in their order. The result
    has the same bits for every number of ranks that divides it, and for one process."""
    min_ranks: Annotated[int, Field(ge=1)] | None = None
    """Ranks with which a run continues if others are lost and not replaced. None: with all of them."""
    enable_pipelined_fwda2a: bool = False
    """Ranks look the rows of the next batch up while they compute. Each lookup misses the update of the previous step."""
    enable_pipelined_bwda2a: bool = False
    """Ranks exchange sparse gradients while the next step computes, as `RunConfig.enable_embedding_postpush` does."""
    enable_async_optimize: bool = False
    """The same: in the original it is one queue further on the same way."""
    reorder_fids_in_data_pipeline: bool = False
    """Accepted and without effect: ids are sorted by owner in the exchange, by native code."""
    merge_sync_training_ckpt: bool = True
    """All ranks save into one model_dir. False, separate folders of ranks as in the original, is refused."""
    clip_before_reduce: bool = False
    """Each rank clips its own gradients before they are added, as the original does. False clips by the norm of the global
    batch."""
    dense_backend: Literal["auto", "frames", "gloo", "nccl"] = "auto"
    """What adds dense gradients of ranks: "frames" are our own connections, the others are those of `torch.distributed`. "auto":
    frames, or NCCL if the dense part of the model is on a GPU."""
    dense_wire: Literal["float32", "float16", "bfloat16"] = "float32"
    """How ranks send dense gradients. They are added in float32."""
    rank_transport: Literal["frames", "gloo"] = "frames"
    """How ranks exchange rows and gradients: over connections of their own, or over torch's gloo, where a network lets only that
    through. gloo is slower, is not encrypted, and does not always know which rank was lost."""
    rank_timeout_secs: Positive = 30.0
    """Seconds without a sign of life after which a rank counts as lost. Ranks that compute give signs of life. With
    `rank_transport="gloo"` they do not, so it also limits how long a rank may compute, read or save between two exchanges."""
    rank_exchange_secs: Positive = 1800.0
    """Seconds that ranks wait for one that is alive and does not come to the next exchange, because it waits for data or
    evaluates. Then it counts as lost. Not used with `rank_transport="gloo"`."""
    rank_formation_secs: Positive = 600.0
    """Seconds that ranks wait until all of them are there, at the start and after a loss."""
    num_extra_ps: _Count = 0
    """Servers beyond `num_ps` that are started so that the fastest can be chosen by measuring all."""
    num_redundant_ps: _Count = 0
    """Servers that are started in case others do not come: those that are there first are taken, the list is kept in
    `<model_dir>/ps_cluster_dir`."""
    model_dir: str = ""
    """Where the run is kept, a path that all processes see. Needed unless the run is local. Give this or `RunConfig.model_dir`,
    or both with the same value."""
    chief_timeout_secs: NonNegative = 1800.0
    """Seconds without a step of any worker after which the chief, at the end, does not wait for workers that are alive. The
    run then fails."""
    session_creation_timeout_secs: Positive = 7200.0
    """Seconds that a worker waits at the start for the chief to restore."""
    start_timeout_secs: NonNegative = 60.0
    """Seconds that the chief waits at the start for workers that have not joined. They may still join later."""
    supervised: bool = False
    """A launcher supervises the processes: it ends the servers when all workers have ended well, and the chief does not."""
    liveness: Liveness = Liveness()
    """How soon a process counts as dead, when it is replaced, and how long the others wait for that."""
    server_health_secs: NonNegative = 30.0
    """Seconds between two checks of the servers' memory by the chief. 0: it is not checked."""
    operation_timeout_in_ms: Annotated[int, Field(ge=-1)] = -1
    """Milliseconds that a call to a server may take. -1 leaves it to `client.timeout`."""
    partial_recovery: bool | None = None
    """Continue when a server has lost what it held, restoring only that server from the newest checkpoint: what was trained on
    it since is lost. False ends the run with `ServerLostError`. None: as `enable_realtime_training`."""
    max_retry_times: _Count = 0
    """How often a run continues after a server has lost what it held. 0: 6 times with `partial_recovery`, otherwise never."""
    retry_wait_in_secs: NonNegative = 30.0
    """Seconds before each attempt after a server did not answer."""
    enable_realtime_training: bool = False
    """The run feeds a service without an end: servers stay when the chief ends, unless `force_shutdown_ps`. The same as
    `RunConfig.enable_realtime_training`, which says what else it means."""
    force_shutdown_ps: bool = False
    """End the servers with the run in any case."""
    slow_start_steps: _Count = 0
    """Worker i begins when the global step is this times ln(1 + i): later ones join when the model has taken shape."""
    max_slow_start_wait_minute: NonNegative = 10.0
    """Minutes that it waits for that at most, and up to ten more at random."""
    max_pending_seconds_for_barrier: NonNegative = 30.0
    """Seconds that a checkpoint waits until all workers are between two steps. Then it is taken without the others."""
    benchmark_secs: Positive = 120.0
    """Seconds for which servers are measured when there are extra ones."""
    ps_str_overridden: str = ""
    """Addresses with commas to take instead of measuring."""
    use_dataservice: bool = False
    """Train on batches of a data service: `train` is given a `DatasetConfig`, which is read through it, or a
    `DataServiceSource`. Any other source is refused."""
    data_service_dispatcher: str = ""
    """`host:port` of the data service's dispatcher. Empty: the one that the MLP scheduler started."""
    num_extra_dsworker_on_gpu_worker: _Count = 0
    """Data workers that each worker starts on its own machine, under the MLP scheduler."""
    client: ClientConfig = ClientConfig()
    """How workers talk to servers. `worker` and `epoch` are given by the run."""
    server: ServerConfig = ServerConfig()
    """How a server of this run listens. Port and folder are given by the run, and the host by schedulers that know it."""
    controller: ControllerConfig = ControllerConfig()
    """Where the chief of a run with a model_dir answers `monolith control`."""

    @property
    def is_chief(self) -> bool:
        """Whether this process restores, saves, and ends the servers."""
        return self.server_type == "worker" and self.index == 0

    @property
    def enable_full_sync_training(self) -> bool:
        """Whether the workers are ranks of a synchronous run that hold the tables themselves.

        Example:
            >>> RunnerConfig(num_workers=2).enable_full_sync_training, RunnerConfig(num_ps=1).enable_full_sync_training
            (True, False)
        """
        if self.is_local and self.enable_sync_training is None:
            # One process with several micro-batches in a step is a run of one rank.
            return self.micro_batches is not None and not self.num_ps
        wanted = self.num_workers > 1 if self.enable_sync_training is None else self.enable_sync_training
        return wanted and not self.enable_partial_sync_training and not self.num_ps

    @property
    def is_synchronous(self) -> bool:
        """Whether the workers are ranks that make every step together, wherever the rows are.

        Example:
            >>> RunnerConfig(num_ps=1, num_workers=2, enable_partial_sync_training=True).is_synchronous
            True
        """
        partial = self.enable_partial_sync_training and self.num_ps > 0 and not self.is_local
        return self.enable_full_sync_training or partial

    @property
    def num_required_ps(self) -> int:
        """Servers that must be there before anything starts."""
        return self.num_ps + self.num_extra_ps

    @property
    def recovers(self) -> bool:
        """Whether the run continues when a server was replaced."""
        return self.enable_realtime_training if self.partial_recovery is None else self.partial_recovery

    @property
    def max_losses(self) -> int:
        """How often the run continues after a server has lost what it held.

        Example:
            >>> RunnerConfig(partial_recovery=True).max_losses, RunnerConfig(max_retry_times=2).max_losses
            (6, 2)
        """
        return self.max_retry_times or (SECOND_CHANCES if self.recovers else 0)

    def require_spread(self) -> None:
        """`ConfigError` unless this describes one process of a run over several."""
        if not self.num_ps:
            raise ConfigError(
                "RunnerConfig.num_ps: expected at least one server; or is_local for a run in this process"
            )
        if self.enable_sync_training and not self.enable_partial_sync_training:
            raise ConfigError(
                f"RunnerConfig.enable_sync_training: with {self.num_ps} servers set enable_partial_sync_training too: rows are "
                "on the servers, and the workers add their dense gradients. Without servers, ranks hold the rows themselves"
            )
        if self.enable_partial_sync_training and self.micro_batches is not None:
            raise ConfigError(
                "RunnerConfig.micro_batches: rows on servers are changed by each rank for itself, in no fixed order; leave it "
                "unset or train without servers"
            )
        if not self.model_dir:
            raise ConfigError("RunnerConfig.model_dir: expected a folder that all processes of the run see, got ''")
        there = self.num_workers if self.server_type == "worker" else self.num_required_ps + self.num_redundant_ps
        if self.index >= there:
            raise ConfigError(
                f"RunnerConfig.index: expected less than {there}, the number of processes that are {self.server_type!r}, "
                f"got {self.index}"
            )

    def require_ranks(self) -> None:
        """`ConfigError` unless this describes one rank of a synchronous run."""
        if not self.merge_sync_training_ckpt:
            raise ConfigError(
                "RunnerConfig.merge_sync_training_ckpt: expected true: all ranks save one checkpoint, which any number of ranks, "
                "servers or one process can restore. Folders of single ranks do not exist here"
            )
        if self.index >= self.num_workers:
            raise ConfigError(
                f"RunnerConfig.index: expected a rank less than num_workers, {self.num_workers}, got {self.index}"
            )
        if self.min_ranks is not None and self.min_ranks > self.num_workers:
            raise ConfigError(
                f"RunnerConfig.min_ranks: expected at most num_workers, {self.num_workers}, got {self.min_ranks}"
            )
        if self.rank_transport == "gloo":
            for name, given in (
                ("min_ranks", self.min_ranks is not None),
                ("client.tls_root_certs", self.client.tls_root_certs is not None),
                ("server.tls_cert", self.server.tls_cert is not None),
            ):
                if given:
                    raise ConfigError(
                        f"RunnerConfig.{name}: cannot be used with rank_transport='gloo', which "
                        f"{'needs all ranks' if name == 'min_ranks' else 'does not encrypt'}; leave out one of them"
                    )
        if self.micro_batches is None:
            return
        fewer = range(self.min_ranks or self.num_workers, self.num_workers)
        if uneven := [ranks for ranks in fewer if self.micro_batches % ranks]:
            raise ConfigError(
                f"RunnerConfig.min_ranks: with {self.min_ranks}, the run may continue with {uneven[0]} of {self.num_workers} "
                f"ranks, of which micro_batches={self.micro_batches} is no multiple; give other micro_batches or min_ranks"
            )
        for name, value, why in (
            ("data_shards", self.data_shards not in (None, self.micro_batches), "there are as many as micro_batches"),
            ("dense_backend", self.dense_backend in ("gloo", "nccl"), "torch.distributed adds in an order of its own"),
            ("dense_wire", self.dense_wire != "float32", "rounding depends on the number of ranks"),
            ("client.wire", self.client.wire != "float32", "rows that stay on a rank are not rounded, others are"),
            ("use_dataservice", self.use_dataservice, "which batch a rank gets depends on timing"),
        ):
            if value:
                raise ConfigError(
                    f"RunnerConfig.{name}: {getattr(self, name.partition('.')[0])!r} cannot be used with micro_batches, whose "
                    f"result must not depend on the number of ranks: {why}"
                )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, *, defaults: RunnerConfig | None = None) -> Self:
        """Return what the environment says, and `defaults` where it says nothing.

        A field is MONOLITH_<FIELD>, `client`, `server`, `liveness` and `controller` as JSON. MONOLITH_PS_TOKEN is the token of
        client and server. Which process this is may also come from TF_CONFIG, the MLP scheduler, `mpirun`, `torchrun` or `srun`.
        A process that is alone and has no servers is a local run.

        Raises:
            ConfigError: a value does not fit, a variable is misspelt, or the process is one of several workers that would train
                alone because `enable_sync_training` is false and there are no servers. `is_local` declares that as intended.

        Example:
            >>> RunnerConfig.from_env({}).is_local
            True
            >>> runner = RunnerConfig.from_env({
            ...     "MONOLITH_SERVER_TYPE": "ps", "MONOLITH_INDEX": "1", "MONOLITH_NUM_PS": "2",
            ...     "MONOLITH_DISCOVERY_FOLDER": "job",
            ... })
            >>> runner.is_local, runner.server_type, runner.index, runner.discovery_type.value
            (False, 'ps', 1, 'file')
        """
        environ = os.environ if environ is None else environ
        require_known_variables(environ, (PREFIX + name.upper() for name in cls.model_fields))
        try:
            said = _set_fields(cls.from_texts(_texts(cls, environ)))
        except ConfigError as error:
            raise ConfigError(_with_variables(str(error))) from None
        known = _set_fields(defaults)
        fields = {**known, **_role_fields(environ, {**known, **said}), **said}
        _require_together(fields)
        if not any(name in fields for name in _SPREADS) and fields.get("num_workers", 1) == 1:
            fields.setdefault("is_local", True)
        if "discovery_type" not in fields and fields.get("discovery_folder"):
            fields["discovery_type"] = ServiceDiscoveryType.FILE
        return cls(**_with_token(fields, environ.get(TOKEN_VARIABLE)))


def require_known_variables(environ: Mapping[str, str], fields: Iterable[str]) -> None:
    """Refuse a MONOLITH_ variable that nothing reads and whose name is close to one that is read.

    `fields` are the variables of the configuration. A name that resembles none of them may be the user's own, so it is only
    logged as a warning. Kubernetes sets variables for every service, also for one called `monolith-...`. Those are ignored.

    Raises:
        ConfigError: with the variable that was probably meant.

    Example:
        >>> require_known_variables({"MONOLITH_NUMPS": "2"}, ["MONOLITH_NUM_PS"])
        Traceback (most recent call last):
        monolith.errors.ConfigError: MONOLITH_NUMPS: no such variable; did you mean MONOLITH_NUM_PS?
    """
    known = {*fields, *OTHER_VARIABLES}
    services = tuple(name.removesuffix("SERVICE_HOST") for name in environ if name.endswith("_SERVICE_HOST"))
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in known or name.startswith(services):
            continue
        if reason := _switch_of_the_original(name, environ[name]):
            _log.warning("%s: it has no effect here: %s", name, reason)
            continue
        if near := nearest_name(name.removeprefix(PREFIX), [one.removeprefix(PREFIX) for one in known]):
            raise ConfigError(f"{name}: no such variable; did you mean {PREFIX}{near}?")
        _log.warning(
            "%s: Monolith reads no such environment variable, so it has no effect; RunnerConfig lists those it reads",
            name,
        )


def _switch_of_the_original(name: str, value: str) -> str | None:
    """Return why a variable of the original has no effect. None if it is none of them."""
    if name == _SKIP_ALLREDUCE and value not in ("", "0"):
        raise ConfigError(
            f"{name}: without adding dense gradients every rank would train a model of its own; remove it, or set "
            "MONOLITH_IS_LOCAL=true for independent runs"
        )
    if name == _SKIP_ALLREDUCE:
        return "dense gradients are always added"
    return next((reason for pattern, reason in _SWITCHES if re.fullmatch(pattern, name)), None)


def _require_together(fields: Mapping[str, Any]) -> None:
    """`ConfigError` if several workers would each train alone, unless they are meant to be independent."""
    if fields.get("is_local") or fields.get("num_ps") or fields.get("server_type", "worker") != "worker":
        return
    workers, index = fields.get("num_workers", 1), fields.get("index", 0)
    if index >= workers:
        raise ConfigError(
            f"RunnerConfig.num_workers: expected more than {index} workers, of which this is worker {index}, got {workers}; set "
            "num_workers (MONOLITH_NUM_WORKERS)"
        )
    if workers > 1 and fields.get("enable_sync_training") is False:
        raise ConfigError(
            f"RunnerConfig.num_ps: worker {index} of {workers} has no parameter servers and enable_sync_training is false, so "
            "each worker would train alone, on all of the data. Set num_ps (MONOLITH_NUM_PS) and start so many servers, leave "
            "enable_sync_training unset for a synchronous run, or set is_local (MONOLITH_IS_LOCAL=true) for independent runs"
        )


def _with_variables(text: str) -> str:
    """An error about fields in the words of who has set them: RunnerConfig.num_ps is MONOLITH_NUM_PS."""
    return re.sub(r"^RunnerConfig\.(\w+)", lambda field: PREFIX + field[1].upper(), text, flags=re.MULTILINE)


def _texts(config: type[RunnerConfig], environ: Mapping[str, str]) -> dict[str, object]:
    texts: dict[str, object] = {}
    for name in config.model_fields:
        if (text := environ.get(PREFIX + name.upper())) is not None:
            texts[name] = _nested_texts(name, text) if name in _NESTED else text
    return texts


def _nested_texts(name: str, text: str) -> dict[str, str]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        # Without the text, which may hold a token.
        raise ConfigError(f'{PREFIX}{name.upper()}: expected a JSON object such as {{"max_streams": 8}}')
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}


def _set_fields(config: RunnerConfig | None) -> dict[str, Any]:
    return {} if config is None else {name: getattr(config, name) for name in config.model_fields_set}


def _role_fields(environ: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    servers = sum(int(given.get(name, 0)) for name in ("num_ps", "num_extra_ps", "num_redundant_ps"))
    role = role_from_environment(
        environ,
        num_servers=servers,
        server_type=given.get("server_type"),
        is_local=given.get("is_local", False),
    )
    if role is None:
        return {}
    fields = {name: value for name, value in role if value is not None}
    if role.discovery_type is None:
        # Not the launcher's to say, and among its ranks those in reserve are servers too.
        del fields["num_ps"]
    return fields


def _with_token(fields: dict[str, Any], token: str | None) -> dict[str, Any]:
    if token is None:
        return fields
    client, server = fields.get("client", ClientConfig()), fields.get("server", ServerConfig())
    return {
        **fields,
        "client": client if client.token else client.model_copy(update={"token": SecretStr(token)}),
        "server": server if server.token else server.model_copy(update={"token": SecretStr(token)}),
    }
