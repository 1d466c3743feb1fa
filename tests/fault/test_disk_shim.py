"""Danger: a simulated power cut that loses nothing proves nothing. Programs with a known mistake must be caught, and a program
without one never; what the shim cannot follow must be refused, not ignored.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from disk_shim import Disk, DiskShim, Nursery, Op, contents_of, read_journal

# Replaces one file again and again and says so each time. What the mistakes leave out or do wrong is marked.
WRITER = """
import os, sys
mistake = sys.argv[2]
os.chdir(sys.argv[1])

def sync(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        if mistake != "fsync tried again":
            raise
        os.fsync(fd)
    finally:
        os.close(fd)

def save(number):
    name = "file" if mistake == "in place" else "new"
    with open(name, "wb", buffering=700) as file:
        for _ in range(5):
            file.write(bytes([number]) * 500)
    if mistake == "rename before fsync":
        os.rename("new", "file")
        name = "file"
    if mistake != "no fsync":
        sync(name)
    if name == "new":
        os.rename("new", "file")
    if mistake != "no fsync of the folder":
        sync(".")

for number in range(1, 9):
    try:
        save(number)
    except OSError:
        continue
    print("saved", number, flush=True)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def shim_for(shim_library: Path, root: Path, **faults: int) -> DiskShim:
    return DiskShim(library=shim_library, root=root, journal=root.parent / "journal", **faults)


def replayed(root: Path) -> Disk:
    """The disk at the end of the journal."""
    disk = Disk()
    for record in read_journal(root.parent / "journal"):
        disk.apply(record)
    return disk


def damage(root: Path, images: int) -> set[str]:
    """What goes wrong in power cuts at all points of the journal: "lost", "torn"."""
    disk, found = Disk(), set()
    for record in read_journal(root.parent / "journal"):
        disk.apply(record)
        for seed in range(images):
            content = disk.image(seed).get("file", b"")
            assert content is not None
            if len(content) not in (0, 2500) or len(set(content)) > 1 or content[:1] == b"\0":
                found.add("torn")
            elif (content[0] if content else 0) < int((disk.marks() or ["saved 0"])[-1].split()[1]):
                found.add("lost")
    assert disk.contents() == contents_of(root)
    return found


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        ("none", set()),
        ("no fsync", {"lost", "torn"}),
        ("no fsync of the folder", {"lost"}),
        ("rename before fsync", {"lost", "torn"}),
        ("in place", {"lost", "torn"}),
    ],
)
def test_a_power_cut_catches_every_mistake_and_nothing_else(
    shim_library: Path, root: Path, mistake: str, expected: set[str]
) -> None:
    result = shim_for(shim_library, root).run("-c", WRITER, str(root), mistake)
    assert result.stdout.splitlines() == [f"saved {n}" for n in range(1, 9)]
    assert damage(root, images=30) == expected


@pytest.mark.parametrize(("mistake", "expected"), [("none", set()), ("fsync tried again", {"torn", "lost"})])
def test_what_a_failed_fsync_left_behind_is_lost_to_the_next_one(
    shim_library: Path, root: Path, mistake: str, expected: set[str]
) -> None:
    found = set()
    for seed in range(12):
        (root.parent / "journal").unlink(missing_ok=True)
        shutil.rmtree(root)
        root.mkdir()
        shim_for(shim_library, root, one_in=8, seed=seed).run("-c", WRITER, str(root), mistake)
        found |= damage(root, images=5)
    assert found == expected


def test_faults_come_as_often_as_asked_and_the_same_for_the_same_seed(shim_library: Path, root: Path) -> None:
    program = (
        "import os, sys\n"
        "fd = os.open(sys.argv[1] + '/file', os.O_CREAT | os.O_WRONLY)\n"
        "for _ in range(12_800):\n"
        "    try: os.write(fd, b'ab')\n"
        "    except OSError as error: print(error.errno)\n"
    )
    answers = [
        shim_for(shim_library, root, one_in=128, seed=seed).run("-c", program, str(root)).stdout for seed in (1, 1, 2)
    ]
    assert answers[0] == answers[1] != answers[2]
    errors = [int(line) for line in answers[0].split()]
    assert set(errors) == {5, 28}  # EIO, ENOSPC
    assert 60 < len(errors) < 140


def test_death_comes_at_the_change_asked_for(shim_library: Path, root: Path) -> None:
    program = (
        "import os, sys\n"
        "os.chdir(sys.argv[1])\n"
        "os.mkdir('a')\n"
        "fd = os.open('a/file', os.O_CREAT | os.O_WRONLY)\n"
        "os.write(fd, b'12345678')\n"
        "os.rename('a/file', 'b')\n"
        "print('end')\n"
    )
    seen = []
    for kill_at in range(1, 6):
        shutil.rmtree(root)
        root.mkdir()
        result = shim_for(shim_library, root, kill_at=kill_at).run("-c", program, str(root))
        assert result.returncode == (0 if kill_at == 5 else -9)
        seen.append(contents_of(root))
    whole = {"a": None, "b": b"12345678"}
    assert seen == [{}, {"a": None}, {"a": None, "a/file": b"1234"}, {"a": None, "a/file": b"12345678"}, whole]


