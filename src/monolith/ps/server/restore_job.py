"""What a server reads of a checkpoint before it puts anything in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from monolith.checkpoint.checkpoint_folder import part_paths, read_state
from monolith.checkpoint.in_use import in_use
from monolith.checkpoint.manifest import Manifest, read_manifest
from monolith.checkpoint.restore import prepare_tables
from monolith.errors import CorruptFileError, InvalidArgumentError
from monolith.ps.saving_messages import Restore
from monolith.ps.server.ledger_state import restore_positions
from monolith.ps.server.state import ServerState, source_of
from monolith.state_bytes import State

__all__ = ["prepare_server", "require_settled"]


def prepare_server(state: ServerState, restore: Restore) -> Callable[[], None]:
    """Read and check what `state` gets of a checkpoint; calling the answer, with the gate closed, puts it in place.

    Rows are those of the buckets the server owns, from whichever parts have them. Dense parameters are all there are, since
    nobody knows yet which of them workers will ask this server for. What the server owns stays as it is.
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
        mine = [path for path in parts if _has_some(read_manifest(path), ranges)]
    dense = [_parameters(path, part) for path, part in parts.items()]
    ledgers = {path: str(source_of(part, path).get("ledger")) for path, part in parts.items()}

    def apply() -> None:
        if state.ranges() != ranges:
            raise InvalidArgumentError("restore: the server's buckets have changed since it was prepared; begin again")
        put_in_place()
        if parts:
            state.dense.load_state(*dense, elsewhere=True)
            others = [ledgers[path] for path in parts if path not in mine]
            restore_positions(state.pushes, [ledgers[path] for path in mine], others, restore.path)
        state.initialised, state.step = True, manifest.step

    return apply


def require_settled(state: ServerState) -> None:
    """Raise while rows are on their way to another server: they would come back after the restore, on one of the two."""
    if state.moving():
        raise InvalidArgumentError("restore: buckets of the server are being moved; try again when the move has ended")


def _has_some(part: Manifest, ranges: Sequence[range] | None) -> bool:
    if part.buckets is None or ranges is None:
        return True
    return any(first < other.stop and other.start < end for first, end in part.buckets for other in ranges)


def _parameters(path: str, part: Mapping[str, State]) -> Mapping[str, State]:
    parameters = part.get("parameters")
    if not isinstance(parameters, dict):
        raise CorruptFileError(f"{path}: expected the state of a parameter server")
    return parameters
