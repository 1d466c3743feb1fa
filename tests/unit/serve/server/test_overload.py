"""Danger: a server that takes on more than it can answer, so that every request gets late, or one that hangs in its queue."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from monolith.errors import DeadlineExceededError, OverloadedError
from monolith.proto import open_inference_pb2 as messages
from monolith.serve.server.limits import Admission, deadline_of
from monolith.serve.server.routing import Answered
from served_models import ServeSums, columns, sum_replica


class Statuses:
    """Counts how requests ended."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def answered(self, answered: Answered) -> None:
        self.seen.append(answered.status)


def test_requests_beyond_the_queue_are_shed_and_those_accepted_are_answered(serve_sums: ServeSums) -> None:
    gate = threading.Event()
    gate.set()
    statuses = Statuses()
    replica = sum_replica(gate=gate)
    # Larger than what is answered in the event loop, so that the test can hold several requests at once.
    server, client = serve_sums(replica, max_concurrency=1, max_queue=1, observers=[statuses])
    gate.clear()
    large = columns(*[1.0] * 10_000)
    with ThreadPoolExecutor(2) as pool:
        accepted = [pool.submit(client.infer, large)]
        model = replica.predictor
        for _ in range(4):  # three of the warm-up, then the request
            assert model.entered.acquire(timeout=20)  # type: ignore[attr-defined]
        accepted.append(pool.submit(client.infer, large))
        wait_until_admitted(server.handler.admission, 2)
        with pytest.raises(OverloadedError, match="2 requests run or wait, as many as are allowed"):
            client.infer(large)
        assert client.live()
        assert client.ready(), "a busy server is still ready"
        gate.set()
        assert [len(one.result()["sum"]) for one in accepted] == [10_000, 10_000]
    assert sorted(statuses.seen) == ["ok", "ok", "overloaded"]


def wait_until_admitted(admission: Admission, count: int) -> None:
    reached = threading.Event()
    while admission.admitted < count:
        reached.wait(0.005)


def test_grpc_sheds_with_resource_exhausted(serve_sums: ServeSums) -> None:
    server, _ = serve_sums(max_concurrency=1, max_queue=0)
    server.handler.admission.admit()  # as a request that is on its way
    request = messages.ModelInferRequest(model_name="sums")
    with grpc.insecure_channel(server.grpc_address) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=messages.ModelInferRequest.SerializeToString,
            response_deserializer=messages.ModelInferResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as refused:
            call(request, timeout=20)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    server.handler.admission.leave()


def test_a_request_whose_deadline_is_over_is_not_predicted(serve_sums: ServeSums) -> None:
    replica = sum_replica()
    _, client = serve_sums(replica, deadline_secs=1e-9)
    predicted = len(replica.predictor.rows)  # type: ignore[attr-defined]
    with pytest.raises(DeadlineExceededError, match="before it was predicted"):
        client.infer(columns(1.0))
    assert len(replica.predictor.rows) == predicted  # type: ignore[attr-defined]


def test_a_waiting_request_gives_up_at_its_deadline() -> None:
    admission = Admission(max_concurrency=1, max_queue=1)
    admission.admit()
    assert admission.try_start()
    admission.admit()
    with pytest.raises(DeadlineExceededError, match="waited for its turn"):
        admission.start(0.0)
    admission.finish()
    admission.start(0.0)  # free again: no need to wait


@pytest.mark.parametrize(("given", "seconds"), [(None, 10.0), (0, 10.0), ("250000", 0.25), (60_000_000, 10.0)])
def test_a_client_may_ask_for_less_time_than_the_server_allows(given: object, seconds: float) -> None:
    assert deadline_of(5.0, 10.0, given) == 5.0 + seconds
