"""Danger: updates that are lost or made twice when servers and workers are on different hosts and the network is bad.

Hosts are network namespaces with packets that are delayed, lost, or do not arrive at all for a while.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from jobs import launched

from monolith.cluster.launch import JobRoles, Role, RoleKind
from monolith.cluster.liveness import Liveness
from real_servers import until
from tls import TOKEN, make_certificate
from virtual_network import VirtualNetwork, require_virtual_network

WORKERS, BATCHES = 2, 30
LIVENESS = Liveness(heartbeat_secs=0.5, lease_secs=20.0, hang_secs=60.0, grace_secs=60.0)


def allow(folder: Path, batches: int) -> None:
    (folder / "allowed.new").write_text(str(batches))
    (folder / "allowed.new").replace(folder / "allowed")


def test_every_batch_counts_once_over_a_bad_network_and_a_cut_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_virtual_network()
    monkeypatch.chdir(tmp_path)
    allow(tmp_path, 0)
    with VirtualNetwork(3) as net:
        cert, key = make_certificate(tmp_path, *(host.address for host in net.hosts))
        job = JobRoles(
            num_ps=1,
            num_workers=WORKERS,
            uuid="hosts",
            worker_args=(launched.__file__, str(BATCHES)),
            ps_args=("--host", net.hosts[0].address, "--tls-cert", str(cert), "--tls-key", str(key)),
            token=TOKEN,
            model_dir=str(tmp_path / "model"),
            liveness=LIVENESS,
        )
        shared = {
            "MONOLITH_DISCOVERY_TYPE": "file",
            "MONOLITH_DISCOVERY_FOLDER": str(tmp_path / "discovery"),
            "MONOLITH_CLIENT": json.dumps({"tls_root_certs": str(cert), "timeout": 5.0}),
            "MONOLITH_RETRY_WAIT_IN_SECS": "0.5",
            "OMP_NUM_THREADS": "1",
        }

        def start(role: Role, host: int) -> Path:
            log = tmp_path / f"{role.file_name}.log"
            command = (sys.executable, *job.python_args(role))
            net.hosts[host].start(*command, log=log, environment=job.environment(role, shared))
            return log

        def all_at(batches: int) -> bool:
            return all(f"waits at {batches}" in log.read_text() for log in logs)

        net.shape(delay_secs=0.002, loss=0.01)
        start(Role(RoleKind.PS, 0), 0)
        logs = [start(Role(RoleKind.WORKER, index), 1 + index) for index in range(WORKERS)]
        until(lambda: all_at(0), seconds=120)
        allow(tmp_path, 10)
        until(lambda: all_at(10), seconds=60)
        net.cut(1)
        allow(tmp_path, 20)
        until(lambda: "waits at 20" in logs[1].read_text(), seconds=60)
        # Longer than a call may take: worker 0 notices that the server does not answer.
        time.sleep(6.0)
        assert not all_at(20)
        net.mend(1)
        until(lambda: all_at(20), seconds=60)
        net.cut(0)
        allow(tmp_path, BATCHES)
        time.sleep(1.0)
        net.mend(0)
        until(lambda: all("done at" in log.read_text() for log in logs), seconds=60)
        assert net.dropped > 20
    wanted = launched.expected(BATCHES, workers=WORKERS)
    found, batches = launched.counted_in_checkpoint(tmp_path)
    assert (found - wanted).abs().sum() == 0
    assert batches == WORKERS * BATCHES
