"""Settings shared by all tests. Lying here, it also puts this folder on the path, so tests can `import oracle`."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from _pytest.terminal import TerminalReporter
from hypothesis import HealthCheck, settings

pytest_plugins = ["tls"]

# Quick runs are the same every time; campaigns marked slow draw new examples each time and print how to replay a
# failure. Machines differ in speed, so no example has a deadline.
settings.register_profile(
    "quick",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("quick")

# Started in the background of a shell, this process ignores SIGINT and so would every process it starts: tests that end one by an
# interrupt would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Many processes are started that import the package: compiling it in each of them, and the tests in each run, takes minutes of
# processor time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Layers this small only lose by threads, and a lot where other tests run at the same time."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests first that wait for many processes: at the end of a run one of them would keep all others waiting."""
    items.sort(key=lambda item: item.path.parent.name != "integration")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Let the garbage collector forget what imports made: tests that collect would look through all of torch each time."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Write down which tests have failed, for repeat_failed.py."""
    reports = [report for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, ())]
    if terminalreporter.config.cache is not None:
        terminalreporter.config.cache.set("monolith/failed", sorted({report.nodeid for report in reports}))
