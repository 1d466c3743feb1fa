"""Danger: a row that comes back from a message as another one, in any of the formats, or a message that takes the reader down."""

from __future__ import annotations

import random
import re
from typing import Any, get_args

import pyarrow as pa
import pytest
import torch

from monolith.data import Column, MessageDecoder, MessageEncoder, RecordHeader, decode_messages
from monolith.data.messages import StreamFormat
from monolith.errors import InvalidArgumentError, SchemaError
from monolith.features import Batch, Ragged, num_rows

COLUMNS = [
    Column(name="user", shape=()),
    Column(name="ids"),
    Column(name="pair", dtype="float32", shape=(2,)),
    Column(name="text", field="title", dtype="bytes"),
    Column(name="tags", dtype="bytes", nested=True),
    Column(name="lists", nested=True),
    Column(name="scores", dtype="float32"),
    Column(name="label", dtype="float32", shape=(1,)),
]
FORMATS = get_args(StreamFormat)
ONE_ROW = ("json", "example", "instance")


def random_row(chance: random.Random) -> dict[str, Any]:
    def ids() -> list[int]:
        return [chance.choice([0, 1, -1, 2**63 - 1, -(2**63)]) for _ in range(chance.randrange(4))]

    return {
        "user": chance.randrange(-(2**63), 2**63),
        "ids": ids(),
        "pair": [chance.randrange(8) / 4, -0.5],
        "title": "".join(chance.choices('aé"\\\n𝄞', k=chance.randrange(4))).encode(),
        "tags": [b"x" * chance.randrange(3) for _ in range(chance.randrange(3))],
        "lists": [ids() for _ in range(chance.randrange(3))],
        "scores": [chance.randrange(9) / 8 for _ in range(chance.randrange(3))],
        "label": [float(chance.randrange(2))],
    }


def rows_of(batch: Batch) -> list[tuple[Any, ...]]:
    lists = [rows.to_lists() if isinstance(rows, Ragged) else rows.tolist() for _, rows in sorted(batch.items())]
    return list(zip(*lists, strict=True))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("seed", range(4))
def test_rows_and_batches_come_back_as_they_were(format: StreamFormat, seed: int) -> None:  # noqa: A002
    chance = random.Random(seed)
    rows = [random_row(chance) for _ in range(9)]
    encoder = MessageEncoder(COLUMNS, format=format)
    from_rows = decode_messages(encoder.encode_rows(rows), COLUMNS, format=format)
    one_by_one = decode_messages([encoder.encode_row(row) for row in rows], COLUMNS, format=format)
    again = decode_messages(encoder.encode_batch(from_rows, rows_per_message=4), COLUMNS, format=format)
    assert from_rows["user"].tolist() == [row["user"] for row in rows]  # type: ignore[union-attr]
    assert [bytes(text) for text in from_rows["text"].to_lists()] == [row["title"] for row in rows]  # type: ignore[union-attr]
    assert from_rows["ids"].to_lists() == [row["ids"] for row in rows]  # type: ignore[union-attr]
    assert rows_of(from_rows) == rows_of(one_by_one) == rows_of(again)
    reference = decode_messages(MessageEncoder(COLUMNS, format="arrow").encode_rows(rows), COLUMNS, format="arrow")
    assert rows_of(from_rows) == rows_of(reference)


@pytest.mark.parametrize("format", ["example", "instance", "example_batch"])
@pytest.mark.parametrize(
    "flags", [{}, {"sort_id": True}, {"kafka_dump": True}, {"kafka_dump_prefix": True, "sort_id": True}]
)
def test_messages_may_have_the_header_of_record_files(format: StreamFormat, flags: dict[str, bool]) -> None:  # noqa: A002
    header, row = RecordHeader(**flags), random_row(random.Random(1))
    message = MessageEncoder(COLUMNS, format=format, header=header).encode_row(row)
    plain = decode_messages([MessageEncoder(COLUMNS, format=format).encode_row(row)], COLUMNS, format=format)
    assert rows_of(decode_messages([message], COLUMNS, format=format, header=header)) == rows_of(plain)
    for damaged in (b"", message[:-1], message + b"\0", message + message):
        with pytest.raises(SchemaError, match="not one record with its header"):
            decode_messages([damaged], COLUMNS, format=format, header=header)


