"""What a server reads of a checkpoint before it puts anything in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.ps.protocol.ownership import mask_of
from monolith.ps.protocol.saving_messages import Restore
from monolith.ps.server.ledger_state import forget_progress, put_progress, read_base_step, read_ledger
from monolith.ps.server.state import ServerState, source_of
from monolith.state.checkpoint_folder import part_paths, read_state
from monolith.state.in_use import in_use
from monolith.state.manifest import read_manifest
from monolith.state.paths import base_name
from monolith.state.restore import prepare_tables
from monolith.state_bytes import State
from monolith.table.buckets import NUM_BUCKETS

__all__ = ["prepare_server", "require_settled"]


def prepare_server(state: ServerState, restore: Restore) -> Callable[[], None]:
    """Read and check what `state` gets of a checkpoint; calling the answer, with the gate closed, puts it in place.

    Rows are those of the buckets the server owns, from whichever parts have them. Dense parameters are all there are, since
    nobody knows yet which of them workers will ask this server for. How far each worker is in a bucket or parameter is what the
    part that it comes from says. What the server owns stays as it is.
    """
    require_settled(state)
    ranges = state.ranges()
    with in_use(restore.path):
        manifest = read_manifest(restore.path)
        _, put_in_place = prepare_tables(
            restore.path,
            state.tables.all(),
            ranges=ranges,
            aliases=restore.aliases,
            allow_new_tables=restore.allow_new_tables,
            allow_new_segments=restore.allow_new_segments,
            reset_admission=restore.reset_admission,
        )
        parts = {path: read_state(path) for path in part_paths(manifest, restore.path)}
        buckets = {path: _mask(read_manifest(path).buckets) & _mask(ranges) for path in parts}
    dense = {path: _parameters(path, part) for path, part in parts.items()}
    put_dense = None
    if parts and not restore.clear_nn:
        put_dense = state.dense.prepare_state(*dense.values(), elsewhere=True)
    texts = {path: str(source_of(part, path).get("ledger")) for path, part in parts.items()}
    ledgers = {path: read_ledger(text, path) for path, text in texts.items()}
    said = (read_base_step(text, path) for path, text in texts.items())
    base_step = next((base for base in said if base is not None), None)
    trained = _trained_in(dense)

    def apply() -> None:
        if state.ranges() != ranges:
            raise InvalidArgumentError("restore: the server's buckets have changed since it was prepared; begin again")
        put_in_place()
        if put_dense is not None:
            put_dense()
        if parts:
            forget_progress(state.pushes)
            for path, ledger in ledgers.items():
                put_progress(state.pushes, ledger, buckets=buckets[path], names=trained[path])
        if base_step is None:
            state.pushes.count_from(manifest.step)
        else:
            state.pushes.base_step = base_step
        state.initialised, state.step, state.checkpoint = True, manifest.step, base_name(restore.path)

    return apply


def require_settled(state: ServerState) -> None:
    """Raise while rows are on their way to another server: they would come back after the restore, on one of the two."""
    if state.moving():
        raise InvalidArgumentError("restore: buckets of the server are being moved; try again when the move has ended")


def _mask(ranges: Iterable[range] | Iterable[tuple[int, int]] | None) -> np.ndarray:
    """bool [NUM_BUCKETS]: which buckets are in `ranges`. None: all of them."""
    if ranges is None:
        return np.ones(NUM_BUCKETS, dtype=np.bool_)
    return mask_of((one.start, one.stop) if isinstance(one, range) else one for one in ranges)


def _trained_in(parts: Mapping[str, Mapping[str, State]]) -> dict[str, set[str]]:
    """The dense parameters that `DenseParameters.load_state` takes from each part: from the one that trained them."""
    origin: dict[str, tuple[str, bool]] = {}
    for path, parameters in parts.items():
        for name, saved in parameters.items():
            if name not in origin or not origin[name][1]:
                origin[name] = path, isinstance(saved, dict) and saved.get("declared") is True
    return {path: {name for name, (of, _) in origin.items() if of == path} for path in parts}


def _parameters(path: str, part: Mapping[str, State]) -> Mapping[str, State]:
    parameters = part.get("parameters")
    if not isinstance(parameters, dict):
        raise CorruptFileError(f"{path}: expected the state of a parameter server")
    return parameters
