"""The model servers that `serving.py` compares: how each is started and asked, and what its processes cost.

Load comes from h2load (apt: nghttp2-client), for HTTP/1.1 and for gRPC, which is HTTP/2. It is written in C and costs the same
for all. Every connection sends its next request when it has the answer to the last one.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contestants import ENVIRONMENTS, HERE, SETUP, PeerFailedError, PeerUnavailableError
from monolith.proto import open_inference_pb2 as messages
from peers.serving_model import NAMES, PACKED

GRPC_METHOD = "/inference.GRPCInferenceService/ModelInfer"
BINARY_HEADER = "Inference-Header-Content-Length"
START_SECS = 60.0
ERROR_SECS = 10.0  # how long a server may answer with errors while it starts
TICKS = os.sysconf("SC_CLK_TCK")

# "-tuned" is without access log, and MLServer predicts in its own process. The others are as they are installed.
# "plain" is JSON that is not of the Open Inference Protocol: {"C1": [...], ...}.
PROTOCOLS: dict[str, tuple[str, ...]] = {
    "monolith": ("json", "binary", "grpc"),
    "kserve": ("json", "binary", "grpc"),
    "kserve-tuned": ("json", "binary", "grpc"),
    "mlserver": ("json", "grpc"),
    "mlserver-tuned": ("json", "grpc"),
    "litserve": ("plain",),
    "bentoml": ("plain",),
    "rayserve": ("plain",),
}
# Ray's processes use a processor even when nobody asks, so its rounds are its own.
GROUPS = (("kserve", "kserve-tuned", "mlserver", "mlserver-tuned", "litserve", "bentoml"), ("rayserve",))
PLAIN_PATHS = {"litserve": "/predict", "bentoml": "/predict", "rayserve": "/predict"}


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class ModelServerProcess:
    """A model server with all its processes, until `close`."""

    def __init__(self, name: str, *, export: Path, weights: Path, logs: Path) -> None:
        self.name = name
        self.http_port, self.grpc_port = free_port(), free_port()
        ports = [str(self.http_port), str(self.grpc_port)]
        if name == "monolith":
            options = ["--name", "click", "--http-port", ports[0], "--grpc-port", ports[1]]
            command = [sys.executable, "-m", "monolith.cli", "serve", str(export), *options]
        else:
            peer, _, variant = name.partition("-")
            python = ENVIRONMENTS / peer / "bin" / "python"
            if not python.exists():
                raise PeerUnavailableError(f"{python.parent.parent} does not exist: {SETUP}")
            command = [str(python), str(HERE / "peers" / f"serving_{peer}.py"), str(weights), *ports, variant]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        self._log = logs / f"{name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def wait_until_answers(self, endpoint: Endpoint, body: bytes) -> None:
        """Wait until it answers a request."""
        end = time.monotonic() + START_SECS
        while True:
            if self._process.poll() is not None:
                raise PeerFailedError(f"{self.name} ended with code {self._process.returncode}; see {self._log}")
            try:
                endpoint.ask(body)
                return
            except (OSError, http.client.HTTPException, PeerFailedError) as error:
                if isinstance(error, PeerFailedError):
                    end = min(end, time.monotonic() + ERROR_SECS)
                if time.monotonic() > end:
                    raise PeerFailedError(f"{self.name} does not answer: {error}; see {self._log}") from None
                time.sleep(0.2)

    def processor_seconds(self) -> float:
        """Return the processor time of all its processes, with those that have ended."""
        return sum(processor_seconds(pid) for pid in self.pids())

    def pids(self) -> list[int]:
        """Return its processes."""
        children: dict[int, list[int]] = {}
        for path in Path("/proc").iterdir():
            if path.name.isdecimal():
                fields = _stat(int(path.name))
                if fields:
                    children.setdefault(int(fields[1]), []).append(int(path.name))
        found, waiting = [], [self._process.pid]
        while waiting:
            found.append(pid := waiting.pop())
            waiting += children.get(pid, [])
        return found

    def close(self) -> None:
        """End all its processes."""
        pids = self.pids()
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid in pids[1:]:
            if _stat(pid):
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def processor_seconds(pid: int) -> float:
    """Return the processor time of a process and of those of its children that have ended."""
    fields = _stat(pid)
    return sum(int(field) for field in fields[11:15]) / TICKS


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a turn of requests took."""

    requests_per_second: float
    p50_ms: float
    p99_ms: float
    processor_ms: float
    """Of all processes of the server, per request."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One protocol of one server."""

    server: ModelServerProcess
    protocol: str
    packed: bool
    """Whether all ids are one tensor [rows, 26] instead of 26 tensors [rows]."""

    @property
    def label(self) -> str:
        return f"{self.server.name} {self.protocol}{' packed' if self.packed else ''}"

    @property
    def family(self) -> str:
        """The protocol of ours to compare with."""
        return "json" if self.protocol == "plain" else self.protocol

    @property
    def port(self) -> int:
        return self.server.grpc_port if self.protocol == "grpc" else self.server.http_port

    @property
    def path(self) -> str:
        if self.protocol == "grpc":
            return GRPC_METHOD
        return PLAIN_PATHS[self.server.name] if self.protocol == "plain" else "/v2/models/click/infer"

    def body(self, ids: np.ndarray) -> bytes:
        """The request for int64 [rows, 26]."""
        columns = {PACKED: ids} if self.packed else dict(zip(NAMES, ids.T, strict=True))
        match self.protocol:
            case "plain":
                lists = {name: column.tolist() for name, column in columns.items()}
                return json.dumps({"columns": lists} if self.server.name == "bentoml" else lists).encode()
            case "json":
                inputs = [
                    {"name": name, "datatype": "INT64", "shape": list(column.shape), "data": column.ravel().tolist()}
                    for name, column in columns.items()
                ]
                return json.dumps({"inputs": inputs}).encode()
            case "binary":
                return b"".join(self._binary(columns))
            case _:
                return self._message(columns)

    def _binary(self, columns: Mapping[str, np.ndarray]) -> Iterator[bytes]:
        inputs = [
            {"name": name, "datatype": "INT64", "shape": list(c.shape), "parameters": {"binary_data_size": c.nbytes}}
            for name, c in columns.items()
        ]
        yield json.dumps({"parameters": {"binary_data_output": True}, "inputs": inputs}).encode()
        yield from (column.tobytes() for column in columns.values())

    def _message(self, columns: Mapping[str, np.ndarray]) -> bytes:
        message = messages.ModelInferRequest(model_name="click")
        for name, column in columns.items():
            message.inputs.add(name=name, datatype="INT64", shape=column.shape)
            message.raw_input_contents.append(column.tobytes())
        data: bytes = message.SerializeToString()
        return b"\0" + len(data).to_bytes(4, "big") + data

    def headers(self, body: bytes) -> dict[str, str]:
        match self.protocol:
            case "grpc":
                return {"content-type": "application/grpc", "te": "trailers"}
            case "binary":
                end = body.index(b"}]}") + 3
                return {"Content-Type": "application/octet-stream", BINARY_HEADER: str(end)}
            case _:
                return {"Content-Type": "application/json"}

    def ask(self, body: bytes) -> np.ndarray:
        """Return predictions [rows]."""
        if self.protocol == "grpc":
            return self._ask_grpc(body)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("POST", self.path, body, self.headers(body))
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise PeerFailedError(f"{self.label}: {response.status} {data[:200]!r}")
        if self.protocol == "binary":
            return np.frombuffer(data[int(response.headers[BINARY_HEADER]) :], np.float32)
        tree = json.loads(data)
        return np.array(tree["click"] if self.protocol == "plain" else tree["outputs"][0]["data"], dtype=np.float32)

    def _ask_grpc(self, body: bytes) -> np.ndarray:
        import grpc

        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            try:
                answer = channel.unary_unary(GRPC_METHOD)(body[5:], timeout=10)
            except grpc.RpcError as error:
                raise PeerFailedError(f"{self.label}: {error}") from None
        message = messages.ModelInferResponse.FromString(answer)
        if message.raw_output_contents:
            return np.frombuffer(message.raw_output_contents[0], np.float32)
        return np.array(message.outputs[0].contents.fp32_contents, dtype=np.float32)

    def load(self, body: bytes, *, requests: int, connections: int, folder: Path) -> Load:
        """Send `requests` over `connections`, and measure."""
        (folder / "body").write_bytes(body)
        (folder / "times").unlink(missing_ok=True)
        headers = [part for name, value in self.headers(body).items() for part in ("-H", f"{name}: {value}")]
        protocol = ["-m", "1"] if self.protocol == "grpc" else ["--h1"]
        command = ["h2load", *protocol, "-n", str(requests), "-c", str(connections), "-t", "1", *headers]
        command += ["-d", str(folder / "body"), "--log-file", str(folder / "times")]
        before = self.server.processor_seconds()
        done = subprocess.run(
            [*command, f"http://127.0.0.1:{self.port}{self.path}"], capture_output=True, text=True, check=False
        )
        processor = self.server.processor_seconds() - before
        return self._read(done.stdout, requests, processor, (folder / "times").read_text())

    def _read(self, output: str, requests: int, processor: float, times: str) -> Load:
        codes = re.search(r"status codes: (\d+) 2xx", output)
        rate = re.search(r"finished in .*?, ([\d.]+) req/s", output)
        data = re.search(r"\((\d+)\) data", output)
        if codes is None or rate is None or data is None or int(codes[1]) != requests:
            raise PeerFailedError(f"{self.label}: not all requests were answered: {output[-500:]}")
        # A failed call of gRPC is a 200 without data.
        if int(data[1]) < 16 * requests:
            raise PeerFailedError(f"{self.label}: answers are empty: {output[-500:]}")
        taken = sorted(int(line.split("\t")[2]) / 1e3 for line in times.splitlines())
        return Load(
            requests_per_second=float(rate[1]),
            p50_ms=taken[len(taken) // 2],
            p99_ms=taken[int(0.99 * len(taken))],
            processor_ms=1e3 * processor / requests,
        )


def median(loads: Sequence[Load]) -> Load:
    """Return the median of each number."""
    return Load(**{name: statistics.median(getattr(load, name) for load in loads) for name in Load.__annotations__})


@contextmanager
def running(names: Sequence[str], *, export: Path, weights: Path, logs: Path) -> Iterator[list[ModelServerProcess]]:
    """Start servers. One that is not installed is reported and left out."""
    if shutil.which("h2load") is None:
        raise PeerUnavailableError("h2load is not installed: apt-get install nghttp2-client")
    servers: list[ModelServerProcess] = []
    try:
        for name in names:
            try:
                servers.append(ModelServerProcess(name, export=export, weights=weights, logs=logs))
            except PeerUnavailableError as missing:
                sys.stderr.write(f"{name}: skipped, {missing}\n")
        yield servers
    finally:
        for server in servers:
            server.close()
