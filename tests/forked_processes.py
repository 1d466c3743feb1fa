"""Processes that begin in milliseconds: forked by one that has imported what takes seconds, torch above all."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from monolith.testing.parameter_servers import ServerProcess
from real_servers import until

__all__ = ["CONTEXT", "ForkedServerProcess", "forked_server", "run_script"]

CONTEXT = multiprocessing.get_context("forkserver")
# Modules that are installed: the process they are imported in does not know the folder of the tests. It is the same one for all
# tests of this process, so this is the only list. The last two are what the first optimizer and the first summary import.
CONTEXT.set_forkserver_preload(
    [
        "monolith.cli.ps",
        "monolith.data.service",
        "monolith.data.synthetic",
        "monolith.metrics",
        "monolith.serve",
        "monolith.train.distributed",
        "monolith.transport.socket_service",
        "torch._dynamo",
        "torch.utils.tensorboard",
    ]
)


class _Command:
    """`monolith` with `arguments`, as far as a `ServerProcess` needs a `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str]) -> None:
        reader, writer = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=_command, args=(writer, list(arguments)))
        self._process.start()
        # Only the child must hold it, or its end would go unnoticed.
        writer.close()
        self.stdout = os.fdopen(os.dup(reader.fileno()))
        reader.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("monolith", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


class ForkedServerProcess(ServerProcess):
    """As `ServerProcess`, without the seconds that importing takes."""

    def _begin(self, arguments: Sequence[str]) -> subprocess.Popen[str]:
        return _Command(arguments)  # type: ignore[return-value]

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        # It is no child of this process, which could be told.
        status = Path(f"/proc/{self.pid}/stat")
        until(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")


@contextmanager
def forked_server(*options: str) -> Iterator[ServerProcess]:
    """A `ForkedServerProcess` for the length of a block."""
    server = ForkedServerProcess(options)
    try:
        yield server
    finally:
        server.close()


def run_script(
    path: Path, *arguments: str, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script as Python would with an empty environment, `environ` apart; what it wrote and its exit code."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        files = [Connection(os.dup(file.fileno())) for file in (out, err)]
        process = CONTEXT.Process(target=_script, args=(*files, str(path), arguments, dict(environ or {})))
        process.start()
        for file in files:
            file.close()
        process.join()
        out.seek(0)
        err.seek(0)
        code = process.exitcode
        process.close()
        assert code is not None
        return subprocess.CompletedProcess([str(path), *arguments], code, out.read(), err.read())


def _command(stdout: Connection, arguments: list[str]) -> None:
    from monolith.cli import main

    os.dup2(stdout.fileno(), 1)
    stdout.close()
    sys.exit(main(arguments))


def _script(
    stdout: Connection, stderr: Connection, path: str, arguments: Sequence[str], environ: Mapping[str, str]
) -> None:
    os.dup2(stdout.fileno(), 1)
    os.dup2(stderr.fileno(), 2)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
