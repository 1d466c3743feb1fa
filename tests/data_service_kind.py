"""A kind of source that the tests of the command line name as `data_service_kind:numbers`."""

from __future__ import annotations

import torch

from monolith.data import IteratorSource


def numbers(paths: list[str], *, count: int) -> IteratorSource:
    """Batches of one number each."""
    assert paths == []
    return IteratorSource([{"x": torch.tensor([number])} for number in range(count)])
