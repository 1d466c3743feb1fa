"""Danger: ranks on different hosts hang when the network is bad or a link is cut, or train something twice afterwards.

Two hosts are network namespaces, with two ranks on each. The job is that of test_rank_campaign.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from jobs import ranked
from rank_campaign import last_line, quiet, verdict

from monolith.cluster.launch import JobRoles
from real_servers import until
from tls import TOKEN, make_certificate
from virtual_network import VirtualNetwork, require_virtual_network

RANKS = 4


def test_ranks_on_two_hosts_continue_after_a_cut_link_and_a_kill(tmp_path: Path) -> None:
    require_virtual_network()
    with VirtualNetwork(2) as net:
        cert, key = make_certificate(tmp_path, *(host.address for host in net.hosts))
        job = JobRoles(
            num_ps=0,
            num_ranks=RANKS,
            uuid="hosts",
            worker_args=(ranked.__file__, str(tmp_path)),
            token=TOKEN,
            model_dir=str(tmp_path / "model"),
        )

        def start(rank: int) -> subprocess.Popen[bytes]:
            host = net.hosts[rank % 2]
            listens = {"host": host.address, "tls_cert": str(cert), "tls_key": str(key)}
            environment = {
                "MONOLITH_DISCOVERY_TYPE": "file",
                "MONOLITH_DISCOVERY_FOLDER": str(tmp_path / "discovery"),
                "MONOLITH_SERVER": json.dumps(listens),
                "MONOLITH_CLIENT": json.dumps({"tls_root_certs": str(cert)}),
                "MONOLITH_RANK_TIMEOUT_SECS": "2",
                "RANKED_PAUSE_SECS": "0.01",
                "OMP_NUM_THREADS": "1",
            }
            command = (sys.executable, *job.python_args(job.roles[rank]))
            variables = job.environment(job.roles[rank], environment)
            return host.start(*command, log=tmp_path / f"rank-{rank}.log", environment=variables)

        def said(rank: int) -> str:
            return (tmp_path / f"rank-{rank}.log").read_text()

        def trained(since: float) -> bool:
            return all(last_line(tmp_path, rank)[1] > since for rank in range(RANKS))

        def newest() -> float:
            return max(last_line(tmp_path, rank)[1] for rank in range(RANKS))

        net.shape(delay_secs=0.002, loss=0.01)
        ranks = [start(rank) for rank in range(RANKS)]
        until(lambda: trained(0.0), seconds=120)

        net.cut(1)
        # Each side notices that ranks of the other are silent, and names one.
        until(lambda: all("was lost in step" in said(rank) for rank in range(RANKS)), seconds=60)
        for rank in range(RANKS):
            other = f"({net.hosts[1 - rank % 2].address}:"
            assert f" of {os.uname().nodename} {other}" in said(rank), "the lost rank is on the other host"
        stopped = newest()
        net.mend(1)
        until(lambda: trained(stopped), seconds=120)
        assert all(process.poll() is None for process in ranks), "nobody had to be restarted"

        stopped = newest()
        os.kill(ranks[3].pid, signal.SIGKILL)
        ranks[3].wait()
        ranks[3] = start(3)
        until(lambda: trained(stopped), seconds=120)

        batches = max(last_line(tmp_path, rank)[0] for rank in range(RANKS)) + 60
        (tmp_path / "last.new").write_text(str(batches))
        (tmp_path / "last.new").replace(tmp_path / "last")
        assert [process.wait(120) for process in ranks] == [0] * RANKS
        assert net.dropped > 20
    assert verdict(tmp_path, batches) == quiet(batches)
