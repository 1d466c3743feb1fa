"""Danger: `import monolith` doing things. It may define names and load its extension; it may not start threads,
take over signals or logging, open sockets, touch torch's settings, or drag in a heavy optional package.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

# Runs in a fresh interpreter: what third parties do on import happens first and is not held against us.
PROBE = """
import json, logging, os, signal, sys, threading, warnings
import numpy, pydantic, torch

def state():
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "signals": {int(s): str(signal.getsignal(s)) for s in signal.valid_signals()},
        "root handlers": [str(h) for h in logging.getLogger().handlers],
        "loggers with handlers": sorted(
            n for n, l in logging.root.manager.loggerDict.items() if isinstance(l, logging.Logger) and l.handlers
        ),
        "log level": logging.getLogger().level,
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "default dtype": str(torch.get_default_dtype()),
        "torch seed": torch.initial_seed(),
        "environment": dict(os.environ),
        "warning filters": len(warnings.filters),
        "excepthook": sys.excepthook is sys.__excepthook__,
        "path": list(sys.path),
        "working directory": os.getcwd(),
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "switch interval": sys.getswitchinterval(),
    }

events = []
watching = False

def audit(event, args):
    if watching and event.split(".")[0] in ("socket", "subprocess", "urllib", "http", "ftplib", "smtplib"):
        events.append(event)
    if watching and event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        if not str(args[0]).endswith(".pyc") and "__pycache__" not in str(args[0]):
            events.append(f"wrote {args[0]}")

sys.addaudithook(audit)
before, modules = state(), set(sys.modules)
watching = True
import monolith
watching = False
print(json.dumps({
    "before": before,
    "after": state(),
    "events": events,
    "modules before": len(modules),
    "new modules": sorted(set(sys.modules) - modules),
}))
"""

HEAVY = [
    "confluent_kafka",
    "consul",
    "fastapi",
    "grpc",
    "httptools",
    "hypothesis",
    "kazoo",
    "matplotlib",
    "mpi4py",
    "pandas",
    "prometheus_client",
    "pyarrow.dataset",
    "pyarrow.flight",
    "pyarrow.parquet",
    "pytest",
    "ray",
    "rich",
    "scipy",
    "tensorboard",
    "tensorflow",
    "torch_xla",
    "torchrec",
    "typer",
    "uvloop",
]


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    output = subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, text=True, timeout=300)
    assert output.stderr == ""
    return json.loads(output.stdout)


def test_importing_changes_nothing_outside_the_package(probe: dict[str, Any]) -> None:
    assert probe["after"] == probe["before"]


def test_importing_opens_no_socket_starts_no_process_and_writes_no_file(probe: dict[str, Any]) -> None:
    assert probe["events"] == []


@pytest.mark.parametrize("name", HEAVY)
def test_importing_leaves_heavy_packages_alone(probe: dict[str, Any], name: str) -> None:
    loaded = [module for module in probe["new modules"] if module == name or module.startswith(f"{name}.")]
    assert loaded == []


def test_importing_adds_few_modules_to_those_of_torch_numpy_and_pydantic(probe: dict[str, Any]) -> None:
    # The budget in a form that does not depend on the machine: no more than a fifth on top.
    assert "monolith" in probe["new modules"]
    assert len(probe["new modules"]) <= 0.2 * probe["modules before"]


def test_the_whole_package_imports_without_optional_packages() -> None:
    script = (
        "import importlib, pkgutil, sys\n"
        f"for name in {[n for n in HEAVY if '.' not in n]!r}: sys.modules[name] = None\n"
        "import monolith\n"
        "for info in pkgutil.walk_packages(monolith.__path__, 'monolith.'):\n"
        "    # Verbs are made of typer and rich, which come with the package; nothing else may need them.\n"
        "    if not info.name.startswith('monolith.cli'): importlib.import_module(info.name)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=300)
