"""Asks a server of `SumModel` with KServe's clients, in an environment of their own: they need an older protobuf."""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig


def request_of(binary: bool) -> InferRequest:
    inputs = []
    for name in ("a", "b"):
        one = InferInput(name, [3], "FP32")
        one.set_data_from_numpy(np.array([1.0, 2.0, 3.0], np.float32), binary_data=binary)
        inputs.append(one)
    return InferRequest("sums", inputs, request_id="seven")


async def main(http: str, grpc: str) -> None:
    found: dict[str, object] = {}
    rest = InferenceRESTClient(RESTConfig(protocol="v2", retries=0, timeout=20))
    url = f"http://{http}"
    found["live"] = await rest.is_server_live(url)
    found["ready"] = await rest.is_server_ready(url)
    found["model_ready"] = await rest.is_model_ready(url, "sums")
    for name, binary in (("json", False), ("binary", True)):
        answer = await rest.infer(url, request_of(binary), model_name="sums")
        found[name] = [answer.id, answer.outputs[0].as_numpy().tolist()]  # this client does not keep the version
    await rest.close()
    rpc = InferenceGRPCClient(grpc, timeout=20, retries=0)
    found["grpc_live"] = await rpc.is_server_live()
    found["grpc_ready"] = await rpc.is_server_ready()
    found["grpc_model_ready"] = await rpc.is_model_ready("sums")
    for name, binary in (("grpc", False), ("grpc_raw", True)):
        answer = await rpc.infer(request_of(binary))
        found[name] = [answer.id, answer.model_version, answer.outputs[0].as_numpy().tolist()]
    await rpc.close()
    sys.stdout.write(json.dumps(found) + "\n")


asyncio.run(main(*sys.argv[1:]))
