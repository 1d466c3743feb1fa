"""The peers, one file each, behind one small interface.

A peer lives in its own worker process, so that none shares an allocator, a thread pool or an interpreter with another,
and so that peers whose packages exclude each other can take turns in one run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from workload import Batch, FloatArray, IdArray


class Peer(Protocol):
    """A table that already holds every id of the workload, with fresh Adagrad state.

    `prepare` is not timed: it turns a batch into whatever the peer's user would have in hand (tensors of ids; of rows,
    for the peers that are spared the mapping).
    """

    versions: dict[str, str]

    def __init__(self, ids: IdArray, dim: int, threads: int) -> None: ...
    def prepare(self, batch: Batch) -> Any: ...  # noqa: ANN401
    def lookup(self, prepared: Any) -> Any: ...  # noqa: ANN401
    def train_step(self, prepared: Any) -> None: ...  # noqa: ANN401
    def read(self, batch: Batch) -> FloatArray: ...


class GrowingPeer(Protocol):
    """A table that starts empty and takes new ids in training steps."""

    versions: dict[str, str]

    def __init__(self, dim: int, threads: int) -> None: ...
    def prepare(self, ids: IdArray) -> Any: ...  # noqa: ANN401
    def insert(self, prepared: Any) -> None: ...  # noqa: ANN401
    def rows(self) -> int: ...
    def bytes(self) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class PeerSpec:
    name: str
    module: str
    peer: str
    environment: str  # a folder of .venv-bench, or "" for the harness's own environment
    note: str
    row_bytes: Callable[[int], int]  # of a row of this dim, estimated, to decide which peers fit in memory together
    growing: str | None = None
    huge_pages: bool = False  # asked of torch and malloc, whose default it is not; our table asks by itself


OURS = "monolith"

PEERS = (
    PeerSpec(
        name=OURS,
        module="monolith_table",
        peer="Monolith",
        environment="",
        note="64-bit ids, hashed",
        row_bytes=lambda dim: round(1.2 * (8 * dim + 16)),
        growing="GrowingMonolith",
    ),
    PeerSpec(
        name="embeddingbag",
        module="embedding_bag",
        peer="MappedEmbeddingBag",
        environment="",
        note="torch.nn.EmbeddingBag(sparse=True) + torch.optim.Adagrad, ids already mapped to rows",
        row_bytes=lambda dim: 8 * dim + 8,
    ),
    PeerSpec(
        name="embeddingbag+hugepages",
        module="embedding_bag",
        peer="MappedEmbeddingBag",
        environment="",
        note="the same, its memory on huge pages (THP_MEM_ALLOC_ENABLE=1)",
        row_bytes=lambda dim: 8 * dim + 8,
        huge_pages=True,
    ),
    PeerSpec(
        name="embeddingbag+dict",
        module="embedding_bag",
        peer="DictEmbeddingBag",
        environment="",
        note="EmbeddingBag behind a Python dict",
        row_bytes=lambda dim: 8 * dim + 180,
    ),
    PeerSpec(
        name="embeddingbag+pandas",
        module="embedding_bag",
        peer="PandasEmbeddingBag",
        environment="",
        note="EmbeddingBag behind pandas.Index.get_indexer",
        row_bytes=lambda dim: 8 * dim + 80,
    ),
    PeerSpec(
        name="embeddingbag+numpy",
        module="embedding_bag",
        peer="NumpyEmbeddingBag",
        environment="",
        note="EmbeddingBag behind numpy.searchsorted",
        row_bytes=lambda dim: 8 * dim + 40,
    ),
    PeerSpec(
        name="fbgemm",
        module="fbgemm",
        peer="Fbgemm",
        environment="fbgemm",
        note="FBGEMM CPU table-batched embedding, fused EXACT_ADAGRAD (elementwise), ids already mapped to rows",
        row_bytes=lambda dim: 8 * dim + 8,
    ),
    PeerSpec(
        name="fbgemm+hugepages",
        module="fbgemm",
        peer="Fbgemm",
        environment="fbgemm",
        note="the same, its memory on huge pages (THP_MEM_ALLOC_ENABLE=1)",
        row_bytes=lambda dim: 8 * dim + 8,
        huge_pages=True,
    ),
    PeerSpec(
        name="tfra",
        module="tfra",
        peer="Tfra",
        environment="tfra",
        note="TensorFlow Recommenders Addons cuckoo table, Adagrad by its table operations, 64-bit ids, hashed",
        row_bytes=lambda dim: 4 * (4 * dim + 12),  # two tables, at worst half full
        growing="GrowingTfra",
    ),
)


def peer_class(spec: PeerSpec) -> type[Peer]:
    found: type[Peer] = getattr(importlib.import_module(f"peers.{spec.module}"), spec.peer)
    return found


def growing_class(spec: PeerSpec) -> type[GrowingPeer]:
    found: type[GrowingPeer] = getattr(importlib.import_module(f"peers.{spec.module}"), str(spec.growing))
    return found


def spec_named(name: str) -> PeerSpec:
    return next(spec for spec in PEERS if spec.name == name)
