"""`WaitingSource`: records of partitions in memory that a test appends to while a run reads them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Self

import torch

from monolith.data.sources.source import Source, SourcePosition
from monolith.features.batch import Batch


class WaitingSource(Source):
    """Batches of at most `batch_size` ids. It waits when it has given all that were appended, unless `ends` is set."""

    waits = True

    def __init__(self, partitions: int = 1, *, batch_size: int = 2, ends: bool = False) -> None:
        self.records: list[list[int]] = [[] for _ in range(partitions)]
        self.changed = threading.Condition()
        self.batch_size, self.ends = batch_size, ends
        self.waiting = threading.Event()
        """Set while a read waits."""
        self.reads = 0
        self._interruptions = 0
        super().__init__()

    def append(self, *ids: int, partition: int = 0) -> None:
        with self.changed:
            self.records[partition].extend(ids)
            self.changed.notify_all()

    def interrupt(self) -> None:
        with self.changed:
            self._interruptions += 1
            self.changed.notify_all()

    def shard(self, index: int, count: int) -> Self:
        part = super().shard(index, count)
        part.waiting, part._interruptions = threading.Event(), 0
        return part

    def _mine(self) -> list[int]:
        return [n for n in range(len(self.records)) if n % self._shard_count == self._shard_index]

    def _start(self) -> SourcePosition:
        return {"partitions": "{}"}

    def load_state_dict(self, state: dict[str, int | str]) -> None:  # type: ignore[override]
        own = (self._shard_index, self._shard_count)
        assert (state["shard_index"], state["shard_count"]) in (own, (0, 1)), "the position of another shard"
        mine = {str(n) for n in self._mine()}
        known = {n: at for n, at in json.loads(str(state["partitions"])).items() if n in mine}
        self._position = {"partitions": json.dumps(known)}

    def join_state_dicts(self, states: list[dict[str, int | str]]) -> dict[str, int | str]:
        shards = {(state["shard_index"], state["shard_count"]) for state in states}
        assert any({(index, count) for index in range(count)} <= shards for _, count in shards), "a shard is missing"
        joined: dict[str, int] = {}
        for state in states:
            joined |= json.loads(str(state["partitions"]))
        return {"partitions": json.dumps(joined), "shard_index": 0, "shard_count": 1}

    def replay(self, until: dict[str, int | str]) -> Iterator[Batch]:  # type: ignore[override]
        at = {int(n): offset for n, offset in json.loads(str(self._position["partitions"])).items()}
        for name, end in json.loads(str(until["partitions"])).items():
            assert int(name) in self._mine()
            ids = self.records[int(name)][at.get(int(name), 0) : end]
            if ids:
                yield {"id": torch.tensor(ids), "label": torch.ones(len(ids))}
        self.load_state_dict(until)

    def _read(self, position: SourcePosition) -> Iterator[tuple[Batch, SourcePosition]]:
        at = {int(n): offset for n, offset in json.loads(str(position["partitions"])).items()}
        seen = self._interruptions
        while True:
            with self.changed:
                while not (ready := [n for n in self._mine() if at.get(n, 0) < len(self.records[n])]):
                    if self.ends or self._interruptions != seen:
                        return
                    self.waiting.set()
                    self.changed.wait(60)
                    self.waiting.clear()
                first = at.get(ready[0], 0)
                ids = self.records[ready[0]][first : first + self.batch_size]
                at[ready[0]] = first + len(ids)
                self.reads += 1
            yield {"id": torch.tensor(ids), "label": torch.ones(len(ids))}, {"partitions": json.dumps(at)}


def until(true: object, secs: float = 60.0) -> None:
    """Return when `true()` is. Raises after `secs`, which are never waited for when all is well."""
    deadline = time.monotonic() + secs
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


__all__ = ["WaitingSource", "until"]
