"""Danger: a role of a job waits for minutes, says so at level INFO, and it is not shown; or a program's own logging is
changed.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import logging, sys
if sys.argv[1] == "configured":
    logging.basicConfig(level=logging.ERROR)
from monolith.console import log_to_stderr
log_to_stderr()
logging.getLogger("monolith.train").info("waiting for worker 1")
logging.getLogger("kazoo").info("chatter")
"""


@pytest.mark.parametrize(("configured", "seen"), [("plain", True), ("configured", False)])
def test_messages_are_shown_unless_the_program_has_its_own_logging(configured: str, seen: bool) -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT, configured], capture_output=True, text=True, check=True)
    assert ("INFO waiting for worker 1" in run.stderr) == seen
    assert "chatter" not in run.stderr
