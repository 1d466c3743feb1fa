"""`LocalRoles`: the roles of a job as child processes on this machine, which find each other through files."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from monolith.cluster.launch import die_with_parent
from monolith.cluster.launch.reporting import Pulse
from monolith.cluster.launch.roles import Job, Role, RoleKind
from monolith.cluster.role import LOCAL_RANK_VARIABLE, LOCAL_SIZE_VARIABLE
from monolith.errors import StorageError
from monolith.exit_codes import HEARTBEAT_VARIABLE

__all__ = ["ChildProcess", "LineCutter", "LocalRoles", "OnLine"]

_MOST = 4096  # characters of a line that are shown, while the log has all of it
_END = re.compile(rb"[\r\n]+")
_LAST_LINES = 20
_CHUNK_BYTES = 1 << 16
# For the kernel to end a process that was killed, and for its output to be read.
_KILL_SECS = 10.0
OnLine = Callable[[Role, str], None]
"""Called with each line that a role writes, by threads."""
_RETRY_WAIT = "MONOLITH_RETRY_WAIT_IN_SECS"


class LineCutter:
    """Turns chunks of output into lines of text.

    A carriage return ends a line too, as progress bars write it. Bytes that are not text, and control characters, become a
    replacement character, so that a role cannot control the terminal.

    Example:
        >>> cutter = LineCutter()
        >>> cutter.feed(b"step 1\\nst"), cutter.feed(b"ep 2\\n"), cutter.rest()
        (['step 1'], ['step 2'], [])
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes."""
        *lines, self._rest = _END.split(self._rest + data)
        if len(self._rest) > 4 * _MOST:
            lines.append(self._rest)
            self._rest = b""
        return [text for text in map(_shown, lines) if text]

    def rest(self) -> list[str]:
        """Return the last line if it was not ended."""
        text, self._rest = _shown(self._rest), b""
        return [text] if text else []


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace").rstrip()[:_MOST]
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


class ChildProcess:
    """A command in a session of its own, so that an interrupt at the terminal reaches only the process that started it.

    If that process dies in any way, the kernel kills the command. Its output goes to `log` unchanged, and line by line to
    `on_line`, which a thread calls. Processes that it started in its session end with it.

    Example:
        >>> import sys, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     child = ChildProcess([sys.executable, "-c", "print('hello')"], log=Path(folder, "log"))
        ...     child.wait(60), child.last_lines
        (0, ['hello'])
    """

    restarted = 0

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Start it in `folder`, by default the working directory, with `environment` added to that of this process."""
        self._command = [sys.executable, "-IS", die_with_parent.__file__, str(os.getpid()), *command]
        self._pulse = Pulse()
        heartbeat = {HEARTBEAT_VARIABLE: self._pulse.variable}
        self._environment = {"PYTHONUNBUFFERED": "1", **os.environ, **(environment or {}), **heartbeat}
        self._log, self._folder, self._on_line = log, folder, on_line
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._code: int | None = None
        self._reaping = threading.Lock()
        self._started = threading.Event()
        self._failure: OSError | None = None
        self._popen: subprocess.Popen[bytes]
        # The kernel kills the process when the thread that started it ends, so that thread lives exactly as long.
        self._thread = threading.Thread(target=self._run, name=f"output of {log.stem}", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure
        self.pid: int | None = self._popen.pid

    @property
    def last_lines(self) -> list[str]:
        """The last lines of its output."""
        return list(self._lines)

    @property
    def silence(self) -> float:
        """Seconds since it last showed that it is alive, 0 if it never has. See `Pulse`."""
        with self._reaping:
            return 0.0 if self._code is not None else self._pulse.silence(self._popen.pid)

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal, once it has ended and its output was read. None while it runs."""
        with self._reaping:
            if self._code is None and _has_ended(self._popen.pid, block=False):
                self._reap()
        return self._code

    def wait(self, timeout: float) -> int | None:
        """Wait up to `timeout` seconds until it has ended. Returns its exit code, or None if it still runs."""
        self._thread.join(timeout)
        return self.poll()

    def ask_to_end(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to its session, and wait until it has ended."""
        self._signal(signal.SIGKILL, group=True)
        self._thread.join(_KILL_SECS)
        self.poll()

    def _signal(self, number: signal.Signals, *, group: bool = False) -> None:
        with self._reaping, suppress(ProcessLookupError):
            # Once it is reaped, another process may have its id.
            if self._code is None:
                (os.killpg if group else os.kill)(self._popen.pid, number)

    def _reap(self) -> None:
        # Until it is reaped its group keeps its id. Other processes of the group would keep the pipe open.
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._thread.join(_KILL_SECS)
        self._code = self._popen.wait()
        self._pulse.close()

    def _run(self) -> None:
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab", buffering=0) as log:
                self._popen = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    cwd=self._folder,
                    start_new_session=True,
                    pass_fds=[self._pulse.write_end],
                )
                self._pulse.started()
                self._started.set()
                self._copy(log)
        except OSError as error:
            self._pulse.close()
            self._failure = error
            self._started.set()
            return
        _has_ended(self._popen.pid, block=True)

    def _copy(self, log: BinaryIO) -> None:
        assert self._popen.stdout is not None
        cutter = LineCutter()
        with self._popen.stdout as output:
            while chunk := os.read(output.fileno(), _CHUNK_BYTES):
                # A full disk must not stop the role, and its output is still shown.
                with suppress(OSError):
                    log.write(chunk)
                self._show(cutter.feed(chunk))
        self._show(cutter.rest())

    def _show(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._lines.append(line)
            self._on_line(line)


def _has_ended(pid: int, *, block: bool) -> bool:
    """Tell whether a child has ended, without reaping it."""
    flags = os.WEXITED | os.WNOWAIT | (0 if block else os.WNOHANG)
    with suppress(ChildProcessError):  # reaped already
        return os.waitid(os.P_PID, pid, flags) is not None
    return True


class LocalRoles:
    """Starts roles on this machine. The output of each is appended to `<log_dir>/<role>.log`.

    Example:
        >>> import tempfile
        >>> from monolith.cluster.launch.roles import JobRoles
        >>> job = JobRoles(num_ps=0, num_workers=1, uuid="try", worker_args=("-c", "print('hello')"))
        >>> with tempfile.TemporaryDirectory() as folder, LocalRoles(job, Path(folder)) as roles:
        ...     child = roles.start(job.roles[0])
        ...     child.wait(60), child.last_lines
        (0, ['hello'])
    """

    def __init__(self, job: Job, log_dir: Path, *, on_line: OnLine = lambda role, line: None) -> None:
        """Prepare to start the roles of `job`."""
        self._job, self._log_dir, self._on_line = job, log_dir.resolve(), on_line
        # For this launch only: addresses of an earlier launch may belong to other processes now.
        self._folder = self._log_dir / f"discovery-{job.uuid}"

    def start(self, role: Role) -> ChildProcess:
        """Start a role, in a process that ends with this one."""
        # Everyone who can write here can redirect workers, and their token, to other addresses.
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{self._folder}: cannot make the folder for logs: {error.strerror}") from error
        discovery = {"MONOLITH_DISCOVERY_TYPE": "file", "MONOLITH_DISCOVERY_FOLDER": str(self._folder)}
        # A role on this machine is back after its first restart.
        patience = {_RETRY_WAIT: os.environ.get(_RETRY_WAIT, str(self._job.liveness.backoff_secs))}
        return ChildProcess(
            [sys.executable, *self._job.python_args(role)],
            log=self._log_dir / f"{role.file_name}.log",
            environment=self._job.environment(role, discovery) | patience | self._neighbours(role),
            on_line=lambda line: self._on_line(role, line),
        )

    def _neighbours(self, role: Role) -> dict[str, str]:
        """By these variables a process that trains uses its part of the processors only."""
        if role.kind not in (RoleKind.WORKER, RoleKind.RANK):
            return {}
        here = sum(other.kind is role.kind for other in self._job.roles)
        return {LOCAL_RANK_VARIABLE: str(role.index), LOCAL_SIZE_VARIABLE: str(here)}

    def close(self) -> None:
        """Remove the files of the discovery. Logs stay."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> LocalRoles:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
