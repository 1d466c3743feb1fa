"""Danger: roles of the MLP scheduler that start, and a data service that trainers cannot read from."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

from monolith.dataservice import DataServiceSource, DatasetConfig
from monolith.original import HandOver, MlpDataServers, MLPEnv, mlp_pass
from monolith.testing.servers import free_ports


def test_the_roles_of_a_job_serve_a_trainer_until_worker_0_is_gone(tmp_path: Path) -> None:
    dispatcher, worker, trainer = free_ports(3)
    job = {
        "MLP_SSH_PORT": "22",
        "MLP_ROLE_INDEX": "0",
        "MLP_DISPATCHER_NUM": "1",
        "MLP_DISPATCHER_0_PRIMARY_HOST": "127.0.0.1",
        "MLP_DISPATCHER_0_PORT": str(dispatcher),
        "MLP_DSWORKER_NUM": "1",
        "MLP_DSWORKER_0_PRIMARY_HOST": "127.0.0.1",
        "MLP_DSWORKER_0_PORT": str(worker),
        "MLP_WORKER_NUM": "1",
        "MLP_WORKER_0_PRIMARY_HOST": "127.0.0.1",
    }
    gone = threading.Event()

    def check(host: str, port: int, timeout: float) -> bool:
        if port == 22:
            return not gone.is_set()
        try:
            socket.create_connection((host, port), timeout=timeout).close()
        except OSError:
            return False
        return True

    def role(name: str, port: int) -> HandOver:
        environ = {**job, "MLP_ROLE": name, "MLP_PORT": str(port)}
        env = MLPEnv(environ, check=check, clock=time.monotonic, sleep=lambda _: time.sleep(0.01))
        return mlp_pass(env, MlpDataServers(folder=tmp_path / "dispatcher"), use_dataservice=True)

    done: list[HandOver] = []
    threads = [
        threading.Thread(target=lambda pair=pair: done.append(role(*pair)))
        for pair in (("dispatcher", dispatcher), ("dsworker", worker))
    ]
    for thread in threads:
        thread.start()
    try:
        left = role("worker", trainer)
        assert left.dispatcher == f"grpc://127.0.0.1:{dispatcher}"
        dataset = DatasetConfig(kind="click_stream", fields={"batches": 3, "batch_size": 2, "users": 9})
        assert len(list(DataServiceSource(left.dispatcher, dataset))) == 3
    finally:
        gone.set()
    for thread in threads:
        thread.join(timeout=60)
    assert [(hand.role, hand.finished) for hand in sorted(done, key=lambda hand: hand.role)] == [
        ("DISPATCHER", True),
        ("DSWORKER", True),
    ]
