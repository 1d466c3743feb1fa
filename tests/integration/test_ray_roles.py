"""Danger: a job on Ray that ends wrong because an actor, or the actor that knows the addresses, was killed.

One small Ray of the test's own, started once: two processors, no dashboard, this machine only.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import counting_worker
from monolith.cluster import DiscoveryConfig, RayServiceDiscovery, get_discovery
from monolith.cluster.discovery.ray import RaySession
from monolith.cluster.launch import (
    Event,
    EventKind,
    JobRoles,
    LoopPart,
    Outcome,
    PartsJob,
    Role,
    RoleKind,
    Supervisor,
)
from monolith.cluster.launch.ray import RayPlacement, RayRoles
from monolith.cluster.liveness import Liveness
from real_servers import until

# Looked for, and not imported: that takes a second of every process that only collects tests.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="jobs on Ray need the package ray; pip install 'monolith-torch[ray]'",
)

PS0, WORKER0 = Role(RoleKind.PS, 0), Role(RoleKind.WORKER, 0)
SMALL = RayPlacement(ps_cpus=0.0, worker_cpus=0.0)
PATIENCE = 300.0
"""Seconds: on a machine with other work, Ray may take a minute to start an actor."""


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    session = RaySession(None, num_cpus=2, object_store_memory=80 * 2**20)
    yield session
    session.close()


class Job:
    """A job as actors, under a supervisor that the test steps."""

    def __init__(self, folder: Path, session: RaySession, **shape: Any) -> None:  # noqa: ANN401
        job = JobRoles(uuid=f"{folder.name}-{time.time_ns()}", **shape)
        self.lines: list[tuple[Role, str]] = []
        self.events: list[Event] = []
        self.roles = RayRoles(
            job,
            folder / "logs",
            address=session.address,
            placement=SMALL,
            on_line=lambda role, text: self.lines.append((role, text)),
        )
        self.supervisor = Supervisor(
            job.roles,
            self.roles.start,
            job.liveness,
            clock=time.monotonic,
            report=self.events.append,
        )

    def step_until(self, condition: Callable[[], object]) -> None:
        until(lambda: self.supervisor.step() or condition(), seconds=PATIENCE)

    def end(self) -> Outcome:
        until(self.supervisor.step, seconds=PATIENCE)
        return self.supervisor.outcome

    def said(self, role: Role) -> list[str]:
        """What the role printed, without our own words about one that Ray is slow to start."""
        return [text for who, text in self.lines if who == role and not text.startswith("has not started yet")]


@pytest.fixture
def start(tmp_path: Path, session: RaySession, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    monkeypatch.chdir(tmp_path)
    jobs: list[Job] = []

    def start(code: str = "", **shape: Any) -> Job:  # noqa: ANN401
        (tmp_path / "worker.py").write_text(code)
        jobs.append(Job(tmp_path, session, **{"num_ps": 0, "worker_args": ("-S", "worker.py"), **shape}))
        return jobs[-1]

    yield start
    for job in jobs:
        job.supervisor.kill_all()
        job.roles.close()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_role_ends_with_its_actor_and_without_restarts_the_job_does_too(start: Callable[..., Job]) -> None:
    job = start("import os, time; print(os.getpid(), os.getppid(), os.environ['MONOLITH_INDEX'])\ntime.sleep(600)")
    job.step_until(lambda: job.said(WORKER0))
    role, actor, index = map(int, job.said(WORKER0)[0].split())
    assert index == 0
    os.kill(actor, signal.SIGKILL)
    outcome = job.end()
    assert (outcome.failed, outcome.code) == (WORKER0, -9)
    assert "the actor of this role is lost" in job.said(WORKER0)[-1]
    until(lambda: not is_alive(role))


def test_a_role_that_fails_is_started_again_by_the_supervisor_and_asked_to_end_it_ends_in_order(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    job = start(
        "import pathlib, signal, sys, time\n"
        "if not pathlib.Path('failed').exists(): pathlib.Path('failed').touch(); print('no'); sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))\n"
        "print('ready'); time.sleep(600)",
        liveness=Liveness(restarts=1, backoff_secs=0.0),
    )
    job.step_until(lambda: job.said(WORKER0) == ["no", "ready"])
    assert [event.code for event in job.events if event.kind is EventKind.RESTARTING] == [3]
    job.supervisor.request_stop("SIGINT")
    assert job.end().stopped == "SIGINT"
    assert job.said(WORKER0) == ["no", "ready", "saved"]
    assert (tmp_path / "logs" / "worker-0.log").read_text().splitlines() == job.said(WORKER0)


def test_a_server_whose_actor_is_killed_comes_back_with_what_it_held(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start(
        num_ps=1,
        worker_args=(counting_worker.__file__, "6"),
        model_dir=str(tmp_path / "model"),
        liveness=Liveness(restarts=1, backoff_secs=0.0),
    )
    job.step_until(lambda: "round 3" in job.said(WORKER0))
    server = job.supervisor.statuses[0].process
    assert server is not None
    assert server.pid is not None
    os.kill(parent_of(server.pid), signal.SIGKILL)
    (tmp_path / "go").touch()
    assert job.end().is_success
    assert job.said(WORKER0)[-1] == "counted 6.0 6.0"
    assert EventKind.RESTARTED in [event.kind for event in job.events if event.role == PS0]


def test_processes_find_each_other_even_after_the_actor_that_knows_them_was_killed(session: RaySession) -> None:
    import ray

    config = DiscoveryConfig(discovery_type="ray", uuid="discovery-test", ray_address=session.address)
    with (
        RayServiceDiscovery("discovery-test", is_owner=True, renew_secs=0.1, answer_secs=PATIENCE) as launcher,
        RayServiceDiscovery("discovery-test", renew_secs=0.1, answer_secs=PATIENCE) as server,
    ):
        server.register("ps", 1, "127.0.0.1:1001")
        server.register("ps", 0, "127.0.0.1:1000")
        other = get_discovery(config)
        assert other is not None
        assert list(other.query("ps").items()) == [(0, "127.0.0.1:1000"), (1, "127.0.0.1:1001")]
        launcher.register("ps", 0, "127.0.0.1:2000")  # a successor of server 0
        actor = ray.get_actor("discovery-discovery-test", namespace="monolith")
        life = lambda: ray.get(actor.__ray_call__.remote(lambda registry: os.getpid()))  # noqa: E731
        first = life()
        ray.kill(actor, no_restart=False)
        until(lambda: life() != first, seconds=PATIENCE)  # it is killed a little later
        until(lambda: other.query("ps") == {0: "127.0.0.1:2000", 1: "127.0.0.1:1001"}, seconds=PATIENCE)
        server.deregister("ps", 0, "127.0.0.1:1000")
        assert other.query("ps")[0] == "127.0.0.1:2000"
        other.deregister_all()
        other.close()
    assert ray.is_initialized(), "who did not join does not leave"


def test_the_parts_of_an_online_loop_are_actors(
    tmp_path: Path, session: RaySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "part.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
        "print(sys.argv[1], flush=True); time.sleep(600)"
    )
    (tmp_path / "site.py").write_text("import os, time\nwhile not os.path.exists('go'): time.sleep(0.05)")
    parts = {
        "joiner": LoopPart(run="python part.py {index}", count=2),
        "site": LoopPart(run="python site.py", ends=True),
    }
    job = PartsJob(name="loop", parts=parts, uuid=f"{tmp_path.name}-{time.time_ns()}")
    lines: list[tuple[str, str]] = []
    with RayRoles(
        job,
        tmp_path / "logs",
        address=session.address,
        placement=SMALL,
        on_line=lambda role, text: lines.append((str(role), text)),
    ) as roles:
        supervisor = Supervisor(job.roles, roles.start, job.liveness, clock=time.monotonic, is_due=job.is_due)
        try:
            said = {("joiner 0", "0"), ("joiner 1", "1")}
            until(lambda: supervisor.step() or said <= set(lines), seconds=PATIENCE)
            (tmp_path / "go").touch()
            until(supervisor.step, seconds=PATIENCE)
        finally:
            supervisor.kill_all()
    assert supervisor.outcome.is_success, lines
