"""The disk as a power cut may leave it, built from a journal.

What POSIX promises, and no more: the data of a file survive its fsync, a name survives the fsync of its folder. All that came
since is up to chance: each write may be there, missing, cut at a sector, or zeros; each name may be old or new; a folder whose
own name is lost takes its files along. There are two kinds of file systems: `ordered` ones keep a prefix of all changes of
names (as the journals of ext4 and XFS do), others any of them. A rename is atomic. After a failed fsync what was written before
is lost to later ones, as on Linux, where failed pages count as clean.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from disk_shim.journal import Op, Record

SECTOR = 512
SHARES = (0.0, 0.2, 0.5, 0.8, 0.95, 1.0)
"""Of unsynced things, how many a power cut may spare."""


@dataclass(eq=False)
class Change:
    """A write or, with `data` None, a truncation to `offset`."""

    offset: int
    data: bytes | None
    durable: bool = False
    lost_to_sync: bool = False


@dataclass(eq=False)
class File:
    """An inode: what is certainly there, and what happened since."""

    base: bytes = b""
    changes: list[Change] = field(default_factory=list)

    def sync(self) -> None:
        for change in self.changes:
            change.durable = change.durable or not change.lost_to_sync
        if all(change.durable for change in self.changes):
            self.base, self.changes = self.content(None), []

    def fail_sync(self) -> None:
        for change in self.changes:
            change.lost_to_sync = not change.durable

    def content(self, chance: Chance | None) -> bytes:
        """With all changes, or with those that chance keeps."""
        content = bytearray(self.base)
        for change in self.changes:
            data = change.data
            if chance is not None and not change.durable:
                fate = chance.fate()
                if fate == "missing":
                    continue
                if data is not None:
                    data = {"torn": data[: chance.tear(len(data))], "zeros": bytes(len(data))}.get(fate, data)
            _apply(content, change.offset, data)
        return bytes(content)


@dataclass(eq=False)
class Folder:
    """Names that a program sees now."""

    names: dict[str, Node] = field(default_factory=dict)


Node = File | Folder


@dataclass(eq=False)
class Naming:
    """One atomic change of names: in a folder, a name now means a node, or nothing."""

    parts: list[tuple[Folder, str, Node | None]]
    durable: list[bool]


class Chance:
    """What a power cut does to things that were not synced: to many or few, to names more than to data or less."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._data_kept = self._random.choice(SHARES)
        self._names_kept = self._random.choice(SHARES)
        self.ordered = self._random.random() < 0.5

    def fate(self) -> str:
        """Of a write."""
        if self._random.random() < self._data_kept:
            return "kept"
        return self._random.choice(["missing", "torn", "zeros"]) if self._data_kept else "missing"

    def tear(self, size: int) -> int:
        return self._random.randrange(size + 1) // SECTOR * SECTOR

    def keeps_name(self) -> bool:
        return self._random.random() < self._names_kept

    def prefix(self, least: int, most: int) -> int:
        """How many changes of names an ordered file system keeps."""
        if self._names_kept in (0.0, 1.0):
            return most if self._names_kept else least
        return self._random.randint(least, most)


