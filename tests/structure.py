"""`make structure`: count how the package is divided, and the calls and files that a step, a save, a restore and a predict cross.

`python tests/structure.py [ROOT]` prints the counts of the tree at ROOT, by default of this one. `--json` prints one object,
`--markdown` the table of CONTRIBUTING.md, and `--names COUNT` what one of the static counts consists of.

Static counts, over the Python files below src/monolith without generated ones:

- modules: all of them, `__init__.py` included.
- one_importer: modules that exactly one other module imports. A package's `__init__` is a module and an importer like any other.
- import_percent: lines of import statements, in percent of the lines that are not blank.
- defined_twice: public names that several modules define at module level: classes, functions, constants and type aliases
  without a leading underscore. Names that a module only imports, and type variables, do not count.
- dangling: docstrings of modules, classes and functions with a semicolon in their first paragraph. That is where returned
  values were named in half a sentence.
- semicolons: docstrings, those of attributes included, with a semicolon anywhere in their prose. Code in backquotes and
  paragraphs with a prompt (>>>) are not prose.
- lines: all lines.
- layer_breaks: imports that do not point downward in LAYERS, wherever they are in a module.

Traced counts, for a small fixed model of two features (one with a bias), a linear layer and one head, with Adam and a model_dir:

- step: from one forward pass to the next in `Trainer.fit`.
- save: `Trainer.save` after one step more. It writes the second checkpoint and the second segment of the change log.
- restore: `Trainer.restore` of a new trainer from both.
- predict: `Predictor.predict` of the exported model.

Calls are those of Python functions of the package in all threads, without comprehensions. Files are the distinct source files
of these functions, classes the distinct classes that define them. The scenario runs twice and the second run is counted, so
imports have been made. segment_opens and manifest_reads are the opens of the segment, and of the manifest, that is opened most
often, by Python code.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

TREE = Path(__file__).parents[1]

LAYERS = (
    "_core proto errors",
    "config console durable exit_codes optional_packages process_bound state_bytes urls",
    "writer_lock",
    "table",
    "log",
    "transport",
    "streams",
    "features cluster",
    "state",
    "follow",
    "nn optim metrics",
    "models",
    "data",
    "dataservice",
    "ps",
    "ranks",
    "serve",
    "train",
    "monolith",
    "original",
    "cli",
    "testing",
)
"""The parts of the package from low to high. One imports what is below it and itself, and no other part of its own layer.
`monolith` is the package's own `__init__`."""

