"""`MockKafka`: librdkafka's mock cluster in a process of its own, for tests and demonstrations. Other processes connect to it.

It speaks the real protocol and keeps records in memory, about the last 5 MB of a partition. It does not look up offsets by
time. The functions of librdkafka that make and disturb it are not in its Python package, so they are called by ctypes.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from monolith.errors import MonolithError
from monolith.optional_packages import import_extra

__all__ = ["MockKafka"]

_STOP_SECS = 20.0


class MockKafka:
    """A mock cluster of one broker, from the start of a `with` block to its end.

    Example:
        >>> from monolith.streams import open_stream
        >>> with MockKafka({"clicks": 2}) as kafka:
        ...     open_stream(kafka.url("clicks")).partitions()
        ['clicks/0', 'clicks/1']
    """

    def __init__(self, topics: dict[str, int] | None = None) -> None:
        """`topics`: names of topics to make, with the number of their partitions."""
        self._topics = topics or {}
        self._process: subprocess.Popen[str] | None = None
        self.address = ""
        """`127.0.0.1:port`, known once it is started."""

    def url(self, topics: str) -> str:
        """Return the URL of a stream of one or more topics, with commas between them."""
        return f"kafka://{self.address}/{topics}"

    def start(self) -> Self:
        """Start, and return when it answers."""
        # If this process is killed, nothing else would end the cluster.
        tie = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        self._process = subprocess.Popen(
            # Not as a module: its package imports torch, which takes longer than the tests.
            [*tie, sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = str(self._call("address"))
        for topic, partitions in self._topics.items():
            self.create_topic(topic, partitions)
        return self

    def create_topic(self, name: str, partitions: int) -> None:
        """Make a topic. A producer that names an unknown one makes it with four partitions."""
        self._call("create_topic", name, partitions)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Remove the records before an offset, as retention does."""
        self._call("delete_records", topic, partition, before)

    def set_down(self) -> None:
        """Close all connections and accept no more, until `set_up`."""
        self._call("set_down")

    def set_up(self) -> None:
        """Accept connections again."""
        self._call("set_up")

    def fail_requests(self, api: int, errors: list[int]) -> None:
        """Answer the next requests of an API, by its number in the protocol, with these errors of the protocol."""
        self._call("fail_requests", api, errors)

    def stop(self) -> None:
        """End the process. What it had is lost. Calling it twice is harmless."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            try:
                process.wait(_STOP_SECS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _call(self, name: str, *arguments: object) -> object:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise MonolithError("MockKafka: it is not started")
        process.stdin.write(json.dumps([name, *arguments]) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        answer: dict[str, object] = json.loads(line) if line else {"error": "its process has ended"}
        if "error" in answer:
            raise MonolithError(f"MockKafka: {name}: {answer['error']}")
        return answer["result"]


class _Cluster:
    """The mock cluster of this process, by the functions of librdkafka."""

    def __init__(self) -> None:
        import_extra("confluent_kafka", extra="kafka", purpose="the mock cluster")
        self._library = ctypes.CDLL(_loaded_library())
        settings = self._pointer("rd_kafka_conf_new")
        # The client around the cluster connects to nothing, and would say so.
        self._library.rd_kafka_conf_set(settings, b"log_level", b"3", None, ctypes.c_size_t(0))
        handle = self._pointer("rd_kafka_new", 0, settings, None, 0)
        self._cluster = self._pointer("rd_kafka_mock_cluster_new", handle, 1)

    def address(self) -> str:
        return ctypes.string_at(self._pointer("rd_kafka_mock_cluster_bootstraps", self._cluster).value or 0).decode()

    def create_topic(self, name: str, partitions: int) -> None:
        self._do("rd_kafka_mock_topic_create", name.encode(), partitions, 1)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        self._do("rd_kafka_mock_partition_delete_records", topic.encode(), partition, ctypes.c_int64(before))

    def set_down(self) -> None:
        self._do("rd_kafka_mock_broker_set_down", 1)

    def set_up(self) -> None:
        self._do("rd_kafka_mock_broker_set_up", 1)

    def fail_requests(self, api: int, errors: list[int]) -> None:
        array = (ctypes.c_int * len(errors))(*errors)
        self._library.rd_kafka_mock_push_request_errors_array(
            self._cluster, ctypes.c_int16(api), ctypes.c_size_t(len(errors)), array
        )

    def _pointer(self, name: str, *arguments: Any) -> ctypes.c_void_p:  # noqa: ANN401 - what ctypes takes
        function = self._library[name]
        function.restype = ctypes.c_void_p
        found = function(*arguments)
        if not found:
            raise MonolithError(f"{name} failed")
        return ctypes.c_void_p(found)

    def _do(self, name: str, *arguments: Any) -> None:  # noqa: ANN401 - what ctypes takes
        error = self._library[name](self._cluster, *arguments)
        if error:
            raise MonolithError(f"{name} returned {error}")


def _loaded_library() -> str:
    """Return the path of the librdkafka that confluent_kafka has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "librdkafka" in path:
            return path
    raise MonolithError("librdkafka is not a library of its own here, so its mock cluster cannot be started")


def _serve() -> None:
    """Answer the calls on standard input until it ends."""
    cluster: _Cluster | None = None
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            cluster = cluster or _Cluster()
            answer: dict[str, object] = {"result": getattr(cluster, name)(*arguments)}
        except MonolithError as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