def test_a_lagrangex_header_tells_instance_from_example() -> None:
    header, rows = RecordHeader(lagrangex=True), [random_row(random.Random(seed)) for seed in (1, 2)]
    messages = [
        MessageEncoder(COLUMNS, format="example", header=header).encode_row(rows[0]),
        MessageEncoder(COLUMNS, format="instance", header=header).encode_row(rows[1]),
    ]
    batch = decode_messages(messages, COLUMNS, format="instance", header=header)
    assert batch["user"].tolist() == [row["user"] for row in rows]  # type: ignore[union-attr]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_messages_are_cut_into_batches_of_any_size(format: StreamFormat, size: int) -> None:  # noqa: A002
    chance = random.Random(5)
    rows = [random_row(chance) for _ in range(17)]
    batch = decode_messages(MessageEncoder(COLUMNS, format="arrow").encode_rows(rows), COLUMNS, format="arrow")
    messages = MessageEncoder(COLUMNS, format=format).encode_batch(batch, rows_per_message=5)
    decoder, users, at, row = MessageDecoder(COLUMNS, format=format), [], 0, 0
    while at < len(messages):
        assert decoder.add(messages, at, row, max_rows=size) is None
        at, row = decoder.position
        part = decoder.take()
        assert num_rows(part) <= size
        users += part["user"].tolist()  # type: ignore[union-attr]
    assert users == [row["user"] for row in rows]


@pytest.mark.parametrize("format", FORMATS)
def test_random_damage_is_an_answer(format: StreamFormat) -> None:  # noqa: A002
    chance = random.Random(3)
    encoder = MessageEncoder(COLUMNS, format=format)
    for _ in range(150):
        message = bytearray(encoder.encode_rows([random_row(chance) for _ in range(3)])[0])
        for _ in range(chance.randrange(1, 4)):
            message[chance.randrange(len(message))] = chance.randrange(256)
        cut = bytes(message[: chance.choice([len(message), chance.randrange(len(message))])])
        decoder = MessageDecoder(COLUMNS, format=format)
        bad = decoder.add([cut])
        assert (bad is None) or (decoder.rows == 0 and bad.reason)
        decoder.take()


