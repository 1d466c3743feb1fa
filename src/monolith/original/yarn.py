"""Primus on YARN: calls to the application master that runs the job."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import Int64Value

from monolith.cluster.net import concat_ip_and_port
from monolith.cluster.scheduler import Scheduler
from monolith.optional_packages import import_extra
from monolith.proto import primus_am_service_pb2 as primus

if TYPE_CHECKING:
    import grpc

__all__ = ["PrimusScheduler", "create_primus_save_point", "maybe_finish_application", "maybe_kill_application"]

_logger = logging.getLogger(__name__)
_SERVICE = primus.DESCRIPTOR.services_by_name["AppMasterService"].full_name
_CALL_SECS = 10.0
_GRACE_MS = 20_000
_POLL_SECS = 5.0

Response = TypeVar("Response", bound=Message)


class PrimusScheduler(Scheduler):
    """Reports the end of a job to the Primus application master."""

    title = "a Primus application"

    def job_ended(self, failure: BaseException | None) -> None:
        """Tell the application master that the job has succeeded, or which error broke it."""
        if failure is None:
            maybe_finish_application(environ=self.environ)
        else:
            maybe_kill_application(f"{type(failure).__name__}: {failure}", environ=self.environ)


def maybe_kill_application(reason: str, *, environ: Mapping[str, str] | None = None) -> bool:
    """Ask the application master to end the job as failed because of `reason`. Returns whether it accepted the request.

    Returns False, with a line in the log, if there is no master (PRIMUS_AM_RPC_HOST and PRIMUS_AM_RPC_PORT) or it does not
    answer.
    """
    request = primus.KillRequest(exit_code=1, diagnose=reason, graceful_shutdown_timeout_ms=Int64Value(value=_GRACE_MS))
    return _tell("kill", request, primus.KillResponse, environ)


def maybe_finish_application(*, environ: Mapping[str, str] | None = None) -> bool:
    """Tell the application master that the job has succeeded. Returns as `maybe_kill_application` does."""
    request = primus.SucceedRequest(graceful_shutdown_timeout_ms=Int64Value(value=_GRACE_MS))
    return _tell("succeed", request, primus.SucceedResponse, environ)


def create_primus_save_point(
    dst: str, *, environ: Mapping[str, str] | None = None, sleep: Callable[[float], None] = time.sleep
) -> bool:
    """Ask the application master for a savepoint of its data positions in the folder `dst`, and wait until it is made.

    Returns False, with a line in the log, if there is no master, or it does not answer, refuses or fails.
    """
    address = _primus_am_address(environ)
    if not address:
        _logger.info("no Primus application master, so no savepoint is made")
        return False
    grpc = import_extra("grpc", extra="yarn", purpose="calling the Primus application master")
    try:
        with grpc.insecure_channel(address) as channel:
            return _create_save_point(channel, dst, sleep)
    except grpc.RpcError as error:
        _logger.error("the Primus application master at %s made no savepoint: %s", address, _reason(error))
        return False


def _primus_am_address(environ: Mapping[str, str] | None) -> str:
    """Return `host:port` of the application master, `unix:path` for a socket, or an empty string if there is none."""
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
        _logger.debug("no Primus application master, so %r is not sent", method)
        return False
    grpc = import_extra("grpc", extra="yarn", purpose="calling the Primus application master")
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
    # Errors of calls have both, though their common class does not declare them.
    return f"{error.code().name}, {error.details()}"