# What this script counted before the restructuring: when it was planned, and when it began.
BEFORE: dict[str, dict[str, float]] = {
    "dd74082": {
        "modules": 427, "one_importer": 151, "import_percent": 10.7, "defined_twice": 53,
        "dangling": 734, "semicolons": 1098, "layer_breaks": 3, "lines": 50364,
        "step_calls": 157, "step_files": 20, "predict_calls": 95, "predict_files": 13,
        "save_calls": 1519, "save_files": 46, "save_segment_opens": 11, "save_manifest_reads": 3,
        "restore_calls": 1445, "restore_files": 43, "restore_segment_opens": 5, "restore_manifest_reads": 5,
    },
    "f8e844c": {
        "modules": 450, "one_importer": 150, "import_percent": 10.2, "defined_twice": 59,
        "dangling": 671, "semicolons": 1039, "layer_breaks": 3, "lines": 58621,
        "step_calls": 169, "step_files": 22, "predict_calls": 249, "predict_files": 14,
        "save_calls": 1657, "save_files": 52, "save_classes": 38, "save_segment_opens": 10, "save_manifest_reads": 3,
        "restore_calls": 2389, "restore_files": 49, "restore_classes": 24, "restore_segment_opens": 7,
        "restore_manifest_reads": 5,
    },
}  # fmt: skip
# Half of the calls and files of the plan, one open of each file, and no line more than at the beginning.
TARGETS: dict[str, float] = {
    **{name: count // 2 for name, count in BEFORE["dd74082"].items() if name.endswith(("_calls", "_files"))},
    **{f"{what}_{noun}": 1 for what in ("save", "restore") for noun in ("segment_opens", "manifest_reads")},
    **dict.fromkeys(("defined_twice", "dangling", "semicolons", "layer_breaks"), 0),
    "modules": 300,
    "one_importer": 40,
    "import_percent": 7,
    "lines": BEFORE["f8e844c"]["lines"],
}


@dataclass(frozen=True)
class Import:
    """A line of the module `importer` that imports the module `name`."""

    importer: str
    line: int
    name: str


@dataclass(frozen=True)
class Tree:
    """The modules of a package by their dotted names, parsed."""

    root: Path
    texts: dict[str, str] = field(default_factory=dict)
    parsed: dict[str, ast.Module] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path) -> Tree:
        """Read all modules below `root`/src/monolith but generated ones."""
        tree = cls(root)
        for path in sorted((root / "src" / "monolith").rglob("*.py")):
            if not path.name.endswith("_pb2.py"):
                parts = path.relative_to(root / "src").with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                tree.texts[name] = path.read_text()
                tree.parsed[name] = ast.parse(tree.texts[name])
        return tree

    def imports(self) -> Iterator[Import]:
        """Yield every import of a module of the package, also those inside functions and for type checkers."""
        for importer, parsed in self.parsed.items():
            for node in ast.walk(parsed):
                if isinstance(node, ast.ImportFrom):
                    assert not node.level, f"{importer}:{node.lineno}: relative import"
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                elif isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                else:
                    continue
                for name in names:
                    built = name == "monolith._core" or name.startswith("monolith.proto.")
                    module = name if built or name in self.parsed else name.rpartition(".")[0]
                    if built or module in self.parsed:
                        yield Import(importer, node.lineno, module)


def one_importer(tree: Tree) -> list[str]:
    """Name the modules that exactly one other module imports."""
    importers: dict[str, set[str]] = defaultdict(set)
    for found in tree.imports():
        if found.importer != found.name:
            importers[found.name].add(found.importer)
    modules = tree.parsed.keys() - {"monolith"}
    return [f"{module} <- {min(importers[module])}" for module in sorted(modules) if len(importers[module]) == 1]


def import_percent(tree: Tree) -> float:
    """Divide the lines of imports by the lines that are not blank."""
    nodes = (node for parsed in tree.parsed.values() for node in ast.walk(parsed))
    lines = sum((n.end_lineno or 0) - n.lineno + 1 for n in nodes if isinstance(n, ast.Import | ast.ImportFrom))
    return round(100 * lines / sum(bool(line.strip()) for text in tree.texts.values() for line in text.splitlines()), 1)


def defined_twice(tree: Tree) -> list[str]:
    """Name what several modules define, with these modules."""
    homes: dict[str, set[str]] = defaultdict(set)
    for module, parsed in tree.parsed.items():
        for node in parsed.body:
            for name in _defined(node):
                if not name.startswith("_"):
                    homes[name].add(module)
    return [f"{name}: {', '.join(sorted(homes[name]))}" for name in sorted(homes) if len(homes[name]) > 1]


