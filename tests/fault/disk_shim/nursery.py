"""Runs a job many times without importing torch each time: a process that has imported it forks one child per run.

Started as `python nursery.py MODULE`, with the shim preloaded. Each line of standard input asks for one run of `MODULE.main`,
each line of standard output says how it ended.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any


def main() -> None:
    """Answer requests until there are none."""
    job = importlib.import_module(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(job, request)
        if request["kill_after"] is not None:
            time.sleep(request["kill_after"])
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _run(job: Any, request: dict[str, Any]) -> None:  # noqa: ANN401 - a module
    code = 1
    for descriptor, path in ((1, request["stdout"]), (2, request["stderr"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    shim = request["shim"]
    library = ctypes.CDLL(None)
    numbers = [ctypes.c_uint64(shim[name]) for name in ("seed", "one_in", "kill_at")]
    library.disk_shim_start(shim["root"].encode(), shim["journal"].encode(), *numbers)
    try:
        job.main(request["arguments"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.write(f"faults {library.disk_shim_faults()}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
