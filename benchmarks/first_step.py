"""From an empty machine to the first trained step: seconds, bytes, packages, lines of user code, and platforms of each system.

    python benchmarks/first_step.py                          # all systems; gigabytes of temporary files
    python benchmarks/first_step.py --systems monolith,tfra
    python benchmarks/first_step.py --plain                  # also what `pip install NAME` would fetch from PyPI alone

Every system is installed into a fresh virtual environment without pip's cache, and there trains the same DeepFM on the same CSV
file with a program as its user would write it (peers/first_step_*.py). Ours is the wheel in dist/ that fits this machine, or is
compiled from the committed tree. Time of a download from a disk or a near mirror says nothing about yours, so bytes are counted
too, from the sizes of the files that pip chose.
"""

from __future__ import annotations

import argparse
import ast
import csv
import io
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tokenize
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

import machine

TREE = Path(__file__).resolve().parents[1]
PROGRAMS = Path(__file__).parent / "peers"
REGISTRY = "https://pypi.org/pypi"
OURS = "monolith-torch"

ROWS, BATCH = 10_240, 512
IDS = {"user": 2_000, "item": 500, "category": 20, "city": 50}
"""Columns of 64-bit ids, and how many ids each has."""

TORCH = "torch==2.13.0"
BUILD_TOOLS = ("cmake", "ninja")
"""What scikit-build-core adds to the requirements of a build where the machine has no such program."""
NOT_OURS = ("CMAKE_CXX_COMPILER_LAUNCHER", "CMAKE_C_COMPILER_LAUNCHER")
"""Variables of developers that would let a compiler cache answer."""


@dataclass(frozen=True, kw_only=True)
class System:
    """How a system is installed, and which programs are its users'."""

    title: str
    installs: tuple[tuple[str, ...], ...]
    """Arguments of `pip install`, one call after the other."""
    programs: Mapping[str, str]
    """Programs of a user, by what they show."""
    wheels: tuple[str, ...] = ()
    """Distributions, name==version, that all need a wheel for a platform to be supported. Ours: the one that is measured."""
    plain: str = ""
    """What its documentation says to install. Ours: the wheel that is measured."""


# The versions and the reasons for --no-deps are those of setup_peers.sh.
SYSTEMS = {
    "monolith": System(
        title="Monolith",
        installs=((TORCH, "numpy"),),
        programs={
            "layers written out": "first_step_monolith.py",
            "ready model and trainer": "first_step_monolith_ready.py",
        },
    ),
    "torchrec": System(
        title="TorchRec",
        installs=(
            (TORCH, "numpy"),
            ("--no-deps", "fbgemm-gpu-cpu==1.8.0"),
            ("tensordict", "torchmetrics==1.0.3", "tqdm", "pyre-extensions"),
            ("--no-deps", "torchrec==1.8.0"),
        ),
        programs={"layers written out": "first_step_torchrec.py"},
        wheels=(TORCH, "fbgemm-gpu-cpu==1.8.0", "torchrec==1.8.0"),
        plain="torchrec",
    ),
    "tfra": System(
        title="TFRA",
        installs=(("tensorflow==2.16.2", "tf-keras==2.16.0", "tensorflow-recommenders-addons==0.8.1"),),
        programs={"layers written out": "first_step_tfra.py"},
        wheels=("tensorflow==2.16.2", "tensorflow-recommenders-addons==0.8.1"),
        plain="tensorflow-recommenders-addons",
    ),
}
"""TorchEasyRec is not among them: no registry has it, see `REGISTRY_NAMES`."""
REGISTRY_NAMES = {"Monolith": (OURS,), "TorchEasyRec": ("tzrec", "torcheasyrec")}
"""Names under which a system would be on the registry, to say that it is not."""


# --- Counting ---------------------------------------------------------------------------------------------------------


