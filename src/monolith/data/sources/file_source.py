"""What all sources that read files share: the list of files, the batch size, and the check of a saved position."""

from __future__ import annotations

from collections.abc import Sequence

from monolith.data.sources.files import STDIN, expand_paths
from monolith.data.sources.source import Position, Source
from monolith.errors import InvalidArgumentError

__all__ = ["FileSource"]


class FileSource(Source):
    """A source over files; its positions have the keys `file` (index), `url` (of that file, "" at the very start)."""

    def __init__(
        self, paths: str | Sequence[str], *, batch_size: int, drop_remainder: bool, max_corrupt: int = 0
    ) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("max_corrupt", max_corrupt, 0)):
            if value < least:
                raise InvalidArgumentError(f"{name}: expected {least} or more, got {value}")
        self.files = expand_paths(paths)
        self._batch_size, self._drop_remainder, self._max_corrupt = batch_size, drop_remainder, max_corrupt
        super().__init__()

    def _check(self, position: Position) -> None:
        super()._check(position)
        index, url = int(position["file"]), position["url"]
        if url and (index >= len(self.files) or self.files[index] != url):
            raise InvalidArgumentError(
                f"state['url'] is {url!r}, which is not file {index} of this source; the list of files has changed"
            )
        if url == STDIN:
            raise InvalidArgumentError("state: standard input cannot be read again from a position")
