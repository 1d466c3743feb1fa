"""`RemoteStore`: the tables of one parameter server as a `Store`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import torch

from monolith.errors import InvalidArgumentError
from monolith.ps.client.server_group import ClientConfig, ServerGroup
from monolith.ps.protocol import messages
from monolith.ps.protocol.calls import Call
from monolith.ps.protocol.messages import DeclaredTable
from monolith.ps.protocol.precision import narrowed, widen
from monolith.table.arrays import Ids, Values, contiguous, id_array
from monolith.table.config import TableConfig
from monolith.table.store import Bags, Gradient, Position, join_gradients

__all__ = ["RemoteStore"]


class RemoteStore(ServerGroup):
    """A `Store` whose tables are on one server: every call is what a `LocalStore` there would do, bit for bit.

    Bags travel as they are and are pooled by the server; with `wire="float32"` nothing is rounded on the way. A call raises
    the error that the server had, or, when `ClientConfig.timeout` is over, `DeadlineExceededError` or `UnavailableError`. Any
    thread may call.

    Example:
        >>> from monolith.ps import ParameterServer, RemoteStore
        >>> from monolith.table import Bags
        >>> from monolith.testing import sgd_table_config
        >>> with ParameterServer() as server, RemoteStore(server.address, [sgd_table_config(1, name="item")]) as store:
        ...     store.assign("item", [3, 4], torch.tensor([[1.0], [2.0]]))
        ...     store.lookup([Bags(table="item", ids=np.array([3, 4]), offsets=np.array([0, 2]))])
        [tensor([[3.]])]
    """

    def __init__(
        self,
        address: str,
        tables: Iterable[TableConfig | DeclaredTable] = (),
        *,
        config: ClientConfig | None = None,
    ) -> None:
        super().__init__([address], tables, config=config)
        (self._link,) = self.links

    def lookup(self, requests: Sequence[Bags]) -> list[torch.Tensor]:
        """One float32 [bags, dim] per request; an empty bag is zeros. Never inserts."""
        reads = tuple(messages.TableRead(table=bags.table, pooling=bags.pooling) for bags in requests)
        text = messages.Lookup(tables=reads, wire=self.config.wire).model_dump_json()
        arrays = [array for bags in requests for array in (bags.ids, bags.offsets)]
        frame = self._link.call(Call.LOOKUP, text, arrays)
        # A copy where nothing had to be widened: the frame's memory is not ours to write.
        rows = [widen(array, bags.table) for array, bags in zip(frame.arrays, requests, strict=True)]
        return [torch.from_numpy(array if array.flags.writeable else array.copy()) for array in rows]

    def apply(
        self,
        gradients: Sequence[Gradient],
        *,
        step: int = 0,
        event_time: int = 0,
        position: Position | None = None,
    ) -> None:
        """One optimizer step per table and id, with the sum of its gradients in all `gradients`.

        `position` says which batch of this worker they are of: a successor that goes on from there counts it once.
        """
        joined = join_gradients(gradients)
        tables = tuple(
            messages.TableGradient(table=g.bags.table, pooling=g.bags.pooling, learning_rates=g.learning_rates)
            for g in joined
        )
        apply = messages.Apply(
            push=self.next_push(), position=position, tables=tables, step=step, event_time=event_time
        )
        arrays: list[np.ndarray] = []
        for gradient in joined:
            arrays += [gradient.bags.ids, gradient.bags.offsets]
            arrays += [narrowed(float_rows(gradient.values), self.config.wire)]
        self._link.call(Call.APPLY_GRADIENTS, apply.model_dump_json(), arrays)

    def assign(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Set the embeddings of `ids` to `values` [n, dim]."""
        self._write(Call.ASSIGN, table, ids, values, event_time)

    def assign_add(self, table: str, ids: Ids, values: Values, *, event_time: int = 0) -> None:
        """Add `values` [n, dim] to the embeddings of `ids`."""
        self._write(Call.ASSIGN_ADD, table, ids, values, event_time)

    def reinitialize(self, table: str, ids: Ids, *, event_time: int = 0) -> torch.Tensor:
        """Reset value and state of `ids`; int32 [n]: 1 it had a row, 0 it is new."""
        wanted = id_array(ids)
        write = messages.TableWrite(push=self.next_push(), table=table, event_time=event_time)
        frame = self._link.call(Call.REINITIALIZE, write.model_dump_json(), [wanted.reshape(-1)])
        return torch.from_numpy(frame.arrays[0].copy()).reshape(wanted.shape)

    def _write(
        self, call: Literal[Call.ASSIGN, Call.ASSIGN_ADD], table: str, ids: Ids, values: Values, event_time: int
    ) -> None:
        wanted = id_array(ids).reshape(-1)
        rows = row_matrix(values, len(wanted))
        write = messages.TableWrite(push=self.next_push(), table=table, event_time=event_time)
        self._link.call(call, write.model_dump_json(), [wanted, rows])


def float_rows(values: torch.Tensor) -> np.ndarray:
    """Gradients as a float32 array."""
    if values.dtype != torch.float32:
        raise InvalidArgumentError(f"gradients: expected float32, got {values.dtype}; convert with .float()")
    return values.detach().cpu().contiguous().numpy()


def row_matrix(values: Values, count: int) -> np.ndarray:
    """`values` as float32 [count, dim]."""
    array = contiguous(values, "values")
    if array.dtype != np.float32:
        raise InvalidArgumentError(f"values: expected float32, got {array.dtype}; convert with .float()")
    if array.ndim < 2 or array.size != count * array.shape[-1]:
        raise InvalidArgumentError(f"values: expected [{count}, dim], one row per id, got {list(array.shape)}")
    return array.reshape(count, array.shape[-1])
