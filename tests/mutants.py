"""`make mutants`: change one thing in the code at a time, and see whether a test that runs the changed line fails.

A sample of all possible changes is drawn with a seed. Each is made in a copy of the tree below build/mutants, and the tests that
run its line, as coverage.py has recorded once, are run there: the most specific ones first, for some seconds. A change
that no test notices is a *survivor*: the code there could be wrong and nobody would know.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import os
import random
import shutil
import signal
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "docs", "examples", "benchmarks", "deploy", "core", "pyproject.toml", "Makefile")
# The unit tests, and those of runs over several processes as threads of one.
TESTS = (
    "tests/unit",
    *(
        f"tests/integration/test_{name}.py"
        for name in ("distributed_train", "ps_training", "scheduler_is_told", "worker_end", "worker_start")
    ),
)
MAX_TESTS, MAX_FILES, TEST_SECS, TIMEOUT_SECS = 30, 6, 15.0, 60.0

OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.Pow: ast.Mult,
}  # fmt: skip

Change = Callable[[ast.AST], ast.AST]
"""From a copy of a node to what takes its place."""


@dataclass(frozen=True)
class Mutant:
    """One change: the `which`-th that is possible at node `site` of a file."""

    path: Path
    site: int
    which: int
    lines: range
    words: str


def changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """What may be changed at a node, in words and as a function."""
    match node:
        case ast.Compare(ops=[op]) | ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OPPOSITE and not _of_text(
            node
        ):
            yield f"{type(op).__name__} -> {OPPOSITE[type(op)].__name__}", _with_operator(OPPOSITE[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not removed", lambda new: operand
        case ast.Constant(value=bool() as value):
            yield f"{value} -> {not value}", lambda new: ast.Constant(value=not value)
        case ast.Constant(value=(int() | float()) as value):
            yield f"{value} -> {value + 1}", lambda new: ast.Constant(value=value + 1)
        case ast.Expr(value=ast.Call()) | ast.Raise(exc=ast.AST()):
            yield f"{type(node).__name__} removed", lambda new: ast.Pass()
        case ast.Return(value=ast.AST() as value) if ast.unparse(value) != "None":
            yield "returns None", lambda new: ast.Return(value=ast.Constant(value=None))
        case ast.Call(keywords=keywords):
            for place, keyword in enumerate(keywords):
                # A thread's name and the like are for people.
                if keyword.arg not in (None, "name", "thread_name_prefix", "daemon"):
                    yield f"argument {keyword.arg} dropped", _without_keyword(place)


def _of_text(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.iter_child_nodes(node))


def _with_operator(operator: ast.AST) -> Change:
    def change(new: ast.AST) -> ast.AST:
        if isinstance(new, ast.Compare):
            new.ops = [operator]  # type: ignore[list-item]
        else:
            new.op = operator  # type: ignore[attr-defined]
        return new

    return change


def _without_keyword(place: int) -> Change:
    def change(new: ast.AST) -> ast.AST:
        assert isinstance(new, ast.Call)
        del new.keywords[place]
        return new

    return change


def sites(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes whose change a test should notice: messages, log lines, annotations and names for people are not among them."""
    if isinstance(node, ast.JoinedStr) or _is_log_call(node) or _is_for_readers(node):
        return
    yield node
    if isinstance(node, ast.Raise):
        return
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from sites(child)


