"""Danger: a sharded checkpoint that only the same shards can read, or iterators that jump."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from monolith.errors import InvalidArgumentError
from monolith.original import PartialRecoverySaver
from training import Stream

SHARDS = {"v0": 0, "reader0": 0, "v1": 1, "reader1": 1}


def variables(value: float = 0.0) -> dict[str, object]:
    return {
        "v0": torch.tensor([value]),
        "v1": torch.tensor([2 * value]),
        "reader0": Stream(),
        "reader1": Stream(),
        "step": torch.tensor(int(value)),
    }


def saver(named: dict[str, object], sharded: bool) -> PartialRecoverySaver:
    return PartialRecoverySaver(named, sharded=sharded, shard_of=SHARDS)  # type: ignore[arg-type]


def advance(stream: object, count: int) -> None:
    assert isinstance(stream, Stream)
    batches: Iterator[object] = iter(stream)
    for _ in range(count):
        next(batches)


@pytest.mark.parametrize("written", [True, False], ids=["sharded", "whole"])
@pytest.mark.parametrize("read", [True, False], ids=["into shards", "into one"])
def test_either_form_is_read_by_either(tmp_path: Path, written: bool, read: bool) -> None:
    there = variables(3.0)
    advance(there["reader0"], 2)
    advance(there["reader1"], 5)
    path = saver(there, written).save(tmp_path / "ckpt", global_step=3)
    assert path is not None
    here = variables()
    saver(here, read).restore(path)
    for name in ("v0", "v1", "step"):
        assert torch.equal(here[name], there[name])  # type: ignore[arg-type]
    # An iterator goes on with the element after the last one it gave.
    assert [here[name].next for name in ("reader0", "reader1")] == [2, 5]  # type: ignore[attr-defined]


def test_every_shard_has_files_of_its_own(tmp_path: Path) -> None:
    saver(variables(1.0), sharded=True).save(tmp_path / "ckpt")
    names = {path.name for path in (tmp_path / "ckpt").iterdir()}
    for place in ("shard-00000-of-00002", "shard-00001-of-00002", "state"):
        assert {f"{place}.json", f"{place}.safetensors"} <= names


def test_a_shard_of_an_unknown_variable_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="shard_of: there is no variable 'v9'"):
        PartialRecoverySaver({"v0": torch.zeros(1)}, shard_of={"v9": 0})
