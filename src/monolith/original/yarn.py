"""YARN and Primus: the address this process has for others, and calls to the application master that runs the job."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import Int64Value

from monolith.cluster.net import concat_ip_and_port, get_local_ip
from monolith.errors import DiscoveryError
from monolith.proto import primus_am_service_pb2 as primus

if TYPE_CHECKING:
    import grpc

__all__ = ["create_primus_save_point", "get_local_host", "maybe_finish_application", "maybe_kill_application"]

_logger = logging.getLogger(__name__)
_SERVICE = primus.DESCRIPTOR.services_by_name["AppMasterService"].full_name
_CALL_SECS = 10.0
_GRACE_MS = 20_000
_POLL_SECS = 5.0

Response = TypeVar("Response", bound=Message)


def get_local_host(environ: Mapping[str, str] | None = None) -> str:
    """The host under which others reach this process.

    The first entry of the variable CLOUDNATIVE_INET_ADDR, else YARN_INET_ADDR, else the address of the machine's own name.

    Example:
        >>> get_local_host({"CLOUDNATIVE_INET_ADDR": "1.2.3.4,5.6.7.8", "YARN_INET_ADDR": "9.9.9.9"})
        '1.2.3.4'
    """
    environ = os.environ if environ is None else environ
    if "CLOUDNATIVE_INET_ADDR" in environ:
        host = environ["CLOUDNATIVE_INET_ADDR"].split(",")[0]
    else:
        host = environ["YARN_INET_ADDR"] if "YARN_INET_ADDR" in environ else get_local_ip()
    if not host:
        raise DiscoveryError("this host has no address: CLOUDNATIVE_INET_ADDR or YARN_INET_ADDR is set to nothing")
    return host


def maybe_kill_application(reason: str, *, environ: Mapping[str, str] | None = None) -> bool:
    """Ask the application master to end the job as failed because of `reason`; whether it took the request.

    False, and a line in the log, without a master (PRIMUS_AM_RPC_HOST and PRIMUS_AM_RPC_PORT) or when it does not answer.
    """
    request = primus.KillRequest(exit_code=1, diagnose=reason, graceful_shutdown_timeout_ms=Int64Value(value=_GRACE_MS))
    return _tell("kill", request, primus.KillResponse, environ)


def maybe_finish_application(*, environ: Mapping[str, str] | None = None) -> bool:
    """Tell the application master that the job has succeeded; whether it took the message, as for `maybe_kill_application`."""
    request = primus.SucceedRequest(graceful_shutdown_timeout_ms=Int64Value(value=_GRACE_MS))
    return _tell("succeed", request, primus.SucceedResponse, environ)


def create_primus_save_point(
    dst: str, *, environ: Mapping[str, str] | None = None, sleep: Callable[[float], None] = time.sleep
) -> bool:
    """Ask the application master for a savepoint of its data positions in the folder `dst`, and wait until it is made.

    False, and a line in the log, without a master, when it does not answer, and when it refuses or fails.
    """
    address = _primus_am_address(environ)
    if not address:
        _logger.info("no Primus application master, no savepoint")
        return False
    import grpc

    try:
        with grpc.insecure_channel(address) as channel:
            return _create_save_point(channel, dst, sleep)
    except grpc.RpcError as error:
        _logger.error("the Primus application master at %s made no savepoint: %s", address, _reason(error))
        return False


def _primus_am_address(environ: Mapping[str, str] | None) -> str:
    """`host:port` of the application master, `unix:path` for a socket, empty if there is none."""
    environ = os.environ if environ is None else environ
    host, port = environ.get("PRIMUS_AM_RPC_HOST", ""), environ.get("PRIMUS_AM_RPC_PORT", "")
    return concat_ip_and_port(host, port) if host and port else ""


def _call(channel: grpc.Channel, method: str, request: Message, response: type[Response]) -> Response:
    call = channel.unary_unary(
        f"/{_SERVICE}/{method}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=response.FromString,
    )
    answer: Response = call(request, timeout=_CALL_SECS)
    return answer


def _tell(method: str, request: Message, response: type[Message], environ: Mapping[str, str] | None) -> bool:
    address = _primus_am_address(environ)
    if not address:
        _logger.debug("no Primus application master, nobody to ask for %r", method)
        return False
    import grpc

    try:
        with grpc.insecure_channel(address) as channel:
            _call(channel, method, request, response)
    except grpc.RpcError as error:
        _logger.error("the Primus application master at %s did not %s: %s", address, method, _reason(error))
        return False
    return True


def _create_save_point(channel: grpc.Channel, dst: str, sleep: Callable[[float], None]) -> bool:
    request = primus.CreateSavepointRequest(savepoint_dir=dst)
    begun = _call(channel, "createSavepoint", request, primus.CreateSavepointResponse)
    if begun.code != 0:
        _logger.error("Primus refused a savepoint in %s: code %d, %s", dst, begun.code, begun.message)
        return False
    question = primus.CreateSavepointStatusRequest(savepoint_restore_id=begun.savepoint_id)
    while True:
        status = _call(channel, "createSavepointStatus", question, primus.CreateSavepointStatusResponse)
        state = status.create_savepoint_state
        if state not in (status.PENDING, status.RUNNING):
            break
        sleep(_POLL_SECS)
    if state != status.SUCCEEDED:
        _logger.error("Primus failed to make a savepoint in %s: state %d, %s", dst, state, status.message)
        return False
    _logger.info("Primus made a savepoint in %s", dst)
    return True


def _reason(error: grpc.RpcError) -> str:
    # Every error of a call has these; the class itself does not promise them.
    return f"{error.code().name}, {error.details()}"