@pytest.mark.parametrize("format", ["arrow", "example", "example_batch", "instance"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_bad_unless_allowed(format: StreamFormat, value: float) -> None:  # noqa: A002
    columns = [Column(name="label", dtype="float32", shape=()), Column(name="scores", dtype="float32")]
    message = MessageEncoder(columns, format=format).encode_row({"label": value, "scores": [1.0]})
    decoder = MessageDecoder(columns, format=format)
    bad = decoder.add([message])
    assert bad is not None and "NaN or infinite" in bad.reason  # noqa: PT018
    allowing = MessageDecoder(columns, format=format, finite=False)
    assert allowing.add([message]) is None


def test_json_refuses_to_write_what_it_cannot_say() -> None:
    label = [Column(name="label", dtype="float32", shape=())]
    for batch in ({"label": torch.tensor([float("nan")])}, {"label": torch.tensor([float("inf")])}):
        with pytest.raises(SchemaError, match="JSON has no NaN"):
            MessageEncoder(label).encode_batch(batch)
    with pytest.raises(SchemaError, match="JSON has no nan"):
        MessageEncoder(label).encode_row({"label": float("nan")})
    with pytest.raises(SchemaError, match="not UTF-8, as JSON needs; use arrow"):
        MessageEncoder([Column(name="text", dtype="bytes")]).encode_row({"text": b"\xff"})


def test_arrow_offsets_that_point_outside_are_bad() -> None:
    table = pa.table({"ids": pa.array([[7] * 201], pa.list_(pa.int64()))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    message = bytes(sink.getvalue())
    offsets = b"\0\0\0\0\xc9\0\0\0"
    before, found, after = message.rpartition(offsets)  # the lengths in the metadata look like it
    assert found
    assert MessageDecoder([Column(name="ids")], format="arrow").add([message]) is None
    message = before + b"\0\0\0\0\xff\xff\0\0" + after
    bad = MessageDecoder([Column(name="ids")], format="arrow").add([message])
    assert bad is not None and "not an Arrow IPC stream" in bad.reason  # noqa: PT018


def ipc(table: pa.Table, codec: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


ZEROS = {
    "numbers": pa.table({"ids": pa.FixedSizeListArray.from_arrays(pa.array([0] * 90_000), 1)}),
    "a dictionary": pa.table({"ids": pa.DictionaryArray.from_arrays(pa.array([0, 1]), ["0" * 720_000, "1"])}),
    "a column that is not wanted": pa.table({"ids": [1], "other": ["0" * 720_000]}),
}


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("what", ZEROS)
def test_arrow_that_grows_too_much_is_refused_before_it_is_decompressed(
    what: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = ipc(ZEROS[what], codec)
    assert len(message) < 80_000
    columns = [Column(name="ids", dtype="bytes" if what == "a dictionary" else "int64")]
    assert MessageDecoder(columns, format="arrow", max_record_bytes=91_000).add([message]) is None
    opened: list[object] = []
    monkeypatch.setattr(pa.ipc, "open_stream", opened.append)
    bad = MessageDecoder(columns, format="arrow", max_record_bytes=80_000).add([message])
    assert bad is not None
    assert re.fullmatch(r"the record needs 72\d+ bytes when it is decompressed, more than 640000", bad.reason)
    assert not opened


def test_a_length_that_an_arrow_buffer_only_claims_is_not_allocated() -> None:
    message = ipc(pa.table({"ids": [0] * 1000}), "zstd")
    length = (8000).to_bytes(8, "little")
    before, found, after = message.rpartition(length)
    assert found
    bad = MessageDecoder([Column(name="ids")], format="arrow").add([before + (2**40).to_bytes(8, "little") + after])
    assert bad is not None and "needs 1099511627776 bytes when it is decompressed" in bad.reason  # noqa: PT018


def test_a_dictionary_that_many_rows_refer_to_is_not_repeated_without_limit() -> None:
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int8()), ["x" * 1000])
    message = ipc(pa.table({"text": texts}))
    columns = [Column(name="text", dtype="bytes")]
    assert MessageDecoder(columns, format="arrow", max_record_bytes=125_000).add([message]) is None
    bad = MessageDecoder(columns, format="arrow", max_record_bytes=124_000).add([message])
    assert bad is not None
    assert bad.reason == "the record needs 1000000 bytes when its dictionaries are decoded, more than 992000"


@pytest.mark.parametrize("codec", [None, "zstd", "lz4"])
def test_random_damage_of_compressed_arrow_is_an_answer(codec: str | None) -> None:
    chance = random.Random(5)
    texts = pa.array(["a", "b", "a"]).dictionary_encode()
    whole = ipc(pa.table({"user": [1, 2, 3], "ids": [[4] * 90, [5] * 90, []], "title": texts}), codec)
    columns = [Column(name="user", shape=()), Column(name="ids"), Column(name="title", dtype="bytes")]
    assert MessageDecoder(columns, format="arrow").add([whole]) is None
    for _ in range(400):
        message = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            message[chance.randrange(len(message))] = chance.randrange(256)
        decoder = MessageDecoder(columns, format="arrow", max_record_bytes=100_000)
        bad = decoder.add([bytes(message)])
        assert (bad is None) or (decoder.rows == 0 and bad.reason)


def test_formats_and_headers_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="format: expected one of json, arrow"):
        MessageDecoder(COLUMNS, format="yaml")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="json messages have none"):
        MessageEncoder(COLUMNS, header=RecordHeader())
    with pytest.raises(InvalidArgumentError, match="lagrangex"):
        MessageDecoder(COLUMNS, format="example_batch", header=RecordHeader(lagrangex=True))