# Every call the shim follows, at random, with names relative to a folder's descriptor and without.
RANDOM_CALLS = """
import contextlib, os, random, shutil, sys
chance = random.Random(int(sys.argv[2]))
os.chdir(sys.argv[1])
here = os.open(".", os.O_RDONLY)
for number in range(400):
    names = sorted(os.listdir("."))
    files = [name for name in names if os.path.isfile(name)]
    folders = [name for name in names if os.path.isdir(name)]
    some = chance.choice(files) if files else None
    match chance.randrange(11):
        case 0 | 1:
            with open(f"f{chance.randrange(9)}", chance.choice(["wb", "ab"])) as file:
                file.write(chance.randbytes(chance.randrange(3000)))
        case 2 if some:
            os.rename(some, f"f{chance.randrange(9)}")
        case 3 if some:
            os.rename(some, f"f{chance.randrange(9)}", src_dir_fd=here, dst_dir_fd=here)
        case 4 if some:
            os.unlink(some, dir_fd=chance.choice([None, here]))
        case 5 if some:
            fd = os.open(some, os.O_WRONLY)
            copy = os.dup(fd)
            os.pwrite(fd, b"patch", chance.randrange(2000))
            os.writev(copy, [b"one", b"", b"two"])
            os.ftruncate(fd, chance.randrange(3000))
            os.close(fd)
            os.write(copy, b"end")
            os.fdatasync(copy)
            os.close(copy)
        case 6 if some:
            with contextlib.suppress(shutil.SameFileError):
                shutil.copyfile(some, f"copy{chance.randrange(3)}")
        case 7 if some and not os.path.exists("linked"):
            os.link(some, "linked")
        case 8:
            os.makedirs(f"d{number}/inside")
            with open(f"d{number}/inside/file", "w") as file:
                file.write("x")
            os.rename(f"d{number}", f"e{number}")
        case 9 if folders:
            shutil.rmtree(chance.choice(folders))
        case 10 if some:
            with open(some, "rb") as source, open("part", "wb") as target:
                os.copy_file_range(source.fileno(), target.fileno(), 100, offset_src=3)
"""


@pytest.mark.parametrize("seed", range(5))
def test_the_whole_journal_gives_the_folder(shim_library: Path, root: Path, seed: int) -> None:
    result = shim_for(shim_library, root).run("-c", RANDOM_CALLS, str(root), str(seed))
    assert result.returncode == 0, result.stderr
    assert replayed(root).contents() == contents_of(root)
    calls = {record.op for record in read_journal(root.parent / "journal")}
    assert calls >= set(Op) - {Op.MARK, Op.BLIND, Op.SYNC_FAILED}


def test_a_rename_without_libc_is_found_out(shim_library: Path, root: Path) -> None:
    program = (
        "import sys, torch\n"
        "from safetensors.torch import save_file\n"
        "save_file({'a': torch.arange(1000)}, sys.argv[1] + '/a.safetensors')\n"
    )
    result = shim_for(shim_library, root).run("-c", program, str(root))
    assert result.returncode == 0, result.stderr
    assert replayed(root).contents() == contents_of(root)
    assert list(contents_of(root)) == ["a.safetensors"]


@pytest.mark.parametrize(
    "call", ["os.posix_fallocate(fd, 0, 100)", "import mmap; mmap.mmap(fd, 10)"], ids=["fallocate", "mapping"]
)
def test_what_cannot_be_followed_is_refused(shim_library: Path, root: Path, call: str) -> None:
    program = (
        "import os, sys\n"
        "fd = os.open(sys.argv[1] + '/file', os.O_CREAT | os.O_RDWR)\n"
        "os.write(fd, bytes(10))\n"
        f"{call}\n"
    )
    result = shim_for(shim_library, root).run("-c", program, str(root))
    assert result.returncode == 0, result.stderr
    with pytest.raises(AssertionError, match="cannot follow"):
        replayed(root)


def test_files_elsewhere_are_left_alone(shim_library: Path, root: Path) -> None:
    outside = root.parent / "root-not"
    program = "import sys; open(sys.argv[1], 'w').write('x' * 100)"
    assert shim_for(shim_library, root, one_in=1, kill_at=1).run("-c", program, str(outside)).returncode == 0
    assert outside.read_text() == "x" * 100
    assert read_journal(root.parent / "journal") == []


def test_old_files_of_the_folder_survive() -> None:
    disk = Disk({"old": b"kept", "folder": None, "folder/inside": b"also"})
    assert [disk.image(seed) for seed in range(10)] == [{"old": b"kept", "folder": None, "folder/inside": b"also"}] * 10


def test_runs_of_a_nursery_are_apart(shim_library: Path, root: Path, tmp_path: Path) -> None:
    with Nursery(shim_library, "nursery_job", tmp_path) as nursery:
        ends = [
            nursery.run(shim_for(shim_library, root, kill_at=kill_at), str(root), "some", kill_after=kill_after)
            for kill_at, kill_after in ((0, None), (1, None), (2, None), (0, 0.0))
        ]
    assert [end.returncode for end in ends][:3] == [0, -9, -9]
    assert ends[3].returncode in (0, -9)
    assert [end.stdout for end in ends][:3] == [["wrote some"], [], []]
