"""Danger: servers on a cluster that no worker reaches, that everyone reaches, or that share one machine; a launcher that waits
minutes for a cluster that is not there, or forever, silently, for one that is full.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from monolith.cluster.discovery.ray import RaySession
from monolith.cluster.launch import JobRoles, Role, RoleKind
from monolith.cluster.launch import ray as module
from monolith.cluster.launch.ray import Look, RayPlacement, RayProcess, must_say_host
from monolith.errors import ConfigError, DiscoveryError
from monolith.testing.servers import free_ports

PS0, WORKER0 = Role(RoleKind.PS, 0), Role(RoleKind.WORKER, 0)
TLS = ("--tls-cert", "cert.pem", "--tls-key", "key.pem")


HOSTS = {"10.0.0.1", "10.0.0.2"}


def servers(*ps_args: str) -> JobRoles:
    return JobRoles(num_ps=1, uuid="job", worker_args=(), ps_args=ps_args)


def test_servers_of_several_machines_listen_where_others_reach_them_and_only_with_tls() -> None:
    assert must_say_host(servers(*TLS), HOSTS, {}) == {RoleKind.PS: "option"}
    assert must_say_host(servers(*TLS, "--host", "::"), HOSTS, {}) == {}
    assert must_say_host(servers(), {"10.0.0.1"}, {}) == {}, "one machine talks to itself"
    with pytest.raises(ConfigError, match=r"--ps-args: the Ray cluster has 2 machines.*--tls-cert FILE --tls-key FILE"):
        must_say_host(servers(), HOSTS, {})


def test_ranks_of_several_machines_do_the_same() -> None:
    job = JobRoles(num_ps=0, num_ranks=2, uuid="job", worker_args=())
    tls = {"MONOLITH_SERVER": '{"tls_cert": "cert.pem", "tls_key": "key.pem"}'}
    assert must_say_host(job, HOSTS, tls) == {RoleKind.RANK: "variable"}
    assert must_say_host(job, {"10.0.0.1"}, {}) == {}
    assert must_say_host(job, HOSTS, {"MONOLITH_SERVER": '{"host": "::"}'}) == {}
    for wrong in ({}, {"MONOLITH_SERVER": "cert.pem"}):
        with pytest.raises(ConfigError, match=r"MONOLITH_SERVER: the Ray cluster has 2 machines.*tls_cert.*tls_root"):
            must_say_host(job, HOSTS, wrong)
    both = JobRoles(num_ps=1, num_ranks=2, uuid="job", worker_args=(), ps_args=TLS)
    assert must_say_host(both, HOSTS, tls) == {RoleKind.PS: "option", RoleKind.RANK: "variable"}


def test_servers_are_spread_and_each_role_has_what_it_asked_for() -> None:
    placement = RayPlacement(ps_cpus=2.0, ps_memory=2**30, worker_cpus=0.5, worker_gpus=1.0)
    assert placement.options(PS0) == {"num_cpus": 2.0, "memory": 2**30, "scheduling_strategy": "SPREAD"}
    assert placement.options(WORKER0) == {"num_cpus": 0.5, "num_gpus": 1.0}
    assert placement.cpus(JobRoles(num_ps=2, num_workers=4, uuid="job", worker_args=())) == 6.0


def test_a_cluster_that_is_not_there_is_named_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="jobs on Ray need the package ray; pip install 'monolith-torch[ray]'")
    monkeypatch.setattr("monolith.cluster.discovery.ray._ANSWER_SECS", 0.2)
    (port,) = free_ports(1)
    with pytest.raises(DiscoveryError, match=f"cannot join the Ray cluster at 127.0.0.1:{port}: nothing answers"):
        RaySession(f"127.0.0.1:{port}")


class FakeRay:
    """As much of Ray as a `RayProcess` uses; questions are answered when the test says so."""

    class RayError(Exception):
        pass

    class ActorUnavailableError(RayError):
        pass

    exceptions = SimpleNamespace(RayError=RayError, ActorUnavailableError=ActorUnavailableError)

    def __init__(self) -> None:
        self.answer: Any = None
        self.asked: list[tuple[str, int]] = []
        self.killed = False
        self.look = SimpleNamespace(remote=self._look)

    def _look(self, life: str, after: int, *, wait: float) -> str:
        self.asked.append((life, after))
        return "a question"

    def wait(self, questions: list[Any], *, timeout: float) -> tuple[list[Any], list[Any]]:
        return ([], questions) if self.answer is None else (questions, [])

    def get(self, question: str) -> Look:
        answer, self.answer = self.answer, None
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Look)
        return answer

    def kill(self, actor: object, *, no_restart: bool) -> None:
        self.killed = True


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(module, "import_ray", lambda: fake)
    return fake


def test_one_question_at_a_time_and_every_line_once(ray: FakeRay) -> None:
    lines: list[str] = []
    process = RayProcess(ray, lines.append, clock=lambda: 0.0)
    assert process.poll() is None
    assert process.poll() is None
    assert ray.asked == [("", 0)]
    ray.answer = Look("a", 7, None, ("one", "two"), 2)
    process.poll()
    assert (process.pid, lines) == (7, ["one", "two"])
    process.poll()
    assert ray.asked == [("", 0), ("a", 2)]
    ray.answer = Look("b", 8, None, ("one",), 1)  # Ray has started it again
    process.poll()
    assert (process.pid, process.restarted, lines) == (8, 1, ["one", "two", "one"])
    process.poll()
    ray.answer = FakeRay.ActorUnavailableError()
    assert process.poll() is None, "it may come back"
    process.poll()
    ray.answer = Look("b", 8, 3, (), 1)
    assert process.poll() == 3
    assert ray.killed, "its place in the cluster is free"


def test_a_role_that_gets_no_place_says_so_once_and_need_not_be_waited_for(ray: FakeRay) -> None:
    lines: list[str] = []
    now = [0.0]
    process = RayProcess(ray, lines.append, clock=lambda: now[0])
    for now[0] in (0.0, 59.0, 61.0, 200.0):
        assert process.poll() is None
    assert lines == ["has not started yet: does a machine of the cluster have enough resources for it?"]
    process.ask_to_end()
    assert process.poll() == -15


def test_an_actor_that_ray_has_given_up_counts_as_killed(ray: FakeRay) -> None:
    lines: list[str] = []
    process = RayProcess(ray, lines.append)
    process.poll()
    ray.answer = FakeRay.RayError("no node left\nand a long story")
    assert process.poll() == -9
    assert lines == ["the actor of this role is lost: no node left"]