def lines_of_code(source: str) -> int:
    """Lines with code on them: not blank, not only a comment, not in a docstring."""
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def folder_bytes(folder: Path) -> int:
    """Bytes of the files in a folder, each once, without following links."""
    files = {}
    for root, _, names in os.walk(folder):
        for name in names:
            found = Path(root, name).lstat()
            files[found.st_dev, found.st_ino] = found.st_size
    return sum(files.values())


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A file that pip installed from."""

    name: str
    version: str
    bytes: int
    from_disk: bool


def content_length(url: str) -> int:
    """The size of a file on a server, without its content."""
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
        return int(answer.headers["Content-Length"])


def fetched(report: Mapping[str, Any], size_of: Callable[[str], int] = content_length) -> list[Fetched]:
    """The files that a report of `pip install --report` lists. `size_of` gives the bytes of a URL."""
    files = []
    for item in report["install"]:
        url, about = item["download_info"]["url"], item["metadata"]
        parts = urlsplit(url)
        local = parts.scheme == "file"
        size = Path(unquote(parts.path)).stat().st_size if local else size_of(url)
        files.append(Fetched(name=about["name"], version=about["version"], bytes=size, from_disk=local))
    return files


Support = set[tuple[str, str]]
"""Pairs of a platform and a version of Python, where "any" is every one."""


def wheel_support(filename: str) -> Support:
    """Platforms and versions of Python that the tags of a wheel name. Free-threaded builds are left out.

    >>> sorted(wheel_support("fbgemm_gpu_cpu-1.8.0-cp311-cp311-manylinux_2_28_aarch64.whl"))
    [('Linux aarch64', '3.11')]
    """
    support = set()
    for tag in parse_wheel_filename(filename)[3]:
        digits = re.fullmatch(r"(?:cp|py)(\d)(\d*)", tag.interpreter)
        if digits is None or tag.abi.endswith("t"):
            continue
        major, minor = digits.groups()
        version = f"{major}.{minor}" if minor else "any"
        support.add((platform_name(tag.platform), f"{version}+" if tag.abi == "abi3" else version))
    return support


def platform_name(tag: str) -> str:
    """A platform tag in words, without the version of the system."""
    for pattern, system in (
        (r"(?:many|musl)?linux(?:_\d+_\d+|\d+)?_(.+)", "Linux"),
        (r"macosx_\d+_\d+_(.+)", "macOS"),
        (r"win_(.+)", "Windows"),
    ):
        if match := re.fullmatch(pattern, tag):
            return f"{system} {match[1].replace('_', '-').replace('amd64', 'x86-64')}"
    return tag


def common_support(distributions: Iterable[Support]) -> Support:
    """The platforms and versions of Python on which every one of these distributions has a wheel."""
    distributions = list(distributions)
    named = {pair for support in distributions for pair in support}
    platforms = {platform for platform, _ in named} - {"any"}
    versions = {version.removesuffix("+") for _, version in named} - {"any"}
    return {
        (platform, version)
        for platform in platforms
        for version in versions
        if all(_has(support, platform, version) for support in distributions)
    }


def _has(support: Support, platform: str, version: str) -> bool:
    return any(
        has in ("any", platform)
        and (python in ("any", version) or (python.endswith("+") and _minor(version) >= _minor(python)))
        for has, python in support
    )


def _minor(version: str) -> int:
    return int(version.removesuffix("+").partition(".")[2])


def in_words(support: Support) -> str:
    """Platforms with their versions of Python: "Linux aarch64, Linux x86-64: 3.10 to 3.14"."""
    by_versions: dict[tuple[int, ...], list[str]] = {}
    for platform in sorted({platform for platform, _ in support}):
        versions = tuple(sorted(_minor(version) for has, version in support if has == platform))
        by_versions.setdefault(versions, []).append(platform)
    parts = []
    for versions, platforms in by_versions.items():
        whole = list(versions) == list(range(versions[0], versions[-1] + 1)) and len(versions) > 1
        text = f"3.{versions[0]} to 3.{versions[-1]}" if whole else ", ".join(f"3.{minor}" for minor in versions)
        parts.append(f"{', '.join(platforms)}: {text}")
    return "; ".join(parts) or "none"


class NotMeasuredError(Exception):
    """A system that could not be installed, or a program that did not train."""


STEP = re.compile(r"step (\d+) loss (\S+)")


def require_training(losses: Mapping[int, float], steps: int, title: str) -> None:
    """Refuse a program that has not trained: a step is missing, a loss is not finite, or losses do not fall."""
    if sorted(losses) != list(range(1, steps + 1)):
        raise NotMeasuredError(f"{title}: expected the losses of steps 1 to {steps}, got those of {sorted(losses)}")
    values = [losses[step] for step in sorted(losses)]
    if not all(map(math.isfinite, values)):
        raise NotMeasuredError(f"{title}: expected finite losses, got {values}")
    quarter = max(1, steps // 4)
    first, last = sum(values[:quarter]) / quarter, sum(values[-quarter:]) / quarter
    if last >= first:
        raise NotMeasuredError(
            f"{title}: did not learn; the loss of the first steps is {first:.4f}, of the last ones {last:.4f}"
        )


# --- Measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Used:
    """Time, and processor time of a process and all its children."""

    seconds: float = 0.0
    processor_seconds: float = 0.0

    def __add__(self, other: Used) -> Used:
        return Used(
            seconds=self.seconds + other.seconds,
            processor_seconds=self.processor_seconds + other.processor_seconds,
        )


def measured(command: Sequence[str | Path], log: Path, env: Mapping[str, str]) -> Used:
    """Run a command to its end."""
    begin = time.perf_counter()
    with log.open("a") as output:
        print("+", *command, file=output, flush=True)
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        text = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise NotMeasuredError(f"{' '.join(map(str, command))}: ended with {process.returncode}\n{text}")
    return Used(seconds=time.perf_counter() - begin, processor_seconds=usage.ru_utime + usage.ru_stime)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A user's program: its size, when its first step was made, and its losses."""

    program: str
    lines: int
    first_step: Used
    first_loss: float
    last_loss: float