class Disk:
    """Applies records one by one; `image(seed)` is what a power cut now may leave."""

    def __init__(self, initial: dict[str, bytes | None] | None = None) -> None:
        self._root = Folder()
        self._open: dict[int, Node] = {}
        self._namings: list[Naming] = []
        self._unsynced: dict[Folder, list[tuple[Naming, int]]] = {}
        self._committed = 0
        self._said = b""
        for path, content in (initial or {}).items():
            folder, name = self._place(path)
            folder.names[name] = Folder() if content is None else File(content)
        self._at_start = {folder: dict(folder.names) for _, folder in _walk(self._root) if isinstance(folder, Folder)}

    def apply(self, record: Record) -> None:
        """Let one recorded change happen."""
        node = self._open.get(record.fd)
        match record.op, node:
            case Op.BLIND, _:
                raise AssertionError(f"the program did what the journal cannot follow: {record.path}")
            case Op.MARK, _:
                self._said += record.data
            case Op.OPEN, _:
                self._open[record.fd] = self._opened(record.path, record.number)
            case Op.WRITE, File():
                node.changes.append(Change(record.number, record.data))
            case Op.TRUNCATE, File():
                node.changes.append(Change(record.number, None))
            case Op.SYNC, File() | Folder():
                self._sync(node)
            case Op.SYNC_FAILED, File():
                node.fail_sync()
            case Op.SYNC_FAILED, Folder():
                pass
            case Op.DUP, File() | Folder():
                self._open[record.number] = node
            case Op.CLOSE, File() | Folder():
                self._close(record)
            case Op.RENAME, _:
                self._rename(record.path, record.target)
            case Op.LINK, _:
                folder, name = self._place(record.target)
                self._name([(folder, name, self._node(record.path))])
            case ((Op.UNLINK | Op.RMDIR), _):
                self._name([(*self._place(record.path), None)])
            case Op.MKDIR, _:
                self._name([(*self._place(record.path), Folder())])
            case _:
                raise AssertionError(f"descriptor {record.fd} was never opened: {record}")

    def marks(self) -> list[str]:
        """The lines that the program has written to standard output."""
        return self._said.decode().split("\n")[:-1]

    def contents(self) -> dict[str, bytes | None]:
        """What a program sees now: content by path, None for folders."""
        return {
            path: node.content(None) if isinstance(node, File) else None for path, node in _walk(self._root) if path
        }

    def image(self, seed: int) -> dict[str, bytes | None]:
        """What is there after a power cut now."""
        chance = Chance(seed)
        names = {folder: dict(inside) for folder, inside in self._at_start.items()}
        for naming, kept in zip(self._namings, self._kept_namings(chance), strict=True):
            for (folder, name, node), durable in zip(naming.parts, naming.durable, strict=True):
                if kept or durable:
                    inside = names.setdefault(folder, {})
                    if node is None:
                        inside.pop(name, None)
                    else:
                        inside[name] = node
        found: dict[str, bytes | None] = {}
        contents: dict[File, bytes] = {}
        todo = [("", self._root)]
        while todo:
            path, folder = todo.pop()
            for name, node in names.get(folder, {}).items():
                if isinstance(node, Folder):
                    found[path + name] = None
                    todo.append((f"{path}{name}/", node))
                else:
                    if node not in contents:
                        contents[node] = node.content(chance)
                    found[path + name] = contents[node]
        return found

    def _kept_namings(self, chance: Chance) -> list[bool]:
        if chance.ordered:
            kept = chance.prefix(self._committed, len(self._namings))
            return [place < kept for place in range(len(self._namings))]
        return [chance.keeps_name() for _ in self._namings]

    def _sync(self, node: Node) -> None:
        # A file system that keeps names in order writes all of them out at any fsync.
        self._committed = len(self._namings)
        if isinstance(node, File):
            node.sync()
            return
        for naming, part in self._unsynced.pop(node, []):
            naming.durable[part] = True

    def _opened(self, path: str, flags: int) -> Node:
        if not path:
            return self._root
        folder, name = self._place(path)
        node = folder.names.get(name)
        if node is None:
            assert flags & os.O_CREAT, f"{path} was opened, but the journal does not know where it comes from"
            node = File()
            self._name([(folder, name, node)])
        elif flags & os.O_TRUNC and isinstance(node, File):
            node.changes.append(Change(0, None))
        return node

    def _close(self, record: Record) -> None:
        node = self._open.pop(record.fd)
        if not record.path or record.path.endswith(" (deleted)"):
            return
        folder, name = self._place(record.path)
        if folder.names.get(name) is not node:  # renamed without libc
            (old,) = [path for path, other in _walk(self._root) if other is node]
            self._rename(old, record.path)

    def _rename(self, old: str, new: str) -> None:
        from_folder, from_name = self._place(old)
        to_folder, to_name = self._place(new)
        node = from_folder.names[from_name]
        if to_folder.names.get(to_name) is not node:  # two names of one file: POSIX changes nothing
            self._name([(from_folder, from_name, None), (to_folder, to_name, node)])

    def _name(self, parts: list[tuple[Folder, str, Node | None]]) -> None:
        naming = Naming(parts, [False] * len(parts))
        self._namings.append(naming)
        for part, (folder, name, node) in enumerate(parts):
            self._unsynced.setdefault(folder, []).append((naming, part))
            if node is None:
                del folder.names[name]
            else:
                folder.names[name] = node

    def _place(self, path: str) -> tuple[Folder, str]:
        *folders, name = path.split("/")
        folder = self._root
        for part in folders:
            inside = folder.names[part]
            assert isinstance(inside, Folder), path
            folder = inside
        return folder, name

    def _node(self, path: str) -> Node:
        folder, name = self._place(path)
        return folder.names[name]


def contents_of(folder: Path) -> dict[str, bytes | None]:
    """A real folder in the form of `Disk.contents`."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
    }


def write_image(image: dict[str, bytes | None], folder: Path) -> None:
    """Make `folder`, which must not exist, as in `image`."""
    folder.mkdir(parents=True)
    for path, content in sorted(image.items()):
        if content is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(content)


def _apply(content: bytearray, offset: int, data: bytes | None) -> None:
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    if data is None:
        del content[offset:]
    else:
        content[offset : offset + len(data)] = data


def _walk(folder: Folder, path: str = "") -> Iterator[tuple[str, Node]]:
    yield path, folder
    for name, node in folder.names.items():
        inside = f"{path}/{name}" if path else name
        if isinstance(node, Folder):
            yield from _walk(node, inside)
        else:
            yield inside, node
