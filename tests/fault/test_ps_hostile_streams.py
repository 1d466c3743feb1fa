"""Danger: invalid bytes or unexpected messages end the server or hold its resources."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import struct
from pathlib import Path

import grpc
import pyarrow as pa

from forked_processes import forked_server
from monolith.ps import ClientConfig, ServerStore
from monolith.testing import sgd_table_config
from monolith.transport.calls import BasicCall
from monolith.transport.framed_socket import HELLO, hello
from monolith.transport.frames import decode, encode

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
    health = encode(call=BasicCall.HEALTH, request=1, text="{}").tobytes()
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


def test_no_flight_of_noise_ends_the_server_or_troubles_another() -> None:
    flight, table = ClientConfig(transport="flight"), sgd_table_config(1, name="t")
    with (
        forked_server("--transport", "flight") as server,
        ServerStore([server.address], [table], config=flight) as store,
    ):
        with grpc.insecure_channel(server.address) as channel:
            exchange = channel.stream_stream(METHOD)
            for seed in range(150):
                with contextlib.suppress(grpc.RpcError):
                    for _ in exchange(iter(messages(random.Random(seed))), timeout=30):
                        pass
                if seed % 50 == 0:
                    assert store.stats()["t"].rows == 0
            # The same way in is open for what is right.
            health = field(METADATA, encode(call=BasicCall.HEALTH, request=5, text="{}").tobytes())
            (answer,) = exchange(iter([field(DESCRIPTOR, COMMAND), health]))
            # The answer's application metadata is its only field.
            assert decode(answer[answer.index(b"MOPS") :]).request == 5
        assert store.health()[0]["tables"] == 1
        assert server.is_running


def connection_of_noise(rng: random.Random) -> bytes:
    """What a connection begins with, from plain noise to nearly right, and always an end."""
    health = encode(call=BasicCall.HEALTH, request=1, text="{}").tobytes()
    noise = rng.randbytes(rng.randrange(1, 200))
    message = struct.pack("<Q", len(health)) + health
    return [
        noise,
        flipped(hello(None), rng) + message,
        hello("x" * rng.randrange(60_000)) + noise,
        hello(None) + noise,
        hello(None) + flipped(message, rng),
        hello(None) + struct.pack("<Q", rng.choice([0, 1, 2**31, 2**31 + 1, 2**63, 2**64 - 1])) + health,
        hello(None) + message[: rng.randrange(len(message))],
    ][rng.randrange(7)]


def test_no_connection_of_noise_ends_the_server_or_troubles_another() -> None:
    with forked_server("--max-streams", "4") as server:
        host, _, port = server.address.rpartition(":")
        with ServerStore([server.address], [sgd_table_config(1, name="t")]) as store:
            for seed in range(300):
                with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=30) as noisy:
                    noisy.sendall(connection_of_noise(random.Random(seed)))
                    noisy.shutdown(socket.SHUT_WR)
                    # Until the server has let go of it: none of them may keep a stream.
                    while noisy.recv(4096):
                        pass
                if seed % 50 == 0:
                    assert store.stats()["t"].rows == 0
            # The same way in is open for what is right.
            with socket.create_connection((host, int(port)), timeout=30) as polite:
                polite.sendall(hello(None))
                assert HELLO.unpack(polite.recv(HELLO.size, socket.MSG_WAITALL))[2] == 0
            assert store.health()[0]["tables"] == 1
        assert server.is_running


def test_those_who_connect_and_say_nothing_do_not_keep_others_out() -> None:
    with forked_server("--max-streams", "2") as server:
        host, _, port = server.address.rpartition(":")
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(socket.create_connection((host, int(port))))
            with ServerStore([server.address]) as store:
                assert store.stats() == {}


def test_a_message_that_is_announced_and_never_sent_takes_no_memory() -> None:
    with forked_server() as server:
        host, _, port = server.address.rpartition(":")
        with ServerStore([server.address]) as store, contextlib.ExitStack() as stack:
            before = resident_bytes(server.pid)
            for _ in range(8):
                one = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
                one.sendall(hello(None))
                assert HELLO.unpack(one.recv(HELLO.size, socket.MSG_WAITALL))[2] == 0
                one.sendall(struct.pack("<Q", 2**28) + b"MOPS")
            assert store.stats() == {}
            assert resident_bytes(server.pid) - before < 2**26


def resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()
