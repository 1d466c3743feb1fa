"""Danger: a job on a Ray cluster of several machines whose roles do not reach each other, or do not survive a cut link.

Two nodes of Ray, each on a host of its own: network namespaces. The job is that of test_rank_campaign.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from jobs import ranked
from rank_campaign import last_line, quiet, verdict

from real_servers import until
from tls import TOKEN, make_certificate
from virtual_network import VirtualNetwork, require_virtual_network

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="jobs on Ray need the package ray; pip install 'monolith-torch[ray]'",
)
RANKS = 2
PATIENCE = 180.0
RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats", "--num-cpus=1", "--block")


def test_ranks_on_two_nodes_of_ray_continue_after_a_cut_link(tmp_path: Path) -> None:
    require_virtual_network()
    with ExitStack() as stack, VirtualNetwork(2) as net:
        head, other = net.hosts
        cert, key = make_certificate(tmp_path, head.address, other.address)
        environment = {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "MONOLITH_PS_TOKEN": TOKEN,
            "MONOLITH_SERVER": json.dumps({"tls_cert": str(cert), "tls_key": str(key)}),
            "MONOLITH_CLIENT": json.dumps({"tls_root_certs": str(cert)}),
            "MONOLITH_RANK_TIMEOUT_SECS": "2",
            "RANKED_PAUSE_SECS": "0.01",
            "OMP_NUM_THREADS": "1",
        }
        # Short: Ray makes sockets in it, whose paths may have 107 characters.
        folder = Path(f"/tmp/monolith-ray-{os.getpid()}")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        sessions = ("--temp-dir", str(folder))
        memory = ("--object-store-memory", str(80 * 2**20))
        options = ("--port=6379", "--include-dashboard=false", *sessions)
        log = tmp_path / "ray.log"
        net.shape(delay_secs=0.001, loss=0.002)
        head.start(
            *RAY, "--head", f"--node-ip-address={head.address}", *options, *memory, log=log, environment=environment
        )
        address = f"{head.address}:6379"
        until(lambda: "Ray runtime started" in log.read_text(), seconds=PATIENCE)
        node = (f"--address={address}", f"--node-ip-address={other.address}", *memory)
        other.start(*RAY, *node, log=tmp_path / "ray-2.log", environment=environment)
        until(lambda: "Ray runtime started" in (tmp_path / "ray-2.log").read_text(), seconds=PATIENCE)

        out = tmp_path / "launch.log"
        launch = ("-m", "monolith.cli", "launch", "--json", "--on", f"ray={address}", "--ranks", str(RANKS))
        folders = ("--model-dir", str(tmp_path / "model"), "--log-dir", str(tmp_path / "logs"))
        job = head.start(
            sys.executable, *launch, *folders, ranked.__file__, str(tmp_path), log=out, environment=environment
        )

        def trained(since: float) -> bool:
            assert job.poll() is None, out.read_text()
            return all(last_line(tmp_path, rank)[1] > since for rank in range(RANKS))

        until(lambda: trained(0.0), seconds=PATIENCE)
        net.cut(1)
        until(lambda: "was lost in step" in (tmp_path / "logs" / "rank-0.log").read_text(), seconds=PATIENCE)
        stopped = max(last_line(tmp_path, rank)[1] for rank in range(RANKS))
        net.mend(1)
        until(lambda: trained(stopped), seconds=PATIENCE)
        batches = max(last_line(tmp_path, rank)[0] for rank in range(RANKS)) + 60
        (tmp_path / "last.new").write_text(str(batches))
        (tmp_path / "last.new").replace(tmp_path / "last")
        assert job.wait(PATIENCE) == 0, out.read_text()
        members = {line for line in out.read_text().splitlines() if '"started"' in line}
        assert len(members) == RANKS
        logs = [(tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in range(RANKS)]
        assert f"({head.address}:" in "".join(logs)
        assert f"({other.address}:" in "".join(logs), "each node has one of the ranks"
    assert verdict(tmp_path, batches) == quiet(batches)