def _is_log_call(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in ("_log", "_logger")
    return False


def _is_for_readers(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def mutants_of(path: Path) -> list[Mutant]:
    """Every possible change of a file of the copy."""
    return [
        Mutant(path, site, which, range(node.lineno, (node.end_lineno or node.lineno) + 1), words)
        for site, node in enumerate(sites(ast.parse(path.read_text("utf-8"))))
        for which, (words, _) in enumerate(changes(node))
        if isinstance(node, ast.stmt | ast.expr)
    ]


def mutated_text(mutant: Mutant) -> str:
    """The file with the change."""
    tree = ast.parse(mutant.path.read_text("utf-8"))
    target = list(sites(tree))[mutant.site]
    _, change = list(changes(target))[mutant.which]

    class Put(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return change(copy.copy(node)) if node is target else super().generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Put().visit(tree)))


class LineMap:
    """Which tests run which lines, and how long each takes."""

    def __init__(self, tree: Path) -> None:
        from coverage import CoverageData

        data = CoverageData(str(tree / ".coverage"))
        data.read()
        self._tests: dict[Path, dict[int, list[str]]] = {
            Path(path): {
                line: [name.partition("|")[0] for name in names if name]
                for line, names in data.contexts_by_lineno(path).items()
            }
            for path in data.measured_files()
        }
        self._reach = Counter(test for lines in self._tests.values() for tests in lines.values() for test in tests)
        self._secs: dict[str, float] = {}
        self._unusable: set[str] = set()
        for case in ElementTree.parse(tree / "junit.xml").iter("testcase"):
            test = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
            self._secs[test] = float(case.attrib["time"])
            if case.find("failure") is not None or case.find("error") is not None:
                self._unusable.add(test)

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The most specific tests that run the line. For what is run at import, those that run most of the file."""
        by_line = self._tests.get(mutant.path, {})
        if not any(line in by_line for line in mutant.lines):
            return []
        found = {test for line in mutant.lines for test in by_line.get(line, ())}
        if found:
            return self._affordable(sorted(found, key=lambda test: (self._reach[test], test)))
        shares = Counter(test for tests in by_line.values() for test in tests)
        return self._affordable([test for test, _ in shares.most_common()])

    def _affordable(self, tests: list[str]) -> list[str]:
        chosen: list[str] = []
        of_function: Counter[str] = Counter()
        files: set[str] = set()
        secs = 0.0
        for test in tests:
            file, function, cost = test.partition("::")[0], test.partition("[")[0], self._secs.get(test, 0.0)
            # A name with a backslash stands for a byte that cannot be written on a command line.
            if test in self._unusable or "\\" in test or of_function[function] == 3:
                continue
            if chosen and (secs + cost > TEST_SECS or len(files | {file}) > MAX_FILES):
                continue
            chosen.append(test)
            of_function[function] += 1
            files.add(file)
            secs += cost
        return chosen[:MAX_TESTS]


def pytest_in(tree: Path, arguments: list[str], timeout: float | None = None) -> int:
    """Run tests of the copy in a process of their own; the exit code, -1 if they took longer than `timeout` seconds."""
    process = os.fork()
    if not process:
        os.setsid()
        os._exit(_run_pytest(tree, arguments))
    began = time.monotonic()
    code: int | None = None
    while code is None and (timeout is None or time.monotonic() - began < timeout):
        ended, status = os.waitpid(process, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if code is None:
        os.waitpid(process, 0)
    return -1 if code is None else code


def _run_pytest(tree: Path, arguments: list[str]) -> int:
    import pytest

    os.chdir(tree)
    with (tree / "pytest.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # The package of the copy, here and in processes that tests start, and none of the modules beside this file.
    sys.path[0] = str(tree / "src")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.dont_write_bytecode = True
    return int(pytest.main(["-q", "-p", "no:cacheprovider", *arguments]))


def outcome_of(mutant: Mutant, tree: Path, tests: list[str]) -> str:
    """Make the change, run the tests, and take it back."""
    if not tests:
        return "not run"
    original = mutant.path.read_text("utf-8")
    mutant.path.write_text(mutated_text(mutant), "utf-8")
    try:
        code = pytest_in(tree, ["-x", *tests], TIMEOUT_SECS)
    finally:
        mutant.path.write_text(original, "utf-8")
    return {-1: "timeout", 0: "survived"}.get(code, "killed")


def record(tree: Path, packages: list[str]) -> None:
    """Copy the project to `tree`, and record which tests run which lines of `packages`."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name)
        else:
            shutil.copy(source, tree / name)
    sources = ",".join(str(tree / "src/monolith" / package) for package in packages)
    (tree / ".coveragerc").write_text(f"[run]\nsource = {sources}\ndata_file = {tree / '.coverage'}\n")
    options = ["--cov", "--cov-config=.coveragerc", "--cov-context=test", "--cov-report=", "--junit-xml=junit.xml"]
    if pytest_in(tree, ["-W", "ignore", *options, *TESTS]) not in (0, 1):
        sys.exit(f"the tests could not be run, see {tree / 'pytest.log'}")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Draw mutants, run them, and print each and the share that tests noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", default=["checkpoint", "log", "ps", "train"], help="below src/monolith")
    parser.add_argument("--sample", type=int, default=200, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--skip", type=int, default=0, help="mutants of the draw that an interrupted run has done")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "mutants", help="of the copy")
    parser.add_argument("--reuse", action="store_true", help="the copy and the record of the last run")
    given = parser.parse_args()
    # Each run of tests is a fork of this process: importing these takes longer than most tests.
    for name in ("torch._dynamo", "fsspec", "grpc", "numpy", "pyarrow", "pydantic", "yaml"):
        importlib.import_module(name)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # taking back the change that is being tried
    if not given.reuse:
        record(given.folder, given.packages)
    tests, sources = LineMap(given.folder), given.folder / "src/monolith"
    files = [path for package in given.packages for path in sorted((sources / package).rglob("*.py"))]
    possible = [mutant for path in files for mutant in mutants_of(path)]
    drawn = random.Random(given.seed).sample(possible, min(given.sample, len(possible)))[given.skip :]
    # A set-up in which every test fails would look like a perfect score.
    if pytest_in(given.folder, ["-x", *next(filter(None, map(tests.tests_of, drawn)), [])]):
        sys.exit(f"tests fail although nothing was changed, see {given.folder / 'pytest.log'}")
    outcomes: Counter[str] = Counter()
    began = time.monotonic()
    for mutant in drawn:
        outcome = outcome_of(mutant, given.folder, tests.tests_of(mutant))
        outcomes[outcome] += 1
        say(f"{outcome:8} {mutant.path.relative_to(sources)}:{mutant.lines.start}: {mutant.words}")
    caught = outcomes["killed"] + outcomes["timeout"]
    minutes = (time.monotonic() - began) / 60
    say(f"{caught} of {len(drawn)} mutants caught, {len(possible)} possible; {dict(outcomes)}; {minutes:.0f} minutes")


if __name__ == "__main__":
    main()
