"""The parent's side of the workers: start one, request one turn at a time, stop it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from peers import PEERS, PeerSpec

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ENVIRONMENTS = ROOT / ".venv-bench"
LIMIT_BINARY = ENVIRONMENTS / "memory_limit"
SETUP = "run benchmarks/setup_peers.sh"

# The limit answers for both operations: with what a table must do, and without some of it.
LIMIT_CASES = {
    "lookup": {"limit: probe + gather": "probe_gather", "limit: gather, no hashing": "gather"},
    "train": {
        "limit: lookup, then update": "two_calls",
        "limit: the same, knowing the rows": "train_step",
        "limit: probe + update alone": "probe_update",
    },
}


class PeerUnavailableError(Exception):
    """The peer is not installed or does not fit. The run continues without it."""


class PeerFailedError(Exception):
    """The peer died or broke the protocol. Its log has the reason."""


class Contestant(Protocol):
    """A side of the benchmark. `names(operation)` are its lines in the result table."""

    def names(self, operation: str) -> list[str]: ...
    def turn(self, name: str, operation: str, distribution: str, first: int, warm: int, count: int) -> float: ...
    def close(self) -> None: ...


class WorkerProcess:
    """One line out, one line back."""

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(environment)
            )

    def ask(self, line: str) -> dict[str, Any]:
        self.send(line)
        return self.receive()

    def send(self, line: str) -> None:
        stdin: IO[str] | None = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(line + "\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # its death is reported by receive, with the log

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            lines = self._log.read_text().strip().splitlines()
            raise PeerFailedError(f"exit code {code}; last line of {self._log}: {lines[-1] if lines else '(empty)'}")
        answer: dict[str, Any] = json.loads(line)
        if "skip" in answer:
            raise PeerUnavailableError(answer["skip"])
        if "error" in answer:
            raise PeerFailedError(answer["error"])
        return answer

    def end_input(self) -> None:
        """Let the process end, without waiting for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        self.end_input()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def worker_environment(threads: int, huge_pages: bool) -> dict[str, str]:
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(threads)
    if huge_pages:
        environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        environment["THP_MEM_ALLOC_ENABLE"] = "1"
    return environment


def python_of(spec: PeerSpec) -> str:
    if not spec.environment:
        return sys.executable
    python = ENVIRONMENTS / spec.environment / "bin" / "python"
    if not python.exists():
        raise PeerUnavailableError(f"{python.parent.parent.relative_to(ROOT)} does not exist: {SETUP}")
    return str(python)


def start_worker(spec: PeerSpec, config: Mapping[str, Any], *, threads: int, log: Path) -> WorkerProcess:
    message = json.dumps({"peer": spec.name, "threads": threads, **config})
    command = [python_of(spec), str(HERE / "worker.py"), message]
    return WorkerProcess(command, worker_environment(threads, spec.huge_pages), log)


def start_job(
    spec: PeerSpec, config: Mapping[str, Any], *, threads: int, logs: Path
) -> tuple[WorkerProcess, dict[str, Any]]:
    """Starts a worker and waits for its first answer: that it is ready, or the result of a one-answer job."""
    process = start_worker(spec, config, threads=threads, log=logs / f"{spec.name}-{config['job']}.log")
    try:
        return process, process.receive()
    except (PeerUnavailableError, PeerFailedError):
        process.close()
        raise


class PythonPeer:
    def __init__(self, spec: PeerSpec, config: Mapping[str, Any], *, threads: int, logs: Path) -> None:
        self.name = spec.name
        self._process, ready = start_job(spec, {"job": "speed", **config}, threads=threads, logs=logs)
        self.versions: dict[str, str] = ready["versions"]
        self.waited: list[float] = []  # per turn, the share of the time in which this process had no core

    def check(self) -> dict[str, float]:
        return self._process.ask(json.dumps({"command": "check"}))

    def names(self, operation: str) -> list[str]:
        return [self.name]

    def turn(self, name: str, operation: str, distribution: str, first: int, warm: int, count: int) -> float:
        request = {"operation": operation, "distribution": distribution, "first": first, "warm": warm, "count": count}
        answer = self._process.ask(json.dumps({"command": "run", **request}))
        self.waited.append(1 - answer["cpu_seconds"] / answer["seconds"])
        return float(answer["seconds"])

    def close(self) -> None:
        self._process.close()


class MemoryLimit:
    """core/bench/memory_limit.cc; draws its own batches from the same distributions."""

    def __init__(self, *, rows: int, dim: int, threads: int, logs: Path) -> None:
        if not LIMIT_BINARY.exists():
            raise PeerUnavailableError(f"{LIMIT_BINARY.relative_to(ROOT)} does not exist: {SETUP}")
        command = [str(LIMIT_BINARY), "--serve", "--rows", str(rows), "--dims", str(dim), "--threads", str(threads)]
        self._process = WorkerProcess(command, os.environ, logs / "limit.log")
        self._process.receive()

    def names(self, operation: str) -> list[str]:
        return list(LIMIT_CASES[operation])

    def turn(self, name: str, operation: str, distribution: str, first: int, warm: int, count: int) -> float:
        case = LIMIT_CASES[operation][name]
        self._process.ask(f"{case} {distribution} {warm}")
        return float(self._process.ask(f"{case} {distribution} {count}")["seconds"])

    def close(self) -> None:
        self._process.close()


def peer_specs(names: list[str]) -> list[PeerSpec]:
    return [spec for spec in PEERS if spec.name in names]
