"""Danger: `pip install monolith-torch` alone that cannot train, and a missing package that ends in a bare ModuleNotFoundError
instead of one line that says what to install.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import monolith

PACKAGE = Path(monolith.__file__).parent
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
FOR_DEVELOPERS = {"dev", "test"}
# Who passes their objects has them.
FOREIGN = {"torchrec", "torch_xla"}


def distribution(requirement: str) -> str:
    return re.split(r"[<>=!\[; ]", requirement)[0].lower().replace("_", "-")


BASE = {distribution(requirement) for requirement in PROJECT["dependencies"]}
EXTRAS = {
    extra: {distribution(requirement) for requirement in requirements}
    for extra, requirements in PROJECT["optional-dependencies"].items()
    if extra not in FOR_DEVELOPERS
}
DISTRIBUTIONS = {
    module: {name.lower().replace("_", "-") for name in names} for module, names in packages_distributions().items()
}


def optional(module: str) -> bool:
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == "monolith":
        return False
    return not DISTRIBUTIONS.get(top, {top}) & BASE


class Imports(ast.NodeVisitor):
    """Imports of optional packages without `import_extra`, and the calls of it."""

    def __init__(self) -> None:
        self.plain: list[str] = []
        self.extras: list[tuple[str, str]] = []

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.plain += [alias.name for alias in node.names if optional(alias.name)]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.level and node.module and optional(node.module):
            self.plain.append(node.module)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "import_extra":
            named = node.args[0]
            module = "".join(part.value for part in ast.walk(named) if isinstance(part, ast.Constant))
            (extra,) = [word.value.value for word in node.keywords if word.arg == "extra"]  # type: ignore[attr-defined]
            self.extras.append((module, extra))
        self.generic_visit(node)


def imports() -> dict[str, Imports]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        if not path.name.endswith("_pb2.py"):
            found[path.relative_to(PACKAGE).as_posix()] = seen = Imports()
            seen.visit(ast.parse(path.read_text()))
    return found


IMPORTS = imports()


def test_a_package_of_an_extra_is_imported_by_import_extra_only() -> None:
    plain = [f"{path}: {name}" for path, seen in IMPORTS.items() for name in seen.plain if name not in FOREIGN]
    assert plain == [], "use monolith.optional_packages.import_extra, or declare the package in [project] dependencies"


@pytest.mark.parametrize(
    ("module", "extra"), sorted({call for seen in IMPORTS.values() for call in seen.extras}), ids=lambda word: word
)
def test_the_extra_that_an_error_names_installs_the_package(module: str, extra: str) -> None:
    assert extra in EXTRAS
    top = module.partition(".")[0]
    assert DISTRIBUTIONS.get(top, {top}) & EXTRAS[extra]


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_every_extra_is_used(extra: str) -> None:
    named = {used for seen in IMPORTS.values() for _, used in seen.extras}
    # These come with other programs: `mpirun` ends a job through mpi4py, torch loads torch_xla as a device.
    assert extra in named | {"mpi", "xla"}


WITHOUT_EXTRAS = "import sys\nsys.modules.update(dict.fromkeys({modules!r}))\n"

TRAIN_EXPORT_PREDICT = """
import logging
import torch
from monolith import EmbeddingBagCollection, Estimator, Feature, Head, RunConfig, load

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")

class Clicks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = EmbeddingBagCollection([Feature(name="user", dim=4)])

    def forward(self, batch):
        return self.embeddings(batch)["user"].sum(1)

data = [{"user": torch.arange(8), "label": torch.arange(8) % 2}] * 3
estimator = Estimator(Clicks(), RunConfig(model_dir="run", save_summary_steps=1), heads=[Head(name="click", label="label")])
estimator.train(data)
estimator.evaluate(data)
answers = load(estimator.export_saved_model()).predict({"user": torch.arange(8)})["click"]
print(tuple(answers.shape))
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    of_extras = set().union(*EXTRAS.values()) - BASE
    modules = {module for module, names in DISTRIBUTIONS.items() if names & of_extras}
    assert {"tensorboard", "grpc", "httptools", "confluent_kafka"} <= modules
    script = WITHOUT_EXTRAS.format(modules=modules) + code
    command = [sys.executable, "-W", "error", "-c", script]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_the_base_trains_exports_and_predicts(tmp_path: Path) -> None:
    ended = run(TRAIN_EXPORT_PREDICT, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("(8,)\n")
    assert list(tmp_path.rglob("events.out*")) == [], "curves need the extra tensorboard"
    assert not list(tmp_path.rglob("events.out.*"))


MISSING = {
    "serve": "from monolith.serve.server.listener import require_packages as use",
    "kafka": "from monolith.streams import open_stream\ndef use(): open_stream('kafka://localhost:1/clicks')",
    "redis": "from monolith.streams import open_stream\ndef use(): open_stream('redis://localhost:1/0/clicks')",
    "tensorboard": "from monolith.train.hooks.inspection import write_evaluation\ndef use(): write_evaluation('x', {}, 1)",
}


@pytest.mark.parametrize("extra", MISSING)
def test_a_missing_extra_is_named_in_one_line(extra: str, tmp_path: Path) -> None:
    ended = run(f"{MISSING[extra]}\nuse()", tmp_path)
    *_, last = ended.stderr.splitlines()
    assert last.startswith("monolith.errors.MissingPackageError: ")
    assert last.endswith(f"; to install it: pip install 'monolith-torch[{extra}]'")
