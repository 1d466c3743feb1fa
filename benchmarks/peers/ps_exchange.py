"""The exchange of a parameter server, lookup and push, over other transports: grpcio, Ray actors, Redis.

Each is started with an address of its own in another process, answers the same two questions, and is closed. With grpcio and
Ray the far side is our own dispatcher, so that only the transport differs; Redis is a store of its own, whose client
makes the optimizer's step, because the server cannot.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Protocol

import numpy as np

from monolith.ps.protocol import messages
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.messages import DeclaredTable, DeclareTables, Join, Push, TableGradient, TableRead
from monolith.table import TableConfig
from monolith.testing.parameter_servers import ServerProcess
from monolith.transport.calls import BasicCall
from monolith.transport.frames import Frame, decode, encode, encode_parts
from monolith.transport.sockets import SocketConnector

# Where setup_peers.sh puts Ray and Redis; behind our own packages, which stay as they are.
sys.path.append(str(Path(__file__).parents[2] / ".venv-bench" / "exchange"))

METHOD = "/monolith/exchange"
GRPC_SERVER = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import grpc
from monolith.ps.server.parameter_server import Dispatcher

dispatcher = Dispatcher()

class Handler(grpc.GenericRpcHandler):
    def service(self, details):
        def exchange(requests, context):
            for request in requests:
                yield dispatcher.answer(request).tobytes()
        return grpc.stream_stream_rpc_method_handler(exchange)

options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
server = grpc.server(ThreadPoolExecutor(8), options=options)
server.add_generic_rpc_handlers([Handler()])
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
threading.Event().wait()
"""


class Exchange(Protocol):
    """Rows by id, and gradients for them, on the far side of a transport."""

    def lookup(self, ids: np.ndarray) -> np.ndarray: ...

    def push(self, ids: np.ndarray, gradients: np.ndarray) -> None: ...

    def close(self) -> None: ...


class Unavailable(Exception):  # noqa: N818 - it is no error of ours
    """The transport is not installed here."""


class _Framed:
    """An exchange of our own frames over something that takes bytes and gives bytes."""

    def __init__(self, config: TableConfig) -> None:
        self._sequence = 0
        self._table = config.name
        tables = DeclareTables(tables=(DeclaredTable(config=config),))
        self._call(Call.DECLARE_TABLES, tables.model_dump_json())
        self._call(Call.JOIN, Join(worker="w", epoch=1, nonce=1).model_dump_json())

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        lookup = messages.Lookup(tables=(TableRead(table=self._table, pooling="none"),))
        return self._call(Call.LOOKUP, lookup.model_dump_json(), ids)[0]

    def push(self, ids: np.ndarray, gradients: np.ndarray) -> None:
        self._sequence += 1
        push = Push(worker="w", epoch=1, sequence=self._sequence)
        apply = messages.Apply(push=push, tables=(TableGradient(table=self._table, pooling="none"),))
        self._call(Call.APPLY_GRADIENTS, apply.model_dump_json(), ids, gradients)

    def _call(self, call: Call, text: str, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        return _arrays(decode(self._answer(encode(call=call, request=1, text=text, arrays=arrays))))

    def _answer(self, request: np.ndarray) -> bytes | np.ndarray:
        raise NotImplementedError


def _arrays(answer: Frame) -> tuple[np.ndarray, ...]:
    if answer.call == BasicCall.ERROR:
        raise RuntimeError(json.loads(answer.text)["message"])
    return answer.arrays


class Sockets(_Framed):
    """Our own transport, with nothing of our client in front of it."""

    def __init__(self, config: TableConfig) -> None:
        self._server = ServerProcess()
        self._stream = SocketConnector(self._server.address, token=None).open(deadline=time.monotonic() + 30)
        super().__init__(config)

    def close(self) -> None:
        self._stream.close()
        self._server.close()

    def _call(self, call: Call, text: str, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        deadline = time.monotonic() + 30
        self._stream.send(*encode_parts(call=call, request=1, text=text, arrays=arrays), deadline=deadline)
        return _arrays(self._stream.receive(1, deadline=deadline))


class Grpc(_Framed):
    """A stream of grpcio, Python on both ends."""

    def __init__(self, config: TableConfig) -> None:
        import queue

        import grpc

        self._process = subprocess.Popen([sys.executable, "-c", GRPC_SERVER], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        port = int(self._process.stdout.readline())
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=options)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers = self._channel.stream_stream(METHOD)(iter(self._requests.get, None))
        super().__init__(config)

    def close(self) -> None:
        self._requests.put(None)
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def _answer(self, request: np.ndarray) -> bytes:
        self._requests.put(request.tobytes())
        answer: bytes = next(self._answers)
        return answer


class RayActor(_Framed):
    """Calls of a Ray actor."""

    def __init__(self, config: TableConfig) -> None:
        try:
            import ray
        except ImportError as error:
            raise Unavailable("run benchmarks/setup_peers.sh") from error
        from monolith.ps.server.parameter_server import Dispatcher

        self._ray = ray
        environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})

        class Server:
            def __init__(self) -> None:
                self._dispatcher = Dispatcher()

            def answer(self, request: np.ndarray) -> np.ndarray:
                return self._dispatcher.answer(request)

        self._actor = ray.remote(Server).remote()
        super().__init__(config)

    def close(self) -> None:
        self._ray.shutdown()

    def _answer(self, request: np.ndarray) -> np.ndarray:
        answer: np.ndarray = self._ray.get(self._actor.answer.remote(request))
        return answer


class Redis:
    """MGET for a lookup; for a push, Adagrad in the client and a pipeline of SETs: rows and state in one value."""

    def __init__(self, config: TableConfig) -> None:
        try:
            import redis
        except ImportError as error:
            raise Unavailable("run benchmarks/setup_peers.sh") from error
        if shutil.which("redis-server") is None:
            raise Unavailable("install the package redis-server")
        self._dim = config.dim
        self._folder = tempfile.TemporaryDirectory()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", self._folder.name]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._client = redis.Redis(port=port)
        for _ in range(200):
            try:
                self._client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.05)

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        return self._rows(ids)[:, : self._dim]

    def push(self, ids: np.ndarray, gradients: np.ndarray) -> None:
        rows = self._rows(ids)
        values, norms = rows[:, : self._dim], rows[:, self._dim :]
        norms += gradients * gradients
        values -= 0.1 * gradients / np.sqrt(norms)
        with self._client.pipeline(transaction=False) as pipeline:
            for id_, row in zip(ids.tolist(), rows, strict=True):
                pipeline.set(id_, row.tobytes())
            pipeline.execute()

    def close(self) -> None:
        self._client.close()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def _rows(self, ids: np.ndarray) -> np.ndarray:
        fresh = np.concatenate([np.zeros(self._dim), np.full(self._dim, 0.1)]).astype(np.float32).tobytes()
        found = [fresh if row is None else row for row in self._client.mget(ids.tolist())]
        return np.frombuffer(b"".join(found), dtype=np.float32).reshape(len(ids), 2 * self._dim).copy()


PEERS: dict[str, type[Grpc] | type[RayActor] | type[Redis]] = {"grpcio": Grpc, "ray": RayActor, "redis": Redis}
