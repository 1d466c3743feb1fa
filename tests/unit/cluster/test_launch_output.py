"""Danger: a role that takes the launcher's memory, terminal or order of lines with what it writes."""

from __future__ import annotations

import pytest

from monolith.cluster.launch.local import LineCutter


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a\nb\n"], ["a", "b"]),
        ([b"a", b"b\n", b"c"], ["ab", "c"]),
        ([b"1%\r2%\r3%\n"], ["1%", "2%", "3%"]),
        ([b"a\r", b"\nb\n"], ["a", "b"]),
        ([b"\n\n a \n"], [" a"]),
        ([b"\xff\n"], ["\N{REPLACEMENT CHARACTER}"]),
        ([b"\x1b[2J\x07x\ty\n"], ["\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}x\ty"]),
        (["Zürich\n".encode()[:2], "Zürich\n".encode()[2:]], ["Zürich"]),
    ],
)
def test_lines(pieces: list[bytes], lines: list[str]) -> None:
    cutter = LineCutter()
    seen = [line for piece in pieces for line in cutter.feed(piece)]
    assert seen + cutter.rest() == lines


def test_a_line_without_end_is_cut_and_takes_no_memory() -> None:
    cutter = LineCutter()
    shown = [len(line) for _ in range(100) for line in cutter.feed(b"x" * 10_000)]
    assert shown
    assert max(shown) == 4096
