"""Danger: workers that choose different servers, or a run that waits forever for one of those who measure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from monolith.errors import DeadlineExceededError
from monolith.ps import ParameterServer, ServerConfig
from monolith.ps.client.benchmark import BenchmarkConfig, Measured, ServerKeys, choose_servers, measure_servers
from monolith.ps.client.server_group import ClientConfig

SERVERS = ("a:1", "b:1", "b:2")


class Keys:
    """A board of one process."""

    def __init__(self) -> None:
        self.values, self._lock = dict[str, str](), threading.Lock()

    def read_keys(self, prefix: str) -> dict[str, str]:
        with self._lock:
            return {key: value for key, value in self.values.items() if key.startswith(prefix)}

    def set_key(self, key: str, value: str) -> str:
        with self._lock:
            return self.values.setdefault(key, value)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def config(index: int, workers: int, **given: object) -> BenchmarkConfig:
    return BenchmarkConfig(ps_list=SERVERS, num_ps_required=2, num_workers=workers, index=index, **given)


def speeds(*throughputs: float) -> Callable[[Sequence[str], float], list[Measured]]:
    def measure(addresses: Sequence[str], seconds: float) -> list[Measured]:
        return [Measured(address=a, throughput=t) for a, t in zip(addresses, throughputs, strict=True)]

    return measure


def never(addresses: Sequence[str], seconds: float) -> list[Measured]:
    pytest.fail("it measures")


def choose(board: Keys, index: int, workers: int, *throughputs: float) -> tuple[str, ...]:
    return choose_servers(config(index, workers), board, measure=speeds(*throughputs), sleep=lambda seconds: None)


def test_a_worker_alone_decides() -> None:
    # b:1 is worth its own speed and that of b:2.
    assert choose(Keys(), 0, 1, 5.0, 4.0, 3.0) == ("b:1", "a:1")


def test_all_take_the_choice_by_the_mean() -> None:
    board = Keys()
    with ThreadPoolExecutor(3) as pool:
        chosen = [
            pool.submit(choose, board, index, 3, *throughputs)
            for index, throughputs in enumerate([(9.0, 1.0, 1.0), (1.0, 3.0, 2.0), (2.0, 8.0, 6.0)])
        ]
        # means 4, 4, 3: b:1 is worth 7
        assert [one.result(60) for one in chosen] == [("b:1", "a:1")] * 3


def test_nine_of_ten_are_enough_to_begin() -> None:
    board, clock = Keys(), Clock()
    for index in range(1, 9):
        choose_ready(board, index)
    assert len(board.values) == 8
    given = {"measure": speeds(1.0, 2.0, 3.0), "clock": clock, "sleep": clock.sleep}
    assert choose_servers(config(0, 10), board, **given) == ("b:2", "b:1")  # type: ignore[arg-type]
    # A second for all to notice, ten for those who have not measured.
    assert clock.now == 11.0


def choose_ready(board: Keys, index: int) -> None:
    """A worker that is ready and then dies."""

    class DiedError(Exception):
        pass

    def die(addresses: Sequence[str], seconds: float) -> list[Measured]:
        raise DiedError

    with pytest.raises(DiedError):
        choose_servers(config(index, 1), board, measure=die, sleep=lambda seconds: None)


@pytest.mark.parametrize("index", [0, 1])
def test_nobody_waits_for_ever(index: int) -> None:
    clock = Clock()
    with pytest.raises(DeadlineExceededError, match="2 of 3 workers to be ready"):
        choose_servers(config(index, 3), Keys(), measure=never, clock=clock, sleep=clock.sleep)
    assert clock.now == 3600.0


def test_a_worker_does_not_wait_for_ever_for_the_choice() -> None:
    clock = Clock()
    with pytest.raises(DeadlineExceededError, match="the chief has not chosen"):
        choose_servers(config(1, 1), Keys(), measure=speeds(1.0, 2.0, 3.0), clock=clock, sleep=clock.sleep)


def test_who_comes_late_or_again_takes_what_was_chosen() -> None:
    board = Keys()
    first = choose(board, 0, 1, 5.0, 4.0, 3.0)
    assert choose_servers(config(0, 1), board, measure=never) == first
    assert choose_servers(config(7, 9), board, measure=never) == first


def test_servers_are_measured_for_the_seconds_of_the_configuration() -> None:
    measured: list[float] = []

    def measure(addresses: Sequence[str], seconds: float) -> list[Measured]:
        measured.append(seconds)
        return speeds(1.0, 2.0, 3.0)(addresses, seconds)

    choose_servers(config(0, 1, benchmark_secs=7.0), Keys(), measure=measure, sleep=lambda seconds: None)
    assert measured == [7.0]
    choose_servers(config(0, 1), Keys(), measure=measure, sleep=lambda seconds: None)
    assert measured == [7.0, 60.0]


def test_other_servers_are_another_choice() -> None:
    board = Keys()
    choose(board, 0, 1, 5.0, 4.0, 3.0)
    other = BenchmarkConfig(ps_list=("c:1", "d:1"), num_ps_required=1, num_workers=1, index=0)
    assert choose_servers(other, board, measure=speeds(1.0, 2.0), sleep=lambda seconds: None) == ("d:1",)


def test_an_override_needs_no_measuring() -> None:
    given = config(0, 1, ps_str_overridden="overridden,other,third")
    assert choose_servers(given, Keys(), measure=never) == ("overridden", "other")


def test_real_servers_are_measured_through_one_of_them() -> None:
    with ParameterServer() as one, ParameterServer() as two:
        addresses = (one.address, two.address)
        given = BenchmarkConfig(ps_list=addresses, num_ps_required=1, num_workers=1, index=0, benchmark_secs=0.02)
        with closing(ServerKeys(one.address, ClientConfig())) as board:
            chosen = choose_servers(
                given, board, measure=lambda servers, seconds: measure_servers(servers, seconds=seconds)
            )
        assert len(chosen) == 1
        assert chosen[0] in addresses


def test_keys_are_set_once_for_all_and_survive_the_server(tmp_path: Path) -> None:
    with (
        ParameterServer(ServerConfig(folder=tmp_path)) as server,
        closing(ServerKeys(server.address, ClientConfig())) as one,
    ):
        assert one.set_key("servers/1", "a,b") == "a,b"
        assert one.set_key("servers/1", "b,a") == "a,b"
    with (
        ParameterServer(ServerConfig(folder=tmp_path)) as server,
        closing(ServerKeys(server.address, ClientConfig())) as other,
    ):
        assert other.read_keys("servers/") == {"servers/1": "a,b"}