def processor_seconds(process: int) -> float:
    """Processor time of a running process and of its children that have ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def run_program(python: Path, program: Path, data: Path, env: Mapping[str, str]) -> Run:
    """Train, and note the moment at which the first step is reported."""
    first_step = Used()
    losses: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder, Path(folder, "stderr").open("w+") as errors:
        # A copy, because Python looks for modules beside the program first.
        copied = shutil.copy(program, Path(folder, "train.py"))
        begin = time.perf_counter()
        process = subprocess.Popen(
            [python, copied, data],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**env, "PYTHONUNBUFFERED": "1"},
            cwd=folder,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if (step := STEP.search(line)) is None:
                continue
            if not losses:
                seconds = time.perf_counter() - begin
                first_step = Used(seconds=seconds, processor_seconds=processor_seconds(process.pid))
            losses[int(step[1])] = float(step[2])
        if process.wait():
            errors.seek(0)
            raise NotMeasuredError(f"{program.name}: ended with {process.returncode}\n{errors.read()[-3000:]}")
    require_training(losses, ROWS // BATCH, program.name)
    return Run(
        program=program.name,
        lines=lines_of_code(program.read_text()),
        first_step=first_step,
        first_loss=losses[1],
        last_loss=losses[ROWS // BATCH],
    )


@dataclass(kw_only=True)
class Environment:
    """A fresh virtual environment, and what went into it."""

    folder: Path
    env: Mapping[str, str]
    files: list[Fetched] = field(default_factory=list)
    used: Used = Used()

    def __post_init__(self) -> None:
        self.log = self.folder.with_suffix(".log")
        self.used += measured([sys.executable, "-m", "venv", self.folder], self.log, self.env)
        self.empty = folder_bytes(self.folder)

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def install(self, *arguments: str) -> None:
        """`pip install` with these arguments."""
        report = self.folder.with_suffix(".json")
        self._pip("install", "--report", str(report), *arguments)
        self.files += fetched(json.loads(report.read_text()))

    def build(self, source: Path, wheels: Path) -> Path:
        """Build the wheel of a source tree with what is installed here."""
        self._pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source))
        (wheel,) = wheels.glob("*.whl")
        return wheel

    def would_fetch(self, name: str) -> list[Fetched]:
        """What a plain `pip install NAME` fetches from PyPI, with no local wheels and no settings of this machine."""
        alone = {**self.env, "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
        report = self.folder.with_suffix(".plain.json")
        pip = (self.python, "-m", "pip", "install", "--no-cache-dir", "--dry-run", "--use-feature=fast-deps")
        measured((*pip, "--ignore-installed", "--report", report, name), self.log, alone)
        return fetched(json.loads(report.read_text()))

    def _pip(self, verb: str, *arguments: str) -> None:
        self.used += measured(
            [self.python, "-m", "pip", verb, "--no-cache-dir", "--disable-pip-version-check", *arguments],
            self.log,
            self.env,
        )


def fitting_wheel(folder: Path) -> Path | None:
    """The newest of our wheels in a folder that this interpreter can install."""
    tags = set(sys_tags())
    fitting = [path for path in folder.glob("*.whl") if tags & parse_wheel_filename(path.name)[3]]
    return max(fitting, key=lambda path: path.stat().st_mtime, default=None)


def wheel_from_source(folder: Path, env: Mapping[str, str]) -> tuple[Path, Environment]:
    """Compile the committed tree in an environment of its own, as `pip install .` does."""
    source = folder / "source"
    source.mkdir()
    archive = subprocess.run(["git", "-C", TREE, "archive", "HEAD"], stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x", "-C", source], input=archive, check=True)
    requires = tomllib.loads((source / "pyproject.toml").read_text())["build-system"]["requires"]
    environment = Environment(folder=folder / "build", env=env)
    environment.install(*requires, *BUILD_TOOLS)
    return environment.build(source, folder / "wheels"), environment


@dataclass(kw_only=True)
class Result:
    """Everything measured of one system."""

    title: str
    origin: str
    versions: str
    install: Used
    build: Used | None
    fetched_bytes: int
    build_bytes: int
    disk_bytes: int
    packages: int
    from_disk: list[str]
    runs: dict[str, Run]
    platforms: str
    load: tuple[float, float]
    plain: tuple[int, int] | None = None


def measure(name: str, data: Path, folder: Path, *, wheel: Path | None, plain: bool) -> Result:
    """Install a system, and run its programs."""
    system, before = SYSTEMS[name], os.getloadavg()[0]
    # Without a compiler cache, and without a session that the caller happens to have activated.
    env = {key: value for key, value in os.environ.items() if key not in {*NOT_OURS, "PYTHONPATH", "VIRTUAL_ENV"}}
    folder.mkdir()
    build, origin, installs = None, "wheels", system.installs
    if name == "monolith":
        if wheel is None:
            progress(f"{system.title}: compiling")
            wheel, build = wheel_from_source(folder, env)
        origin = "source, compiled" if build else "a wheel"
        installs = (*installs, (str(wheel),))
        platforms, to_fetch = our_platforms(wheel), str(wheel)
    else:
        platforms, to_fetch = in_words(registry_support(system.wheels)), system.plain
    progress(f"{system.title}: installing")
    environment = Environment(folder=folder / "run", env=env)
    for arguments in installs:
        environment.install(*arguments)
    runs = {}
    for what, program in system.programs.items():
        progress(f"{system.title}: {program}")
        runs[what] = run_program(environment.python, PROGRAMS / program, data, env)
    result = Result(
        title=system.title,
        origin=origin,
        versions=", ".join(f"{file.name} {file.version}" for file in environment.files if _is_named(file, installs)),
        install=environment.used,
        build=build.used if build else None,
        fetched_bytes=sum(file.bytes for file in environment.files),
        build_bytes=sum(file.bytes for file in build.files) if build else 0,
        disk_bytes=folder_bytes(environment.folder) - environment.empty,
        packages=len({file.name for file in environment.files}),
        from_disk=[f"{file.name} {file.version}" for file in environment.files if file.from_disk],
        runs=runs,
        platforms=platforms,
        load=(before, os.getloadavg()[0]),
    )
    if plain:
        progress(f"{system.title}: what pip would fetch")
        files = environment.would_fetch(to_fetch)
        result.plain = len({file.name for file in files}), sum(file.bytes for file in files)
    return result


def _is_named(file: Fetched, installs: Collection[Sequence[str]]) -> bool:
    named = {re.split("[=<>]", argument)[0].replace("_", "-") for arguments in installs for argument in arguments}
    return file.name.replace("_", "-") in {*named, OURS}


def our_platforms(wheel: Path) -> str:
    """For what the registry has our wheels, or for what the measured one was built if it has none."""
    releases = registry_releases(OURS)
    if releases is None:
        return f"none on the registry; built here: {in_words(wheel_support(wheel.name))}"
    files = [entry["filename"] for entries in releases.values() for entry in entries]
    return in_words({pair for name in files if name.endswith(".whl") for pair in wheel_support(name)})


def registry_support(requirements: Iterable[str]) -> Support:
    """The platforms for which the registry has wheels of all of these."""
    supports = []
    for requirement in requirements:
        name, _, version = requirement.partition("==")
        releases = registry_releases(name)
        if releases is None or version not in releases:
            raise NotMeasuredError(f"{requirement}: the registry does not list this release")
        names = [entry["filename"] for entry in releases[version] if entry["filename"].endswith(".whl")]
        supports.append({pair for filename in names for pair in wheel_support(filename)})
    return common_support(supports)


def registry_releases(name: str) -> dict[str, list[dict[str, str]]] | None:
    """The files of every release of a distribution on the registry, or None if there is no such distribution."""
    try:
        with urllib.request.urlopen(f"{REGISTRY}/{name}/json", timeout=60) as answer:
            releases: dict[str, list[dict[str, str]]] = json.load(answer)["releases"]
            return releases
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def write_data(path: Path) -> None:
    """Examples whose label depends on every column, with ids of 64 bits."""
    draw = random.Random(0)
    ids = {name: [draw.getrandbits(63) for _ in range(count)] for name, count in IDS.items()}
    effects = {key: draw.gauss(0, 1) for column in ids.values() for key in column}
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow([*IDS, "age", "price", "label"])
        for _ in range(ROWS):
            row = [draw.choice(column) for column in ids.values()]
            age, price = draw.random(), draw.random()
            logit = sum(effects[key] for key in row) + 2 * (age - price)
            out.writerow([*row, f"{age:.4f}", f"{price:.4f}", int(draw.random() < 1 / (1 + math.exp(-logit)))])


# --- Report -----------------------------------------------------------------------------------------------------------


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f}" if count >= 10e6 else f"{count / 1e6:.1f}"


def pair(used: Used) -> str:
    return f"{used.seconds:.1f} ({used.processor_seconds:.1f})"


def markdown(results: Sequence[Result]) -> str:
    """The table of all systems, a column for each."""
    rows: list[tuple[str, list[str]]] = [
        ("installed from", [result.origin for result in results]),
        (
            "downloaded, MB",
            [
                megabytes(result.fetched_bytes)
                + (f" + {megabytes(result.build_bytes)} to build" if result.build_bytes else "")
                for result in results
            ],
        ),
        ("packages", [str(result.packages) for result in results]),
        ("on disk, MB", [megabytes(result.disk_bytes) for result in results]),
        ("install, s (processor s)", [pair(result.install) for result in results]),
        ("compile, s (processor s)", [pair(result.build) if result.build else "" for result in results]),
        (
            "start to first step, s (processor s)",
            ["; ".join(pair(run.first_step) for run in result.runs.values()) for result in results],
        ),
        ("lines of user code", ["; ".join(str(run.lines) for run in result.runs.values()) for result in results]),
        (
            "loss of the first and the last step",
            [
                "; ".join(f"{run.first_loss:.3f}, {run.last_loss:.3f}" for run in result.runs.values())
                for result in results
            ],
        ),
        ("wheels for", [result.platforms for result in results]),
    ]
    if any(result.plain for result in results):
        plain = [f"{count}, {megabytes(size)} MB" for count, size in (result.plain or (0, 0) for result in results)]
        rows.append(("packages and bytes of a plain `pip install`", plain))
    lines = ["| | " + " | ".join(result.title for result in results) + " |", "|---|" + "---:|" * len(results)]
    lines += [f"| {label} | " + " | ".join(cells) + " |" for label, cells in rows if any(cells)]
    return "\n".join(lines)


def notes(results: Sequence[Result], described: Mapping[str, str]) -> list[str]:
    """What a reader has to know about the table."""
    lines = [f"{name}: {value}" for name, value in described.items()]
    lines += [f"{result.title}: {result.versions}" for result in results]
    lines += [
        f"{result.title}: load average {result.load[0]:.1f} before, {result.load[1]:.1f} after" for result in results
    ]
    lines += [
        f"{result.title}: two programs are separated by a semicolon: {'; '.join(result.runs)}"
        for result in results
        if len(result.runs) > 1
    ]
    lines += [
        f"{result.title}: from the disk of this machine, so its size counts and not its time: {', '.join(result.from_disk)}"
        for result in results
        if result.from_disk
    ]
    for title, names in REGISTRY_NAMES.items():
        for name in names:
            there = registry_releases(name) is not None
            lines.append(f"{title}: {name} is {'' if there else 'not '}on the registry")
    return lines


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--systems", default=",".join(SYSTEMS), help=f"of {','.join(SYSTEMS)}")
    ours = parser.add_mutually_exclusive_group()
    ours.add_argument("--wheel", type=Path, help="our wheel, by default the one in dist/ that fits")
    ours.add_argument("--source", action="store_true", help="compile ours, even if dist/ has a wheel")
    parser.add_argument("--plain", action="store_true", help="also what pip fetches by default, which takes gigabytes")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    options.systems = options.systems.split(",")
    if unknown := set(options.systems) - set(SYSTEMS):
        parser.error(f"--systems: expected some of {', '.join(SYSTEMS)}, got {', '.join(sorted(unknown))}")
    return options


def main() -> None:
    options = arguments()
    described = machine.describe()
    wheel = None if options.source else options.wheel or fitting_wheel(TREE / "dist")
    command = "python benchmarks/first_step.py " + " ".join(sys.argv[1:])
    results: list[Result] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary, "examples.csv")
        write_data(data)
        for name in options.systems:
            try:
                results.append(measure(name, data, Path(temporary, name), wheel=wheel, plain=options.plain))
            except NotMeasuredError as error:
                failures.append(f"{SYSTEMS[name].title}: not measured: {error}")
            # A system takes gigabytes; the next one needs them.
            shutil.rmtree(Path(temporary, name))
            if options.json is not None:
                systems = [asdict(result) for result in results]
                options.json.write_text(
                    json.dumps({"command": command, "machine": described, "results": systems}, indent=1)
                )
    print(markdown(results))
    print()
    print("\n".join([*notes(results, described), *failures]))
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
