"""Danger: a stream on Redis that is less durable than its user believes, or loses what another program wrote."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import redis

from monolith.errors import AuthenticationError, InvalidArgumentError, StorageError, UnavailableError
from monolith.streams import open_stream
from monolith.streams.redis import RedisStream, offset_of
from real_servers import redis_server
from stream_kinds import read, values


def test_records_survive_a_killed_server_and_readers_wait_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_server(tmp_path) as server:
        stream = open_stream(f"redis://{server.address}/0/clicks", partitions=1)
        with stream.writer() as writer, stream.reader() as reader:
            reader.assign({"clicks/0": "start"})
            writer.append(b"before")
            writer.flush()
            assert values(read(reader, 1)["clicks/0"]) == [b"before"]
            server.stop(kill=True)
            assert reader.poll(1, 0.2) == []
            assert "waiting for it" in caplog.text
            server.start()
            with stream.writer() as again:
                again.append(b"after")
            assert values(read(reader, 1)["clicks/0"]) == [b"after"]
            assert "answers again" in caplog.text
            reader.assign({"clicks/0": "start"})
            assert values(read(reader, 2)["clicks/0"]) == [b"before", b"after"]


def test_records_that_the_server_did_not_take_are_an_error(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        writer = open_stream(f"redis://{server.address}/0/clicks", partitions=1).writer()
        server.stop(kill=True)
        writer.append(b"x")
        with pytest.raises(UnavailableError, match="1 records that were appended are not written"):
            writer.flush()
        writer.close()


def test_a_server_that_may_forget_is_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(tmp_path / "a", durable=False) as server:
        open_stream(f"redis://{server.address}/0/clicks", partitions=1).writer().close()
    assert "appendonly no" in caplog.text
    caplog.clear()
    with redis_server(tmp_path / "b") as server:
        open_stream(f"redis://{server.address}/0/clicks", partitions=1).writer().close()
    assert caplog.text == ""


def test_entries_of_other_programs_are_read_with_all_their_fields(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        stream = open_stream(f"redis://{server.address}/0/clicks", partitions=1)
        with redis.Redis(port=server.port) as client:
            client.xadd("clicks:0", {"user": "7", "item": "9"}, id="5-3")
            client.xadd("clicks:0", {"v": "value", "t": "x"}, id="5-4")
        with stream.reader() as reader:
            reader.assign({"clicks/0": "start"})
            (records,) = read(reader, 2)["clicks/0"]
    assert list(records.offsets) == [5 * 2**20 + 3, 5 * 2**20 + 4]
    assert list(records.timestamps) == [5, 5]
    assert list(records.values) == [b"", b"value"]
    assert records.headers == [(("user", b"7"), ("item", b"9")), ()]


def test_retention_by_number_is_for_the_oldest(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        url = f"redis://{server.address}/0/clicks"
        stream = open_stream(url, partitions=1, settings={"retention_records": "500"})
        with stream.writer() as writer:
            for number in range(3000):
                writer.append(b"%d" % number)
        with redis.Redis(port=server.port) as client:
            assert 500 <= client.xlen("clicks:0") < 1000
        last = stream.last("clicks/0")
        assert last is not None
        assert list(last.values) == [b"2999"]


def test_a_password_is_needed_and_shown_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    with redis_server(tmp_path, password="hunter2") as server:
        url = f"redis://{server.address}/0/clicks"
        with pytest.raises(AuthenticationError):
            open_stream(url, partitions=1)
        monkeypatch.setenv("REDIS_PASSWORD", "hunter2")
        stream = open_stream(url, partitions=1, settings={"password.env": "REDIS_PASSWORD"})
        assert isinstance(stream, RedisStream)
        with pytest.raises(AuthenticationError) as wrong:
            open_stream(url, settings={"password": "hunter3"}).partitions()
    with pytest.raises(InvalidArgumentError) as refused:
        open_stream("redis://:hunter2@localhost/0/clicks")
    for text in (repr(stream), repr(stream._settings), stream.url, caplog.text, str(refused.value), str(wrong.value)):
        assert "hunter" not in text


def test_a_key_that_is_something_else_is_an_error(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        with redis.Redis(port=server.port) as client:
            client.set("clicks:0", "x")
        with pytest.raises(StorageError, match="WRONGTYPE"):
            open_stream(f"redis://{server.address}/0/clicks").last("clicks/0")


def test_partitions_are_added(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        url = f"redis://{server.address}/0/clicks"
        with pytest.raises(InvalidArgumentError, match="there is no stream"):
            open_stream(url).partitions()
        stream = open_stream(url, partitions=1)
        assert isinstance(stream, RedisStream)
        stream.add_partitions(2)
        assert stream.partitions() == ["clicks/0", "clicks/1", "clicks/2"]
        with pytest.raises(InvalidArgumentError, match="exists with 3, fewer than 4"):
            open_stream(url, partitions=4)


@pytest.mark.parametrize(
    "url", ["redis://h", "redis://h/clicks", "redis://h/0/", "redis:///0/clicks", "redis://h/0/a?x=1"]
)
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="expected redis://host:6379/0/topic"):
        open_stream(url)


def test_ids_are_offsets_in_the_same_order() -> None:
    ids = ["0-1", "5-3", "5-4", "6-0", f"{2**42}-{2**20 - 1}"]
    assert sorted(map(offset_of, ids)) == [offset_of(each) for each in ids]
