"""Danger: a table's threads fight those of torch for the processors, or wait for threads that a forked child does not have."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

PREPARED = """
import os, threading
import torch
import monolith
from monolith import EmbeddingTable, Segment, TableConfig

torch.set_num_threads(2)
monolith.set_num_threads(2)
ids = torch.arange(20_000)
grads = torch.ones(20_000, 8)

def trained():
    table = EmbeddingTable(TableConfig(name="t", segments=(Segment(dim=8),)))
    table.apply_gradients(ids, grads)
    return table.lookup(ids)

def threads():
    return len(os.listdir("/proc/self/task"))

torch.ones(2_000_000).add_(1)  # torch has its threads now
before = threads()
"""


def printed(script: str) -> str:
    """What the script prints in a process of its own; one that waits for ever fails."""
    whole = PREPARED + textwrap.dedent(script)
    result = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc, and is used on Linux only")
class TestThreadsOfTorch:
    def test_the_main_thread_starts_none_of_its_own(self) -> None:
        assert printed("trained(); print(threads() - before)") == "0"

    def test_another_number_of_threads_than_torch_has_is_respected(self) -> None:
        assert printed("monolith.set_num_threads(4); trained(); print(threads() - before)") == "3"

    def test_results_are_the_same_in_every_thread_and_with_every_number_of_them(self) -> None:
        script = """
        results = [trained()]
        worker = threading.Thread(target=lambda: results.append(trained()))
        worker.start(); worker.join()
        for n in (1, 3):
            monolith.set_num_threads(n)
            results.append(trained())
        print([torch.equal(result, results[0]) for result in results])
        """
        assert printed(script) == "[True, True, True, True]"

    @pytest.mark.parametrize("parent_uses_a_table", [True, False])
    def test_a_forked_child_does_not_wait_for_threads_it_has_not(self, parent_uses_a_table: bool) -> None:
        script = f"""
        if {parent_uses_a_table}:
            trained()
        child = os.fork()
        if child == 0:
            os._exit(0 if (trained().numpy() != 0).all() else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
        assert printed(script) == "0"
