"""Danger: a standard client of the Open Inference Protocol that cannot ask this server, or gets other numbers than the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from monolith.features import Ragged
from monolith.features.batch import Batch
from monolith.serve.replica import Replica
from monolith.serve.server.model_server import ModelServer
from served_models import ServeSums, sum_replica
from training import batch_of

KINDS = {np.dtype("int64"): "INT64", np.dtype("float32"): "FP32", np.dtype("int32"): "INT32"}


@pytest.fixture(params=["http", "grpc"])
def triton(request: pytest.FixtureRequest) -> Any:  # noqa: ANN401 - one of two modules with the same names
    return {"http": tritonclient.http, "grpc": tritonclient.grpc}[request.param]


def address(server: ModelServer, triton: Any) -> str:  # noqa: ANN401
    return server.http_address if triton is tritonclient.http else server.grpc_address


def inputs_of(triton: Any, arrays: dict[str, np.ndarray], **options: Any) -> list[Any]:  # noqa: ANN401
    inputs = []
    for name, array in arrays.items():
        one = triton.InferInput(name, list(array.shape), KINDS[array.dtype])
        one.set_data_from_numpy(array, **options)
        inputs.append(one)
    return inputs


def arrays_of(batch: Batch) -> dict[str, np.ndarray]:
    tags = batch["tags"]
    assert isinstance(tags, Ragged)
    dense = {name: torch.as_tensor(batch[name]).numpy() for name in ("user", "item", "age")}
    return {**dense, "tags": tags.values.numpy(), "tags.splits": tags.offsets.numpy()}


@pytest.mark.parametrize("rows", [1, 8, 300])
def test_predictions_are_those_of_the_model(clicks: tuple[ModelServer, Replica], triton: Any, rows: int) -> None:  # noqa: ANN401
    server, replica = clicks
    batch = batch_of(3, rows)
    expected = replica.predict(batch)
    with triton.InferenceServerClient(address(server, triton)) as client:
        result = client.infer("clicks", inputs_of(triton, arrays_of(batch)), request_id="seven")
        for name, output in expected.items():
            np.testing.assert_array_equal(result.as_numpy(name), output.numpy())
        answer = result.get_response()
        assert (answer["id"] if triton is tritonclient.http else answer.id) == "seven"


def test_json_tensors_and_chosen_outputs(clicks: tuple[ModelServer, Replica]) -> None:
    server, replica = clicks
    batch = batch_of(4, 5)
    with tritonclient.http.InferenceServerClient(server.http_address) as client:
        wanted = [tritonclient.http.InferRequestedOutput("stay", binary_data=False)]
        result = client.infer(
            "clicks", inputs_of(tritonclient.http, arrays_of(batch), binary_data=False), outputs=wanted
        )
    np.testing.assert_allclose(result.as_numpy("stay"), replica.predict(batch)["stay"].numpy(), rtol=1e-6)
    assert result.as_numpy("click") is None


def test_health_metadata_and_versions(clicks: tuple[ModelServer, Replica], triton: Any) -> None:  # noqa: ANN401
    server, replica = clicks
    with triton.InferenceServerClient(address(server, triton)) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("clicks")
        assert client.is_model_ready("clicks", str(replica.version))
        assert not client.is_model_ready("clicks", "5")
        options = {} if triton is tritonclient.http else {"as_json": True}
        assert client.get_server_metadata(**options)["name"] == "monolith"
        found = client.get_model_metadata("clicks", **options)
        assert found["versions"] == [str(replica.version)]
        assert [one["name"] for one in found["inputs"]] == ["user", "item", "tags", "tags.splits", "age"]
        assert [one["datatype"] for one in found["inputs"]] == ["INT64", "INT64", "INT64", "INT64", "FP32"]
        assert [[int(size) for size in one["shape"]] for one in found["outputs"]] == [[-1], [-1]]
        index = client.get_model_repository_index(**options)
        (model,) = index if triton is tritonclient.http else index["models"]
        assert (model["name"], model["state"]) == ("clicks", "READY")


def test_errors_reach_the_client_with_their_status(clicks: tuple[ModelServer, Replica], triton: Any) -> None:  # noqa: ANN401
    server, _ = clicks
    arrays = arrays_of(batch_of(3, 4))
    with triton.InferenceServerClient(address(server, triton)) as client:
        with pytest.raises(InferenceServerException, match="model 'clix': there is no such model") as missing:
            client.infer("clix", inputs_of(triton, arrays))
        assert missing.value.status() in ("404", "StatusCode.NOT_FOUND")
        with pytest.raises(InferenceServerException, match=r"inputs\['user'\]: .* but it is missing") as invalid:
            client.infer("clicks", inputs_of(triton, {"item": arrays["item"]}))
        assert invalid.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
        with pytest.raises(InferenceServerException, match=r"inputs\['tags.splits'\]") as splits:
            client.infer("clicks", inputs_of(triton, {**arrays, "tags.splits": np.array([0, 3, 1, 2, 4])}))
        assert splits.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")


def test_lag_and_version_come_with_every_answer(serve_sums: ServeSums, triton: Any) -> None:  # noqa: ANN401
    server, _ = serve_sums(sum_replica(5, follows=True))
    arrays = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}
    with triton.InferenceServerClient(address(server, triton)) as client:
        answer = client.infer("sums", inputs_of(triton, arrays)).get_response()
    if triton is tritonclient.http:
        found = answer["parameters"]
    else:
        found = {name: getattr(one, one.WhichOneof("parameter_choice")) for name, one in answer.parameters.items()}
    assert found == {
        "monolith_version": 5,
        "monolith_step": 41,
        "monolith_lag_seconds": 0.25,
        "monolith_sequence": 9,
        "monolith_event_time": 1_700_000_000,
    }


def test_the_timeout_of_a_request_is_a_deadline(serve_sums: ServeSums, triton: Any) -> None:  # noqa: ANN401
    server, _ = serve_sums()
    arrays = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}
    with (
        triton.InferenceServerClient(address(server, triton)) as client,
        pytest.raises(InferenceServerException, match="the deadline of the request was exceeded") as late,
    ):
        client.infer("sums", inputs_of(triton, arrays), timeout=1)  # a microsecond
    assert late.value.status() in ("504", "StatusCode.DEADLINE_EXCEEDED")
