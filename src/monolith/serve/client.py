"""`Client`: asks a model server for predictions, over HTTP with binary tensors."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

import numpy as np
import torch
from pydantic import SecretStr

from monolith.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineExceededError,
    InvalidArgumentError,
    MessageTooLargeError,
    ModelNotFoundError,
    MonolithError,
    OverloadedError,
    ProtocolError,
    ServerError,
    UnavailableError,
)
from monolith.features import Ragged
from monolith.features.batch import as_batch
from monolith.serve.server.columns import MESSAGES, SPLITS
from monolith.serve.server.tensors import DATATYPES, join_strings, to_raw, torch_datatype
from monolith.transport.tokens import reveal

__all__ = ["Client", "Inference"]

_KINDS: dict[str, type[MonolithError]] = {
    kind.__name__: kind
    for kind in (
        AuthenticationError,
        DeadlineExceededError,
        InvalidArgumentError,
        MessageTooLargeError,
        ModelNotFoundError,
        OverloadedError,
        ProtocolError,
        ServerError,
        UnavailableError,
    )
}
_BY_STATUS: dict[int, type[MonolithError]] = {
    400: InvalidArgumentError,
    401: AuthenticationError,
    404: ModelNotFoundError,
    413: MessageTooLargeError,
    503: UnavailableError,
    504: DeadlineExceededError,
}
_MAX_ANSWER_BYTES = 2**28
_BINARY_HEADER = "Inference-Header-Content-Length"


class Inference(dict[str, np.ndarray]):
    """Predictions by head: [rows], or [rows, classes]. With `top_k`, `indices` and `scores`."""

    def __init__(self, outputs: Mapping[str, np.ndarray], answer: Mapping[str, Any]) -> None:
        super().__init__(outputs)
        self.model: str = answer.get("model_name", "")
        self.version: int = int(answer.get("model_version") or 0)
        """The version of the model that has answered."""
        self.id: str = answer.get("id", "")
        """The id that the request was given."""
        self.parameters: Mapping[str, Any] = answer.get("parameters") or {}

    @property
    def lag(self) -> float | None:
        """Seconds that the model was behind training. None if it does not follow a run."""
        return self.parameters.get("monolith_lag_seconds")

    @property
    def step(self) -> int | None:
        """Global step of the newest changes in the model. None if it does not follow a run."""
        return self.parameters.get("monolith_step")


class Client:
    """A client of a model server. Thread-safe: every thread that asks at the same time has a connection of its own.

    Requests only read, so one whose connection fails is sent again until its time is over. One that the server refuses
    because it is overloaded is not: `OverloadedError` says to back off.

    Args:
        address: host:port, or a URL: https://host:port.
        model: The model that is asked if a call names none. None: the server's only one.
        token: The token of the server.
        tls_root_certs: CA bundle (PEM) that signed the certificate of the server. By default those of the system.
        timeout: Seconds for each call with all its retries.

    Example:
        >>> client = Client("127.0.0.1:8000", model="clicks")  # doctest: +SKIP
        >>> answer = client.infer({"user": [3, 4], "item": [5, 6], "tags": [[1, 2], []]})  # doctest: +SKIP
        >>> answer["ctr"], answer.version, answer.lag  # doctest: +SKIP
        (array([0.0312, 0.2917], dtype=float32), 1795017184, 0.08)
    """

    def __init__(
        self,
        address: str,
        *,
        model: str | None = None,
        token: str | SecretStr | None = None,
        tls_root_certs: Path | None = None,
        timeout: float = 5.0,
    ) -> None:
        url = urlsplit(address if "://" in address else f"http://{address}")
        if url.scheme not in ("http", "https") or not url.hostname or url.path not in ("", "/"):
            raise ConfigError(f"address: expected host:port, http://host:port or https://host:port, got {address!r}")
        if not timeout > 0:
            raise ConfigError(f"timeout: expected seconds > 0, got {timeout}")
        self.address = address
        self.model = model
        self._host, self._port = url.hostname, url.port or (443 if url.scheme == "https" else 80)
        self._tls = ssl.create_default_context(cafile=tls_root_certs) if url.scheme == "https" else None
        self._token, self._timeout = reveal(token), timeout
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()
        self._closed = False

    def infer(
        self,
        columns: Mapping[str, object],
        *,
        model: str | None = None,
        version: int | None = None,
        outputs: Sequence[str] = (),
        top_k: int | None = None,
        output: str | None = None,
        request_id: str = "",
        route_key: str = "",
        timeout: float | None = None,
    ) -> Inference:
        """Predict.

        Args:
            columns: The columns of the model: tensors, `Ragged`, NumPy arrays or lists, see `monolith.features.as_batch`.
                Or serialized messages: a list of bytes named `instances`, `examples` or `example_batch`.
            model: Its name.
            version: One version. None: the server chooses.
            outputs: The outputs to return, all by default.
            top_k: Return only the best rows: their `indices` and `scores`. Columns of one row, those of the user, then stand for
                as many rows as the others have.
            output: With `top_k`: the output that is the score. It may be left out if the model has only one.
            request_id: Returned with the answer.
            route_key: What a split of the traffic between versions hashes, by default the id of the request.
            timeout: Seconds, instead of those of the client.

        Raises:
            DeadlineExceededError: no answer came in time.
            InvalidArgumentError: the columns do not fit the model.
            ModelNotFoundError: the server has no such model or version.
            OverloadedError: the server has too many requests. Back off.
            UnavailableError: the server cannot be reached.
        """
        seconds = self._timeout if timeout is None else timeout
        given = {"top_k": top_k, "output": output, "route_key": route_key or None}
        parameters = {"binary_data_output": True, **{name: value for name, value in given.items() if value is not None}}
        tree: dict[str, Any] = {"parameters": parameters}
        if request_id:
            tree["id"] = request_id
        if outputs:
            tree["outputs"] = [{"name": name} for name in outputs]
        tree["inputs"], data = _encoded(columns)
        path = self._path(model, version) + "/infer"
        deadline = time.monotonic() + seconds

        def request(remaining: float) -> tuple[bytes, dict[str, str]]:
            parameters["timeout"] = max(1, int(remaining * 1e6))
            head = json.dumps(tree, separators=(",", ":")).encode()
            return b"".join((head, *data)), {_BINARY_HEADER: str(len(head)), "Content-Type": "application/octet-stream"}

        body, headers = self._call("POST", path, deadline, request)
        return _decoded(body, headers.get(_BINARY_HEADER))

    def live(self) -> bool:
        """Whether the server answers."""
        try:
            self._get("/v2/health/live")
        except UnavailableError:
            return False
        return True

    def ready(self) -> bool:
        """Whether the server is ready to predict."""
        try:
            self._get("/v2/health/ready")
        except UnavailableError:
            return False
        return True

    def metadata(self, model: str | None = None, version: int | None = None) -> dict[str, Any]:
        """Return the versions, inputs and outputs of a model."""
        return self._get(self._path(model, version))

    def models(self) -> list[str]:
        """Return the names of the models of the server."""
        return list(self._get("/v2/models")["models"])

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.address!r}, model={self.model!r})"

    def _path(self, model: str | None, version: int | None) -> str:
        name = model or self.model
        if name is None:
            models = self.models()
            if len(models) != 1:
                raise InvalidArgumentError(
                    f"model: expected one of {', '.join(models) or 'none'}; the server has {len(models)}"
                )
            name = self.model = models[0]
        path = f"/v2/models/{quote(name, safe='')}"
        return path if version is None else f"{path}/versions/{version}"

    def _get(self, path: str) -> dict[str, Any]:
        body, _ = self._call("GET", path, time.monotonic() + self._timeout, lambda remaining: (b"", {}))
        answer = _json(body)
        if not isinstance(answer, dict):
            raise ProtocolError(f"{self.address}: expected an object, got {type(answer).__name__}")
        return answer

    def _call(self, method: str, path: str, deadline: float, request: Any) -> tuple[bytes, Any]:  # noqa: ANN401
        """Send a request, again on another connection if one fails. The server only reads, so that is safe."""
        pause = 0.0
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise DeadlineExceededError(f"{self.address}: gave no answer in time")
            connection, is_new = self._connection(remaining)
            try:
                body, headers = request(remaining)
                return self._exchange(connection, method, path, body, headers)
            except MonolithError:  # several are an OSError or TimeoutError as well
                raise
            except TimeoutError:
                connection.close()
                raise DeadlineExceededError(f"{self.address}: gave no answer in time") from None
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if isinstance(error, ssl.SSLCertVerificationError):
                    raise UnavailableError(
                        f"{self.address}: {error}; is tls_root_certs the CA of the server?"
                    ) from None
                # The server may have closed a connection that was idle: that one is tried again at once.
                pause = min(max(0.05, 2 * pause), 1.0) if is_new else pause
                if deadline - time.monotonic() <= pause:
                    reason = str(error) or type(error).__name__
                    raise UnavailableError(f"{self.address}: cannot be reached: {reason}") from error
                time.sleep(pause if is_new else 0)

    def _connection(self, timeout: float) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            if self._closed:
                raise UnavailableError("the client is closed")
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            if self._tls is None:
                return http.client.HTTPConnection(self._host, self._port, timeout=timeout), True
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=self._tls), True
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        return connection, False

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[bytes, Any]:
        authorization = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        connection.request(method, path, body or None, {**headers, **authorization})
        response = connection.getresponse()
        if (response.length or 0) > _MAX_ANSWER_BYTES:
            connection.close()
            raise MessageTooLargeError(f"{self.address}: the answer would have {response.length:,} bytes")
        answer = response.read()
        with self._lock:
            keep = not self._closed and connection.sock is not None
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()
        if response.status != 200:
            raise _error(self.address, response.status, response.headers.get("monolith-error", ""), answer)
        return answer, response.headers


def _error(address: str, status: int, name: str, body: bytes) -> MonolithError:
    try:
        message = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace") or f"HTTP status {status}"
    kind = _KINDS.get(name) or _BY_STATUS.get(status, ServerError)
    return kind(f"{message} (the server at {address})")


def _encoded(columns: Mapping[str, object]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return the inputs of a request, and the bytes that follow."""
    inputs: list[dict[str, Any]] = []
    data: list[bytes] = []

    def add(name: str, datatype: str, shape: Sequence[int], raw: bytes) -> None:
        parameters = {"binary_data_size": len(raw)}
        inputs.append({"name": name, "datatype": datatype, "shape": list(shape), "parameters": parameters})
        data.append(raw)

    serialized: dict[str, Sequence[bytes]] = {
        name: value
        for name, value in columns.items()
        if name in MESSAGES and isinstance(value, list | tuple) and all(isinstance(one, bytes) for one in value)
    }
    for name, messages in serialized.items():
        add(name, "BYTES", [len(messages)], join_strings(messages))
    for name, column in as_batch({name: value for name, value in columns.items() if name not in serialized}).items():
        if isinstance(column, Ragged):
            add(name, torch_datatype(column.values.dtype), column.values.shape, to_raw(column.values))
            add(name + SPLITS, "INT64", column.offsets.shape, to_raw(column.offsets))
        elif isinstance(column, torch.Tensor) and column.ndim:
            tensor = column.detach().cpu()
            add(name, torch_datatype(tensor.dtype), tensor.shape, to_raw(tensor))
        else:
            raise InvalidArgumentError(
                f"columns[{name!r}]: expected numbers, one or a list of them per row, got {column!r:.80}"
            )
    return inputs, data


def _decoded(body: bytes, json_bytes: str | None) -> Inference:
    length = len(body) if json_bytes is None else int(json_bytes)
    answer = _json(body[:length])
    outputs: dict[str, np.ndarray] = {}
    try:
        at = length
        for output in answer["outputs"]:
            size = (output.get("parameters") or {}).get("binary_data_size")
            kind = DATATYPES[output["datatype"]]
            if size is None:
                found = np.array(output["data"], dtype=np.float32 if kind.name == "BF16" else kind.numpy)
            else:
                found = np.frombuffer(body[at : at + size], kind.numpy)
                at += size
                if kind.name == "BF16":
                    found = (found.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            outputs[output["name"]] = found.reshape(output["shape"])
        return Inference(outputs, answer)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the answer cannot be read: {error!r:.200}") from None


def _json(data: bytes) -> Any:  # noqa: ANN401 - whatever a server sends
    try:
        return json.loads(data)
    except ValueError as error:
        raise ProtocolError(f"the answer is not JSON: {error}") from None
