"""Danger: a client that hangs, hides why a request failed, or fails because a server has closed an idle connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from monolith.errors import ConfigError, DeadlineExceededError, InvalidArgumentError, ProtocolError, UnavailableError
from monolith.features import Ragged
from monolith.serve import Client
from monolith.serve.replica import Replica
from monolith.serve.server.model_server import ModelServer
from served_models import ServeSums, columns, sum_replica
from training import batch_of


@pytest.fixture
def answering() -> Iterator[tuple[str, list[bytes]]]:
    """A server that sends what it is given, one text per connection, and its address."""
    texts: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    if texts:
                        connection.sendall(texts.pop(0))

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", texts
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def http(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 " + status + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def test_a_connection_that_is_lost_is_replaced(answering: tuple[str, list[bytes]]) -> None:
    address, texts = answering
    texts += [b"", b"", http(b'{"models": ["clicks"]}')]
    with Client(address, timeout=20.0) as client:
        assert client.models() == ["clicks"]
    assert texts == []


def test_an_idle_connection_that_the_server_closed_does_not_fail_a_request(serve_sums: ServeSums) -> None:
    _, client = serve_sums()
    assert client.infer(columns(1.0))["sum"].tolist() == [2.0]
    (idle,) = client._idle
    assert idle.sock is not None
    idle.sock.shutdown(socket.SHUT_RDWR)
    assert client.infer(columns(2.0))["sum"].tolist() == [4.0]


def test_what_is_not_an_answer_is_a_typed_error(answering: tuple[str, list[bytes]]) -> None:
    address, texts = answering
    for body in (
        b"<html>",
        b'{"outputs": [{}]}',
        b'{"outputs": [{"name": "a", "datatype": "FP32", "shape": [2], "data": [1]}]}',
    ):
        texts.append(http(body))
        with Client(address, model="m", timeout=20.0) as client, pytest.raises(ProtocolError, match="the answer"):
            client.infer(columns(1.0))
    texts.append(http(b"oh", b"503 Service Unavailable"))
    with Client(address, model="m", timeout=20.0) as client, pytest.raises(UnavailableError, match="oh"):
        client.infer(columns(1.0))


def test_a_server_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with Client(address, model="m", timeout=0.2) as client, pytest.raises(DeadlineExceededError, match="in time"):
            client.infer(columns(1.0))


def test_an_address_nobody_listens_on_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with Client(address, timeout=0.3) as client:
        assert not client.live()
        with pytest.raises(UnavailableError, match="cannot be reached"):
            client.infer(columns(1.0), model="m")


def test_columns_of_every_kind_arrive_as_they_are(clicks: tuple[ModelServer, Replica]) -> None:
    server, replica = clicks
    batch = batch_of(5, 3)
    expected = replica.predict(batch)["click"].tolist()
    tags = batch["tags"]
    assert isinstance(tags, Ragged)
    tensors = {name: torch.as_tensor(batch[name]) for name in ("user", "item", "age")}
    with Client(server.http_address) as client:
        assert client.infer({**tensors, "tags": tags})["click"].tolist() == expected
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        arrays["user"] = arrays["user"].astype(np.int32)
        assert client.infer({**arrays, "tags": tags.to_lists()})["click"].tolist() == expected
        transposed = torch.as_tensor(batch["age"]).t().contiguous().t()
        assert client.infer({**tensors, "age": transposed, "tags": tags})["click"].tolist() == expected
        with pytest.raises(InvalidArgumentError, match=r"columns\['user'\]: expected numbers"):
            client.infer({**tensors, "tags": tags, "user": "me"})


def test_the_answer_says_which_version_and_how_old(serve_sums: ServeSums) -> None:
    _, client = serve_sums(sum_replica(5, follows=True))
    answer = client.infer(columns(1.0), request_id="seven")
    assert (answer.model, answer.version, answer.id, answer.lag, answer.step) == ("sums", 5, "seven", 0.25, 41)


def test_outputs_can_be_chosen(clicks: tuple[ModelServer, Replica]) -> None:
    server, _ = clicks
    batch = {name: batch_of(5, 3)[name] for name in ("user", "item", "tags", "age")}
    with Client(server.http_address) as client:
        assert list(client.infer(batch, outputs=["stay"])) == ["stay"]
        with pytest.raises(InvalidArgumentError, match=r"outputs\['leave'\]: expected one of 'click', 'stay'"):
            client.infer(batch, outputs=["leave"])


@pytest.mark.parametrize("address", ["ftp://host:1", "http://", "host:1/path"])
def test_an_address_that_cannot_be_meant_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="address: expected host:port"):
        Client(address)
