"""Danger: a job on Ray that ends wrong because an actor, or the actor that knows the addresses, was killed.

One small Ray of the test's own, started once: two processors, no dashboard, this machine only.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monolith.cluster import DiscoveryConfig, RayServiceDiscovery, get_discovery
from monolith.cluster.launch import Event, EventKind, JobRoles, Outcome, Role, RoleKind, Supervision, Supervisor
from monolith.cluster.launch.on_ray import RayPlacement, RayRoles
from monolith.cluster.ray_session import RaySession
from real_servers import until

pytest.importorskip("ray", reason="jobs on Ray need the package ray; pip install 'monolith-torch[ray]'")

WORKER0 = Role(RoleKind.WORKER, 0)
SMALL = RayPlacement(ps_cpus=0.0, worker_cpus=0.0)


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    session = RaySession(None, num_cpus=2, object_store_memory=80 * 2**20)
    yield session
    session.close()


class Job:
    """Workers that run `code` as actors, under a supervisor that the test steps."""

    def __init__(self, folder: Path, session: RaySession, code: str, *, restarts: int = 0) -> None:
        script = folder / "worker.py"
        script.write_text(code)
        shape = JobRoles(
            num_ps=0,
            uuid=f"{folder.name}-{time.time_ns()}",
            worker_args=("-S", str(script)),
            restarts=restarts,
        )
        self.lines: list[tuple[Role, str]] = []
        self.events: list[Event] = []
        self.roles = RayRoles(
            shape,
            folder / "logs",
            address=session.address,
            placement=SMALL,
            on_line=lambda r, t: self.lines.append((r, t)),
        )
        self.supervisor = Supervisor(
            shape.roles,
            self.roles.start,
            Supervision(restarts=restarts, backoff_secs=0.0),
            clock=time.monotonic,
            report=self.events.append,
        )

    def step_until(self, condition: Callable[[], object]) -> None:
        until(lambda: self.supervisor.step() or condition(), seconds=120)

    def end(self) -> Outcome:
        until(self.supervisor.step, seconds=120)
        return self.supervisor.outcome

    def said(self, role: Role) -> list[str]:
        return [text for who, text in self.lines if who == role]


@pytest.fixture
def start(tmp_path: Path, session: RaySession, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    monkeypatch.chdir(tmp_path)
    jobs: list[Job] = []

    def start(code: str, **shape: int) -> Job:
        jobs.append(Job(tmp_path, session, code, **shape))
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


def test_a_role_comes_back_when_its_actor_is_killed_and_fails_for_good_when_that_was_once_too_often(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    job = start(
        "import os, time; print(os.getpid(), os.getppid(), os.environ['MONOLITH_INDEX'])\ntime.sleep(600)", restarts=1
    )
    job.step_until(lambda: job.said(WORKER0))
    role, actor, index = map(int, job.said(WORKER0)[0].split())
    assert index == 0
    assert job.supervisor.statuses[0].process is not None
    assert job.supervisor.statuses[0].process.pid == role
    os.kill(actor, signal.SIGKILL)
    job.step_until(lambda: len(job.said(WORKER0)) == 2)
    assert not is_alive(role), "the first life has ended with its actor"
    assert [event.kind for event in job.events] == [EventKind.STARTED, EventKind.RESTARTED]
    os.kill(int(job.said(WORKER0)[1].split()[1]), signal.SIGKILL)
    outcome = job.end()
    assert (outcome.failed, outcome.code) == (WORKER0, -9)
    assert "the actor of this role is lost" in job.said(WORKER0)[-1]
    assert len((tmp_path / "logs" / "worker-0.log").read_text().splitlines()) == 2


def test_a_role_that_fails_is_started_again_by_the_supervisor(start: Callable[..., Job]) -> None:
    job = start(
        "import pathlib, sys\n"
        "if not pathlib.Path('failed').exists(): pathlib.Path('failed').touch(); print('no'); sys.exit(3)\n"
        "print('done')\n",
        restarts=1,
    )
    assert job.end().is_success
    assert job.said(WORKER0) == ["no", "done"]
    assert [event.code for event in job.events if event.kind is EventKind.RESTARTING] == [3]


def test_stopping_asks_a_role_to_end_in_order(start: Callable[..., Job]) -> None:
    job = start(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))\n"
        "print('ready'); time.sleep(600)"
    )
    job.step_until(lambda: job.said(WORKER0))
    job.supervisor.request_stop("SIGINT")
    assert job.end().stopped == "SIGINT"
    assert job.said(WORKER0) == ["ready", "saved"]


def test_processes_find_each_other_even_after_the_actor_that_knows_them_was_killed(session: RaySession) -> None:
    import ray

    config = DiscoveryConfig(discovery_type="ray", uuid="discovery-test", ray_address=session.address)
    with (
        RayServiceDiscovery("discovery-test", is_owner=True, renew_secs=0.1) as launcher,
        RayServiceDiscovery("discovery-test", renew_secs=0.1) as server,
    ):
        server.register("ps", 1, "127.0.0.1:1001")
        server.register("ps", 0, "127.0.0.1:1000")
        other = get_discovery(config)
        assert other is not None
        assert list(other.query("ps").items()) == [(0, "127.0.0.1:1000"), (1, "127.0.0.1:1001")]
        launcher.register("ps", 0, "127.0.0.1:2000")  # a successor of server 0
        actor = ray.get_actor("discovery-discovery-test", namespace="monolith")
        ray.kill(actor, no_restart=False)
        until(lambda: other.query("ps") == {0: "127.0.0.1:2000", 1: "127.0.0.1:1001"})
        server.deregister("ps", 0, "127.0.0.1:1000")
        assert other.query("ps")[0] == "127.0.0.1:2000"
        other.deregister_all()
        other.close()
    assert ray.is_initialized(), "who did not join does not leave"
