"""`monolith env`: what a bug report should contain."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

from monolith.cli.options import Json
from monolith.cli.output import show

__all__ = ["env"]

_PACKAGES = ("monolith-torch", "torch", "numpy", "pyarrow", "pydantic", "safetensors", "tensorboard")


def env(as_json: Json = False) -> None:
    """Print what a bug report should contain.

    These are the versions of packages, and the processor, threads and accelerators of this machine.
    """
    import torch

    import monolith

    versions = {name: _version(name) for name in _PACKAGES}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    answer = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions,
        "cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "threads": {"table": monolith.get_num_threads(), "torch": torch.get_num_threads()},
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "accelerator": None if accelerator is None else str(accelerator),
        "gpus": gpus,
    }
    show(answer, as_json=as_json)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
