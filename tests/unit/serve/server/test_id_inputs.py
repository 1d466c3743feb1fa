"""Danger: inputs of ids that are read all at once, and differ from the same inputs read one by one."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from monolith.features import Batch, Feature
from monolith.features.batch import IdMatrix
from monolith.nn import EmbeddingBagCollection, Head
from monolith.proto import open_inference_pb2 as messages
from monolith.serve import Predictor, export_model, load
from monolith.serve.replica import Replica
from monolith.serve.repository import ModelRepository
from monolith.serve.server.config import ServingConfig
from monolith.serve.server.model_server import ModelServer
from monolith.serve.server.protocol import decode_infer
from monolith.serve.server.tensors import MatrixInputs

NAMES = ("user", "item", "place")


class Sums(nn.Module):
    """The sum of three embeddings, weighted so that exchanged columns are noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingBagCollection([Feature(name=name, dim=2) for name in NAMES])

    def forward(self, batch: Batch) -> Tensor:
        rows = self.embeddings(batch)
        weighted = [number * rows[name] for number, name in enumerate(NAMES, 1)]
        return torch.stack(weighted).sum(dim=(0, 2))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    torch.manual_seed(0)
    model = Sums().eval()
    for table in model.embeddings.store.tables.values():  # type: ignore[attr-defined]
        table.assign(np.arange(50), torch.randn(50, 2))
    example: Batch = {name: torch.arange(4) for name in NAMES}
    return load(
        export_model(model, example, tmp_path_factory.mktemp("export"), heads=[Head(name="score", kind="regression")])
    )


@pytest.fixture(scope="module", params=[0, 64], ids=["by itself", "joined with others"])
def server(predictor: Predictor, request: pytest.FixtureRequest) -> Iterator[ModelServer]:
    repository = ModelRepository()
    repository.add(Replica("sums", predictor))
    with ModelServer(repository, ServingConfig(max_batch_rows=request.param)) as running:
        yield running


def columns(rows: int) -> dict[str, list[int]]:
    generator = np.random.default_rng(rows)
    return {name: generator.integers(0, 50, rows).tolist() for name in NAMES}


def scores(server: ModelServer, body: bytes, json_bytes: int | None = None) -> Any:  # noqa: ANN401
    connection = http.client.HTTPConnection(server.http_address, timeout=20)
    headers = {} if json_bytes is None else {"Inference-Header-Content-Length": str(json_bytes)}
    connection.request("POST", "/v2/models/sums/infer", body, headers)
    tree = json.loads(connection.getresponse().read())
    connection.close()
    return tree.get("error") or {one["name"]: one["data"] for one in tree["outputs"]}


def tensors(given: dict[str, list[int]], **more: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    return [
        {"name": name, "datatype": "INT64", "shape": [len(ids)], "data": ids, **more} for name, ids in given.items()
    ]


@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("order", [NAMES, NAMES[::-1], ("other", *NAMES), ("place", "user", "other", "item")])
def test_the_order_of_inputs_and_others_among_them_do_not_matter(
    server: ModelServer, predictor: Predictor, rows: int, order: tuple[str, ...]
) -> None:
    given = columns(rows)
    wanted = predictor.predict({name: torch.tensor(ids) for name, ids in given.items()})["score"].tolist()
    sent = {name: given.get(name, [7] * rows) for name in order}
    assert scores(server, json.dumps({"inputs": tensors(sent)}).encode())["score"] == pytest.approx(wanted)
    head = [
        {"name": name, "datatype": "INT64", "shape": [rows], "parameters": {"binary_data_size": 8 * rows}}
        for name in order
    ]
    text = json.dumps({"inputs": head}).encode()
    data = b"".join(np.array(ids, dtype=np.int64).tobytes() for ids in sent.values())
    assert scores(server, text + data, len(text))["score"] == pytest.approx(wanted)
    message = messages.ModelInferRequest(model_name="sums")
    for name, ids in sent.items():
        message.inputs.add(name=name, datatype="INT64", shape=[rows])
        message.raw_input_contents.append(np.array(ids, dtype=np.int64).tobytes())
    with grpc.insecure_channel(server.grpc_address) as channel:
        answer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(
            message.SerializeToString(), timeout=20
        )
    found = np.frombuffer(messages.ModelInferResponse.FromString(answer).raw_output_contents[0], np.float32)
    assert found.tolist() == pytest.approx(wanted)


def test_one_user_and_many_items_still_work(server: ModelServer, predictor: Predictor) -> None:
    given = columns(9) | {"user": [3], "place": [4]}
    full = {"user": [3] * 9, "item": given["item"], "place": [4] * 9}
    best = predictor.predict({name: torch.tensor(ids) for name, ids in full.items()})["score"].argsort(descending=True)
    for sent in (given, full):
        body = json.dumps({"inputs": tensors(sent), "parameters": {"top_k": 4}}).encode()
        assert scores(server, body)["indices"] == best[:4].tolist()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"item": [1, 2]}, "expected 1 rows as in"),
        ({"item": [True]}, "inputs['item'].data: expected whole numbers of 64 bits for INT64"),
        ({"item": [1.5]}, "inputs['item'].data: expected whole numbers of 64 bits for INT64"),
        ({"item": [2**63]}, "inputs['item'].data: INT64 is below 2**63"),
        ({"item": [[1]]}, "inputs['item'].data: expected 1 elements for [1], got lists of shape [1, 1]"),
        ({"item": ["1"]}, "inputs['item'].data: expected whole numbers of 64 bits for INT64"),
    ],
)
def test_an_error_names_the_input_that_is_wrong(server: ModelServer, changed: dict[str, Any], message: str) -> None:
    body = json.dumps({"inputs": tensors(columns(1) | changed)}).encode()
    assert message in scores(server, body)


def test_an_input_that_is_given_twice_is_refused(server: ModelServer) -> None:
    twice = [*tensors(columns(1)), *tensors({"item": [1]})]
    assert scores(server, json.dumps({"inputs": twice}).encode()) == "inputs['item']: is given twice"


def test_requests_for_the_usual_model_are_one_matrix(predictor: Predictor) -> None:
    request = decode_infer(json.dumps({"inputs": tensors(columns(2))}).encode(), None, max_json_bytes=1 << 20)
    assert isinstance(request.inputs, MatrixInputs), "each would be a tensor of its own"
    matrix = request.inputs.matrix
    assert isinstance(matrix, IdMatrix)
    assert predictor.predict(matrix)["score"].tolist() == predictor.predict(dict(matrix))["score"].tolist()
