"""Danger: bytes that are not even Flight messages, or Flight messages nobody expects, that end the server."""

from __future__ import annotations

import contextlib
import random

import grpc
import pyarrow as pa

from monolith.ps import RemoteStore
from monolith.ps.frames import decode, encode
from monolith.ps.messages import Call
from monolith.testing import sgd_table_config
from monolith.testing.parameter_servers import server_process

METHOD = "/arrow.flight.protocol.FlightService/DoExchange"
DESCRIPTOR, HEADER, METADATA, BODY = 1, 2, 3, 1000  # fields of a FlightData message
COMMAND = b"\x08\x02"  # a descriptor whose type is a command


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def schema_header() -> bytes:
    """What a client that sends record batches begins with."""
    return pa.schema([("words", pa.int64())]).serialize().to_pybytes()[8:]


def messages(rng: random.Random) -> list[bytes]:
    """A stream of up to four messages, from plain noise to nearly right."""
    health = encode(call=Call.HEALTH, request=1, text="{}").tobytes()
    made = []
    for _ in range(rng.randrange(1, 5)):
        noise = rng.randbytes(rng.randrange(1, 200))
        kind = rng.randrange(6)
        made.append(
            [
                noise,
                field(METADATA, noise),
                field(HEADER, noise) + field(METADATA, health),
                field(HEADER, schema_header()) + field(BODY, noise),
                field(HEADER, flipped(schema_header(), rng)) + field(BODY, noise),
                field(METADATA, flipped(health, rng)),
            ][kind]
        )
    # Flight wants to know in the first message what the stream is for; most are let through that door.
    return [field(DESCRIPTOR, COMMAND), *made] if rng.random() < 0.9 else made


def flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def test_no_stream_of_noise_ends_the_server_or_troubles_another() -> None:
    with server_process() as server, RemoteStore(server.address, [sgd_table_config(1, name="t")]) as store:
        with grpc.insecure_channel(server.address) as channel:
            exchange = channel.stream_stream(METHOD)
            for seed in range(150):
                with contextlib.suppress(grpc.RpcError):
                    for _ in exchange(iter(messages(random.Random(seed))), timeout=30):
                        pass
                if seed % 50 == 0:
                    assert store.stats()["t"].rows == 0
            # The same way in is open for what is right.
            health = field(METADATA, encode(call=Call.HEALTH, request=5, text="{}").tobytes())
            (answer,) = exchange(iter([field(DESCRIPTOR, COMMAND), health]))
            # The answer's application metadata is its only field.
            assert decode(answer[answer.index(b"MOPS") :]).request == 5
        assert store.health()[0]["tables"] == 1
        assert server.is_running
