"""What a role writes, cut into lines while it is written."""

from __future__ import annotations

import re

__all__ = ["LineCutter"]

_MOST = 4096  # characters of a line that are shown; the log has all of it
_END = re.compile(rb"[\r\n]+")


class LineCutter:
    """Turns pieces of output into lines of text.

    A carriage return ends a line too, as progress bars write it. Bytes that are no text and signs that would command a
    terminal become a replacement character: a role speaks to whoever watches, and no more.

    Example:
        >>> cutter = LineCutter()
        >>> cutter.feed(b"step 1\\nst"), cutter.feed(b"ep 2\\n"), cutter.rest()
        (['step 1'], ['step 2'], [])
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        *lines, self._rest = _END.split(self._rest + data)
        if len(self._rest) > 4 * _MOST:
            lines.append(self._rest)
            self._rest = b""
        return [text for text in map(_shown, lines) if text]

    def rest(self) -> list[str]:
        """The line that was begun and not ended, if there is one."""
        text, self._rest = _shown(self._rest), b""
        return [text] if text else []


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace").rstrip()[:_MOST]
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
