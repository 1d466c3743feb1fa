"""`Handler`: answers the Open Inference Protocol v2, from the bytes of a request to the bytes of its answer."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version as package_version
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from monolith.errors import InvalidArgumentError, ModelNotFoundError
from monolith.features.batch import BatchColumn, IdMatrix, num_rows
from monolith.serve.replica import Replica
from monolith.serve.repository import ModelRepository
from monolith.serve.server.batching import MicroBatcher
from monolith.serve.server.columns import SPLITS, ColumnReader
from monolith.serve.server.config import ServingConfig
from monolith.serve.server.failures import RequestFailure, failure_of
from monolith.serve.server.http import HttpResponse
from monolith.serve.server.limits import Admission, check_deadline, deadline_of
from monolith.serve.server.protocol import (
    BINARY_HEADER,
    InferRequest,
    InferResponse,
    decode_infer,
    encode_infer,
    to_json,
)
from monolith.serve.server.ranking import broadcast_context, top_rows
from monolith.serve.server.routing import (
    Answered,
    AnswerProtocol,
    AnswerStatus,
    DefaultRouter,
    Observer,
    ReplicaRoute,
    Router,
)
from monolith.serve.server.tensors import torch_datatype
from monolith.serve.shards.lookup_scope import lookup_scope

__all__ = ["Handler", "PendingAnswer", "failure_response", "http_json"]

_log = logging.getLogger(__name__)
_MAX_SHADOWS = 64
"""Predictions of shadows that may wait. Further ones are left out, which observers hear of."""


@dataclass(slots=True)
class PendingAnswer:
    """One request on its way through the handler: what observers hear about it in the end."""

    protocol: AnswerProtocol
    arrived: float
    model: str
    version: int = 0
    rows: int = 0
    request_id: str = ""
    key: str = ""
    status: AnswerStatus = "ok"
    columns: Mapping[str, object] = field(default_factory=dict)
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    parameters: Mapping[str, int | float | str] = field(default_factory=dict)
    shown: Sequence[int] | None = None


class Handler:
    """Answers requests of every protocol. Thread-safe.

    Args:
        repository: The models.
        config: The limits.
        router: Chooses the version of each request.
        observers: Hear of every answer. The list may be changed while the handler is in use.
        assigns_ids: Give an id to requests without one, and return it with the answer.
    """

    def __init__(
        self,
        repository: ModelRepository,
        config: ServingConfig | None = None,
        *,
        router: Router | None = None,
        observers: Sequence[Observer] = (),
        assigns_ids: bool = False,
    ) -> None:
        self._assigns_ids = assigns_ids
        self.repository = repository
        self.config = config or ServingConfig()
        self.router: Router = router or DefaultRouter(repository)
        self.observers: list[Observer] = list(observers)
        self.admission = Admission(max_concurrency=self.config.max_concurrency, max_queue=self.config.max_queue)
        self.warm = True
        """Whether the models have been warmed up, without which the server is not ready."""
        self._batcher = (
            MicroBatcher(max_rows=self.config.max_batch_rows, wait_secs=self.config.batch_wait_ms / 1000)
            if self.config.max_batch_rows
            else None
        )
        self._readers: WeakKeyDictionary[Replica, ColumnReader] = WeakKeyDictionary()
        self._shadows = ThreadPoolExecutor(1, thread_name_prefix="monolith-shadow")
        self._waiting_shadows = threading.BoundedSemaphore(_MAX_SHADOWS)

    @property
    def batches(self) -> bool:
        """Whether requests are joined, so that one that only waits for others needs no turn of its own."""
        return self._batcher is not None

    @property
    def ready(self) -> bool:
        """Whether all models are warm and the server is not stopping."""
        return self.warm and not self.admission.draining

    # Predictions

    def infer_http(
        self, model: str, version: str, headers: Mapping[str, str], body: bytes, *, arrived: float
    ) -> HttpResponse:
        """Answer an admitted `POST /v2/models/{model}/infer`. Every error becomes an answer."""
        split = headers.get(BINARY_HEADER)
        exchange = PendingAnswer("http-json" if split is None else "http-binary", arrived, model)
        try:
            request = decode_infer(body, split, max_json_bytes=self.config.max_json_bytes)
            timeout = request.parameters.get("timeout") or headers.get("timeout")
            response = self.infer(exchange, request, version, deadline_of(arrived, self.config.deadline_secs, timeout))
            content, json_bytes = encode_infer(response, request)
            told = {name.replace("_", "-"): str(value) for name, value in response.parameters.items()}
            if json_bytes is None:
                told["content-type"] = "application/json"
            else:
                told["content-type"] = "application/octet-stream"
                told[BINARY_HEADER] = str(json_bytes)
            answer = HttpResponse(headers=told, body=content)
        except Exception as error:
            answer = self.failed_http(exchange, error)
        self.observe(exchange)
        return answer

    def infer(self, exchange: PendingAnswer, request: InferRequest, version: str, deadline: float) -> InferResponse:
        """Predict. Fills `exchange` with what becomes known, also if an error is raised."""
        exchange.request_id = request.id
        exchange.key = _route_key(request, self.router.key_column(exchange.model))
        if self._assigns_ids and not request.id:
            exchange.request_id = secrets.token_hex(16)
        check_deadline(deadline, "before it was predicted")
        route = self._route(exchange, version)
        replica = route.primary
        try:
            exchange.version = replica.version
            columns = self._columns(replica, request)
            exchange.columns = columns
            exchange.rows = rows = _rows(columns)
            with lookup_scope(deadline=deadline) as report:
                outputs = self._predict(replica, columns, rows, deadline)
            exchange.parameters = parameters = _lag_parameters(replica) | report.parameters()
        finally:
            self.repository.release(replica)
        exchange.outputs = outputs
        self._start_shadows(route, exchange)
        check_deadline(deadline, "when its predictions were made")
        top_k = request.parameters.get("top_k")
        if isinstance(top_k, int):
            name = request.parameters.get("output")
            outputs = top_rows(outputs, top_k, name if isinstance(name, str) else None)
            exchange.shown = outputs["indices"].tolist()
        asked = _asked_outputs(request, outputs)
        return InferResponse(replica.name, str(replica.version), exchange.request_id, parameters, asked)

    def _route(self, exchange: PendingAnswer, version: str) -> ReplicaRoute:
        """Choose replicas and keep the primary one open."""
        number = _version_number(exchange.model, version)
        while True:
            route = self.router.route(exchange.model, number, exchange.key)
            if self.repository.acquire(route.primary):
                return route
            # It was removed after the router had chosen it. Another choice is another version, or a typed error.

    def _columns(self, replica: Replica, request: InferRequest) -> Mapping[str, BatchColumn]:
        reader = self._readers.get(replica)
        if reader is None:
            reader = self._readers[replica] = ColumnReader(replica.signature, max_rows=self.config.max_rows)
        columns = reader.read(request.inputs)
        return broadcast_context(columns) if "top_k" in request.parameters else columns

    def _predict(
        self, replica: Replica, columns: Mapping[str, BatchColumn], rows: int, deadline: float
    ) -> dict[str, Tensor]:
        if self._batcher is None:
            return replica.predict(columns)
        for spec in replica.signature.inputs:
            spec.check(columns)  # an error here must not become one of the requests that it is joined with

        def in_turn(batch: Mapping[str, BatchColumn], deadline: float) -> dict[str, Tensor]:
            self.admission.start(deadline)
            try:
                return replica.predict(batch)
            finally:
                self.admission.finish()

        return self._batcher.predict(replica, columns, rows, deadline, in_turn)

    def _start_shadows(self, route: ReplicaRoute, exchange: PendingAnswer) -> None:
        for replica in route.shadows:
            if not self._waiting_shadows.acquire(blocking=False):
                self._observe_shadow(replica, exchange, "overloaded", 0.0, {})
            elif self.repository.acquire(replica):
                self._shadows.submit(self._shadow, replica, exchange)
            else:  # removed after the router had chosen it
                self._waiting_shadows.release()

    def _shadow(self, replica: Replica, exchange: PendingAnswer) -> None:
        started = time.monotonic()
        outputs: Mapping[str, Tensor] = {}
        status: AnswerStatus = "ok"
        try:
            outputs = replica.predict(exchange.columns)
        except Exception as error:
            status = failure_of(error).status
        finally:
            self.repository.release(replica)
            self._waiting_shadows.release()
        self._observe_shadow(replica, exchange, status, time.monotonic() - started, outputs)

    # What observers hear

    def observe(self, exchange: PendingAnswer) -> None:
        """Tell observers that a request was answered."""
        if not self.observers:
            return
        self._tell(
            Answered(
                model=exchange.model,
                version=exchange.version,
                protocol=exchange.protocol,
                rows=exchange.rows,
                seconds=time.monotonic() - exchange.arrived,
                status=exchange.status,
                request_id=exchange.request_id,
                key=exchange.key,
                columns=exchange.columns,
                outputs=exchange.outputs,
                parameters=exchange.parameters,
                shown=exchange.shown,
            )
        )

    def _observe_shadow(
        self,
        replica: Replica,
        exchange: PendingAnswer,
        status: AnswerStatus,
        seconds: float,
        outputs: Mapping[str, Tensor],
    ) -> None:
        self._tell(
            Answered(
                model=replica.name,
                version=replica.version,
                protocol=exchange.protocol,
                rows=exchange.rows,
                seconds=seconds,
                status=status,
                request_id=exchange.request_id,
                key=exchange.key,
                columns=exchange.columns,
                outputs=outputs,
                shadow=True,
            )
        )

    def _tell(self, answered: Answered) -> None:
        for observer in tuple(self.observers):
            try:
                observer.answered(answered)
            except Exception:
                _log.exception("an observer failed, the answer is not affected")

    def failure(self, exchange: PendingAnswer, error: Exception) -> RequestFailure:
        """Return how `error` is told, and note it in `exchange`."""
        failure = failure_of(error)
        exchange.status = failure.status
        return failure

    def failed_http(self, exchange: PendingAnswer, error: Exception) -> HttpResponse:
        """Return the answer for a request that failed with `error`, and note it in `exchange`."""
        return failure_response(self.failure(exchange, error))

    # Metadata

    def server_metadata(self) -> dict[str, object]:
        """Return the name, version and extensions of the server."""
        return {
            "name": "monolith",
            "version": package_version("monolith-torch"),
            "extensions": ["binary_tensor_data", "model_repository", "parameters", "monolith_top_k"],
        }

    def model_metadata(self, model: str, version: str = "") -> dict[str, object]:
        """Return the inputs, outputs and versions of a model."""
        with self.repository.hold(model, _version_number(model, version)) as replica:
            signature = replica.signature
        dense = {spec.name: spec for spec in signature.inputs}
        inputs: list[dict[str, object]] = []
        for name in signature.columns:
            spec = dense.get(name)
            datatype = "INT64" if spec is None else torch_datatype(getattr(torch, spec.dtype))
            inputs.append({"name": name, "datatype": datatype, "shape": [-1, *(() if spec is None else spec.shape)]})
            if name in signature.ragged:
                inputs.append({"name": name + SPLITS, "datatype": "INT64", "shape": [-1]})
        outputs = [{"name": one.name, "datatype": "FP32", "shape": [-1, *one.shape]} for one in signature.outputs]
        versions = [str(one) for one in self.repository.versions(model)]
        return {"name": model, "versions": versions, "platform": "monolith_torch", "inputs": inputs, "outputs": outputs}

    def model_ready(self, model: str, version: str = "") -> bool:
        """Whether a model can be asked."""
        return self.ready and self.repository.ready(model, _version_number(model, version))

    def repository_index(self) -> list[dict[str, str]]:
        """Return every version of every model."""
        state = "READY" if self.ready else "UNAVAILABLE"
        return [
            {"name": name, "version": str(version), "state": state, "reason": ""}
            for name in self.repository.names()
            for version in self.repository.versions(name)
        ]

    def close(self) -> None:
        """End the thread of shadows."""
        self._shadows.shutdown(wait=True, cancel_futures=False)


def http_json(tree: Mapping[str, object] | Sequence[object], status: int = 200) -> HttpResponse:
    """Return an answer in JSON.

    Example:
        >>> http_json({"live": True}).body
        b'{"live":true}'
    """
    return HttpResponse(status=status, headers={"content-type": "application/json"}, body=to_json(tree))


def failure_response(failure: RequestFailure) -> HttpResponse:
    """Return the answer for a request that failed."""
    headers = {"content-type": "application/json", "monolith-error": failure.error}
    if failure.http == 503:
        headers["retry-after"] = "1"
    if failure.http == 401:
        headers["www-authenticate"] = "Bearer"
    return HttpResponse(status=failure.http, headers=headers, body=to_json({"error": failure.message}))


def _rows(columns: Mapping[str, BatchColumn]) -> int:
    if isinstance(columns, IdMatrix):
        return columns.rows
    lengths = {column.shape[0] if column.__class__ is Tensor else len(column) for column in columns.values()}
    return lengths.pop() if len(lengths) == 1 else num_rows(columns)  # which says what is wrong, and takes longer


def _version_number(model: str, version: str) -> int | None:
    if not version:
        return None
    if not (version.isascii() and version.isdecimal() and len(version) < 20):
        raise ModelNotFoundError(f"model {model!r}: has no version {version!r:.40}; versions are numbers")
    return int(version)


def _route_key(request: InferRequest, column: str | None) -> str:
    """Return what a split of the traffic hashes, see `Router.route`."""
    given = request.parameters.get("route_key")
    tensor = None if given or column is None else request.inputs.get(column)
    if tensor is not None:
        first = tensor.data[:1] if isinstance(tensor.data, list) else tensor.data.reshape(-1)[:1].tolist()
        given = "".join(value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in first)
    return str(given or request.id)


def _asked_outputs(request: InferRequest, outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    for asked in request.outputs:
        if asked not in outputs:
            raise InvalidArgumentError(f"outputs[{asked!r}]: expected one of {', '.join(map(repr, outputs))}")
    return {asked: outputs[asked] for asked in request.outputs} if request.outputs else outputs


def _lag_parameters(replica: Replica) -> dict[str, int | float | str]:
    parameters: dict[str, int | float | str] = {"monolith_version": replica.version}
    lag = replica.lag()
    if lag is not None:
        parameters["monolith_step"] = lag.step
        parameters["monolith_lag_seconds"] = round(lag.seconds, 6)
        parameters["monolith_sequence"] = lag.sequence
        parameters["monolith_event_time"] = lag.event_time
    return parameters
