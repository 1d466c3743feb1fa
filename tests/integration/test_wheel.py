"""Danger: a wheel that needs a compiler, a newer system than it says, or a file that is only in the source tree."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel in dist/ that pip would choose for this interpreter."""
    tags = {tag: rank for rank, tag in enumerate(sys_tags())}
    fitting = {
        min(tags[tag] for tag in of & tags.keys()): path
        for path in (ROOT / "dist").glob("*.whl")
        if (of := parse_wheel_filename(path.name)[3]) & tags.keys()
    }
    if not fitting:
        pytest.skip("no wheel for this interpreter in dist/: run `make wheel` first")
    return fitting[min(fitting)]


def test_the_example_of_the_readme_runs_from_the_wheel_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    # The dependencies are those of this environment, as torch takes minutes to install. The path of a .pth file is searched, but
    # .pth files there are not read, so the package of the source tree is not found.
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    torch_home = next(Path(path) for path in sys.path if (Path(path) / "torch").is_dir())
    (site / "dependencies.pth").write_text(f"{torch_home}\n")
    environment = {"PATH": str(python.parent), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}

    def run(*command: str) -> str:
        ended = subprocess.run(
            [str(python), *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    missing = "import shutil; assert not any(map(shutil.which, ('cc', 'gcc', 'g++', 'clang', 'cmake')))"
    run("-c", missing)
    run("-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index", str(wheel))
    assert Path(run("-c", "import monolith; print(monolith.__file__, end='')")).is_relative_to(tmp_path)
    (script,) = re.findall(r"```python train\.py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    assert re.fullmatch(r"step 120: AUC 0\.\d+\n(runs/clicks/exported_models/\d+)\n", run("train.py"))
