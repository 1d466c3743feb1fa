"""A Primus application master for tests: a real gRPC server in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from monolith.proto import primus_am_service_pb2 as primus

Status = primus.CreateSavepointStatusResponse

REQUESTS = {
    "kill": primus.KillRequest,
    "succeed": primus.SucceedRequest,
    "createSavepoint": primus.CreateSavepointRequest,
    "createSavepointStatus": primus.CreateSavepointStatusRequest,
}


class Master:
    """Remembers what it was asked, with the time the caller was willing to wait, and answers from `answers`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.deadlines: list[float] = []
        self.answers: dict[str, Callable[[], Any]] = {
            "kill": primus.KillResponse,
            "succeed": primus.SucceedResponse,
            "createSavepoint": lambda: primus.CreateSavepointResponse(savepoint_id="sp-1"),
            "createSavepointStatus": lambda: Status(create_savepoint_state=Status.SUCCEEDED),
        }

    def handler(self, name: str, request_type: Any) -> grpc.RpcMethodHandler:  # noqa: ANN401 - a generated class
        def answer(request: Any, context: grpc.ServicerContext) -> Any:  # noqa: ANN401 - a message
            self.asked.append((name, request))
            self.deadlines.append(context.time_remaining())
            return self.answers[name]()

        return grpc.unary_unary_rpc_method_handler(
            answer, request_deserializer=request_type.FromString, response_serializer=lambda m: m.SerializeToString()
        )


@contextmanager
def serving(unix_socket: Path | None = None) -> Iterator[tuple[Master, dict[str, str]]]:
    """A master, on TCP without a `unix_socket`, and the environment that says where it is."""
    master = Master()
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        handlers = {name: master.handler(name, kind) for name, kind in REQUESTS.items()}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("primus.AppMasterService", handlers)])
        if unix_socket is not None:
            host, port = "unix", str(unix_socket)
            server.add_insecure_port(f"unix:{port}")
        else:
            host, port = "127.0.0.1", str(server.add_insecure_port("127.0.0.1:0"))
        server.start()
        yield master, {"PRIMUS_AM_RPC_HOST": host, "PRIMUS_AM_RPC_PORT": port}
        server.stop(grace=None).wait()