def _defined(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar" | "ParamSpec"))):
            return []
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def dangling(tree: Tree) -> list[str]:
    """Name the docstrings of modules, classes and functions whose first paragraph has a semicolon."""
    return [where for where, text, owned in _docstrings(tree) if owned and ";" in _prose(text.split("\n\n")[0])]


def semicolons(tree: Tree) -> list[str]:
    """Name the docstrings, those of attributes included, whose prose has a semicolon."""
    return [where for where, text, _ in _docstrings(tree) if ";" in _prose(text)]


def _docstrings(tree: Tree) -> Iterator[tuple[str, str, bool]]:
    """Yield where each docstring is, its text, and whether it is that of a module, a class or a function."""
    for module, parsed in tree.parsed.items():
        for parent in ast.walk(parsed):
            if isinstance(parent, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                for number, node in enumerate(parent.body):
                    match node:
                        case ast.Expr(value=ast.Constant(value=str() as text)):
                            yield f"{module}:{node.lineno}", text, number == 0


def _prose(docstring: str) -> str:
    paragraphs = re.split(r"\n\s*\n", docstring)
    return re.sub(r"`[^`]*`", "", "\n\n".join(part for part in paragraphs if ">>>" not in part))


def layer_breaks(tree: Tree) -> list[str]:
    """Name the lines of imports that do not point downward in LAYERS, as `module:line -> module`."""
    height = {part: number for number, layer in enumerate(LAYERS) for part in layer.split()}

    def points_down(above: str, below: str) -> bool:
        return above == below or height[above] > height[below]

    found = {i for i in tree.imports() if not points_down(part_of(i.importer), part_of(i.name))}
    return sorted(f"{i.importer}:{i.line} -> {i.name}" for i in found)


def part_of(module: str) -> str:
    """Name the part of the package that a module belongs to, as LAYERS does."""
    return module.split(".")[1] if "." in module else module


STATIC_LISTS = {check.__name__: check for check in (one_importer, defined_twice, dangling, semicolons, layer_breaks)}


def count_modules(root: Path) -> dict[str, float]:
    """Make the static counts of a tree."""
    tree = Tree.read(root)
    return {
        "modules": len(tree.parsed),
        "import_percent": import_percent(tree),
        "lines": sum(len(text.splitlines()) for text in tree.texts.values()),
        **{name: len(check(tree)) for name, check in STATIC_LISTS.items()},
    }


class Trace:
    """Counts calls of functions of the package, and opened files, while it is `on`."""

    def __init__(self, package: Path) -> None:
        self.package = f"{package}/"
        self.on = False
        self.calls: Counter[tuple[str, str]] = Counter()
        self.opened: Counter[str] = Counter()

    def start(self) -> None:
        """Watch this thread, and those started from now on."""
        threading.setprofile(self._call)
        sys.setprofile(self._call)
        sys.addaudithook(self._event)

    def stop(self) -> None:
        """Watch no longer."""
        self.on = False
        sys.setprofile(None)
        threading.setprofile(None)

    def take(self) -> tuple[dict[str, float], Counter[str]]:
        """Return the counts of calls, files and classes, and how often each file was opened, and begin again with nothing."""
        self.on = False
        classes = {
            (file, owner) for file, name in self.calls if (owner := name.partition(".<locals>")[0].rpartition(".")[0])
        }
        files = {file for file, _ in self.calls}
        counts: dict[str, float] = {"calls": self.calls.total(), "files": len(files), "classes": len(classes)}
        opened, self.opened = self.opened, Counter()
        self.calls = Counter()
        return counts, opened

    def _call(self, frame: FrameType, event: str, _: object) -> None:
        if self.on and event == "call" and frame.f_code.co_filename.startswith(self.package):
            name = frame.f_code.co_name
            # Newer Pythons make no call for a comprehension.
            if name == "<lambda>" or not name.startswith("<"):
                self.calls[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    def _event(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.on and event == "open":
            self.opened[str(arguments[0])] += 1


def count_calls(root: Path) -> dict[str, float]:
    """Make the traced counts of the package, which must be importable from the tree at `root`."""
    sys.path.insert(0, str(root / "src"))
    import monolith

    package = Path(monolith.__file__).parent
    if package != root / "src" / "monolith":
        raise SystemExit(f"structure: {root}: its package cannot be imported, {package} comes first")
    trace = Trace(package)
    trace.start()
    try:
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                found = _scenario(trace, Path(folder))
    finally:
        trace.stop()
    return found


def _scenario(trace: Trace, folder: Path) -> dict[str, float]:
    import torch
    from torch import Tensor, nn

    from monolith import EmbeddingBagCollection, Feature, Head, RunConfig, Trainer, load
    from monolith.features import Batch
    from monolith.serve import export_model

    class ClickModel(nn.Module):
        heads = (Head(name="click", label="clicked"),)

        def __init__(self) -> None:
            super().__init__()
            self.embeddings = EmbeddingBagCollection(
                [Feature(name="user", dim=4), Feature(name="item", dim=4, bias=True)]
            )
            self.linear = nn.Linear(8, 1)
            self.passes = 0

        def forward(self, batch: Batch) -> Tensor:
            self.passes += 1
            if self.passes in (3, 4):
                trace.on = self.passes == 3
            rows = self.embeddings(batch)
            logits: Tensor = self.linear(torch.cat([rows["user"], rows["item"]], dim=1)) + rows["item.bias"]
            return logits.squeeze(1)

    def batch_of(number: int) -> Batch:
        random = torch.Generator().manual_seed(number)
        ids = {name: torch.randint(0, 20, (8,), generator=random) for name in ("user", "item")}
        return {**ids, "clicked": torch.randint(0, 2, (8,), generator=random).float()}

    def new_trainer() -> Trainer:
        model = ClickModel()
        config = RunConfig(model_dir=str(folder / "run"), save_checkpoints_secs=0)
        return Trainer(model, torch.optim.Adam(model.parameters()), config=config)

    found: dict[str, float] = {}

    def keep(what: str) -> None:
        counts, opened = trace.take()
        found.update({f"{what}_{name}": number for name, number in counts.items()})
        if what in ("save", "restore"):
            for noun, pattern in (("segment_opens", "[0-9]*.segment"), ("manifest_reads", "manifest.json")):
                times = [number for path, number in opened.items() if Path(path).match(pattern)]
                found[f"{what}_{noun}"] = max(times, default=0)

    trainer = new_trainer()
    trainer.fit([batch_of(number) for number in range(5)])
    keep("step")
    trainer.train_step(batch_of(5))
    trace.on = True
    trainer.save()
    keep("save")
    restored = new_trainer()
    trace.on = True
    assert restored.restore()
    keep("restore")
    assert restored.step == trainer.step

    exported = export_model(trainer.model, batch_of(0), folder / "exports", heads=ClickModel.heads)
    predictor, columns = load(exported), {name: batch_of(6)[name] for name in ("user", "item")}
    trace.on = True
    predictor.predict(columns)
    keep("predict")
    return found


ROWS = (
    ("modules", "modules"),
    ("modules with exactly one importer", "one_importer"),
    ("lines of imports, % of non-blank lines", "import_percent"),
    ("public names defined twice", "defined_twice"),
    ("docstrings with a dangling return", "dangling"),
    ("docstrings with a semicolon in their prose", "semicolons"),
    ("imports that do not point downward", "layer_breaks"),
    ("Python lines of src", "lines"),
    *((f"calls / files of a {what}", f"{what}_calls {what}_files") for what in ("step", "save", "restore", "predict")),
    ("classes whose methods a save / restore calls", "save_classes restore_classes"),
    ("most opens of one segment, save / restore", "save_segment_opens restore_segment_opens"),
    ("most reads of one manifest, save / restore", "save_manifest_reads restore_manifest_reads"),
)


def cell(counts: dict[str, float], names: str) -> str:
    """Write the counts of a row of ROWS."""
    return " / ".join(f"{counts[name]:,}" for name in names.split() if name in counts)


def plain(counts: dict[str, float]) -> str:
    """Write the counts as lines of text."""
    return "\n".join(f"{title:<50}{cell(counts, names):>14}" for title, names in ROWS)


def markdown(counts: dict[str, float]) -> str:
    """Write a table of the counts between those of before and the targets."""
    columns = {**BEFORE, "now": counts, "target": TARGETS}
    lines = [("count", *columns), ("---", *["--:"] * len(columns))]
    lines += [(title, *(cell(of, names) for of in columns.values())) for title, names in ROWS]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=TREE, help="top folder of the tree to count")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print one JSON object")
    shape.add_argument("--markdown", action="store_true", help="print the table of CONTRIBUTING.md")
    shape.add_argument("--names", choices=STATIC_LISTS, help="print what is counted there, one per line")
    given = parser.parse_args()
    root = given.root.resolve()
    if given.names:
        shown = "\n".join(STATIC_LISTS[given.names](Tree.read(root)))
    else:
        counts = {**count_modules(root), **count_calls(root)}
        shown = markdown(counts) if given.markdown else json.dumps(counts, indent=2) if given.json else plain(counts)
    sys.stdout.write(f"{shown}\n")


if __name__ == "__main__":
    main()
