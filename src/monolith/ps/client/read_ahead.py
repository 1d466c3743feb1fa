"""Reading ahead: the rows of the next batch come from the servers while this one is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from monolith.features.batch import Batch
from monolith.nn import embedding_collections
from monolith.nn.bags import bags_of

__all__ = ["ReadAhead"]


class ReadAhead:
    """The batches of `source`, each handed out when the rows of the one behind it have been asked for.

    So the rows of a batch lack exactly the update of the batch before it, whatever the timing: the same model every time,
    unless `ClientConfig.ordered` is off. To be iterated by the thread that trains; a `Trainer` needs
    `embedding_prefetch_capacity=0`. A source that can tell its place still can: it is that behind the batch handed out last.

    Example:
        >>> import torch
        >>> from monolith.features import Feature
        >>> from monolith.nn import EmbeddingBagCollection
        >>> from monolith.ps import ParameterServer, ReadAhead, ServerStore, tables_of
        >>> features = [Feature(name="user", dim=2)]
        >>> with ParameterServer() as server, ServerStore([server.address], tables_of(features)) as store:
        ...     embeddings = EmbeddingBagCollection(features, store)
        ...     batches = [{"user": torch.tensor([number])} for number in range(3)]
        ...     [list(embeddings(batch)["user"].shape) for batch in ReadAhead(batches, embeddings)]
        [[1, 2], [1, 2], [1, 2]]
    """

    def __init__(self, source: Iterable[Batch], model: nn.Module) -> None:
        self._source = source
        self._collections = embedding_collections(model)
        self._place: object = None

    def __iter__(self) -> Iterator[Batch]:
        self._place = self._told_place()
        batches = iter(self._source)
        current = next(batches, None)
        if current is not None:
            self._prefetch(current)
        while current is not None:
            self._place = self._told_place()
            following = next(batches, None)
            if following is not None:
                self._prefetch(following)
            yield current
            current = following

    def state_dict(self) -> object:
        """The place behind the batch handed out last."""
        return self._place

    def load_state_dict(self, state: object) -> None:
        """Go on from a place that `state_dict` told."""
        self._source.load_state_dict(state)  # type: ignore[attr-defined]

    def _told_place(self) -> object:
        tell = getattr(self._source, "state_dict", None)
        return None if tell is None else tell()

    def _prefetch(self, batch: Batch) -> None:
        for collection in self._collections:
            if collection.store.remote:
                collection.store.prefetch([table.bags for table in bags_of(collection.declaration, batch)])
