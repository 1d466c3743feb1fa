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
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from monolith.testing.parameter_servers import ServerProcess
from real_servers import until

__all__ = ["CONTEXT", "ForkedServerProcess", "forked_server", "run_script"]

SECONDS = 600
"""How long a script may take on a machine that has much else to do."""

CONTEXT = multiprocessing.get_context("forkserver")
# Modules that are installed: the process they are imported in does not know the folder of the tests. It is the same one for all
# tests of this process, so this is the only list. The last two are what the first optimizer and the first summary import.
CONTEXT.set_forkserver_preload(
    [
        "monolith.cli.ps",
        "monolith.dataservice",
        "monolith.data.synthetic",
        "monolith.metrics",
        "monolith.serve",
        "monolith.train.distributed.run",
        "monolith.transport.sockets",
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
    path: Path, *arguments: str, environ: Mapping[str, str] | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a script as Python would with an empty environment, `environ` apart; what it wrote and its exit code."""
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
        files[0].write(stdin)
        files[0].seek(0)
        ends = [Connection(os.dup(file.fileno())) for file in files]
        process = CONTEXT.Process(target=_script, args=(ends, str(path), arguments, dict(environ or {})))
        process.start()
        for end in ends:
            end.close()
        process.join(SECONDS)
        code = process.exitcode
        process.kill()
        process.join()
        process.close()
        assert code is not None, f"{path} has not ended"
        out, err = (file.seek(0) or file.read() for file in files[1:])
        return subprocess.CompletedProcess([str(path), *arguments], code, out, err)


def _command(stdout: Connection, arguments: list[str]) -> None:
    from monolith.cli import main

    os.dup2(stdout.fileno(), 1)
    stdout.close()
    sys.exit(main(arguments))


def _script(ends: Sequence[Connection], path: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
    sys.stdin = os.fdopen(0, closefd=False)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
