"""Rows trained elsewhere: state dicts of `nn.EmbeddingBag` and TorchRec, and saved tables of TFRA, as tables.

Weights alone are taken: optimizers keep their state in forms of their own, so rows start with fresh state. Nothing that a file
says is executed: `torch.load` is used with `weights_only=True`.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from monolith.errors import CorruptFileError, InvalidArgumentError, SchemaError, StorageError
from monolith.features import hash_strings
from monolith.table import EmbeddingTable, TableConfig
from monolith.table.exchange import RowColumns, fresh_slots, insert

__all__ = ["has_tfra", "import_state_dict", "import_tfra", "read_state_dict", "read_vocabulary"]

_BATCH = 65536
_NO_ID = torch.iinfo(torch.int64).max  # of a row that TorchRec has given to no id
_ZCH = re.compile(r"(?:^|\.)(?P<table>[^.]+)\.(?P<kind>_mch_sorted_raw_ids|_hash_zch_identities)$")
_TFRA_PART = re.compile(r"(?P<table>.+)_mht_\d+of(?P<parts>\d+)(_rank\d+_size\d+)?-keys")


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors file, or of one that `torch.save` wrote, by name. Names of dicts in dicts are joined
    by points.

    Raises `SchemaError` for a file that holds anything but tensors, numbers and texts.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"model": torch.nn.Embedding(3, 2).state_dict()}, f"{folder}/model.pt")
        ...     list(read_state_dict(f"{folder}/model.pt"))
        ['model.weight']
    """
    try:
        if str(path).endswith(".safetensors"):
            return load_file(path)
        return _flat(torch.load(path, map_location="cpu", weights_only=True))
    except pickle.UnpicklingError as error:
        raise SchemaError(
            f"{path}: expected a state dict of plain tensors, as torch.save(model.state_dict(), ...) writes it. Gather sharded "
            f"tensors first, and convert checkpoints of torch.distributed with its dcp_to_torch_save. {_first_line(error)}"
        ) from None
    except OSError as error:
        raise StorageError(f"{path}: cannot read: {error.strerror or error}") from error
    except (RuntimeError, EOFError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise CorruptFileError(f"{path}: damaged, or no state dict: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _flat(tree: object, prefix: str = "") -> dict[str, Tensor]:
    if isinstance(tree, Tensor):
        return {prefix: tree}
    if not isinstance(tree, Mapping):
        return {}
    flat: dict[str, Tensor] = {}
    for name, branch in tree.items():
        flat.update(_flat(branch, f"{prefix}.{name}" if prefix else str(name)))
    return flat


def import_state_dict(
    state: Mapping[str, Tensor],
    config: TableConfig,
    *,
    weight: str | None = None,
    vocabulary: Sequence[int] | Sequence[str] | Mapping[str, int] | None = None,
) -> EmbeddingTable:
    """Return a table with the rows of one embedding in `state`.

    The id of a row is the first of these that there is:

    - what `vocabulary` says: one id per row, or a mapping from id to row. Texts are hashed by `monolith.features.hash_strings`.
    - what TorchRec's managed collision module of the table says. Rows without an id are left out.
    - the tensor `ids` next to a tensor `values`, as `export_safetensors` writes them.
    - the number of the row.

    Args:
        state: tensors by name, as `read_state_dict` returns them. More than the embedding may be in it.
        config: the table, of the same dim. If its first segment has dim 1, the bias of a `Feature`, rows may come without it:
            their biases have their initial values.
        weight: name of the embedding's tensor, [rows, dim]. None takes `...<name of the table>.weight`, or the only embedding.
        vocabulary: the ids.

    Example:
        >>> from monolith import Segment
        >>> embedding = torch.nn.EmbeddingBag(2, 3)
        >>> config = TableConfig(name="user", segments=(Segment(dim=3),))
        >>> table = import_state_dict(embedding.state_dict(), config, vocabulary=[700, 2**60])
        >>> torch.equal(table.lookup([2**60])[0], embedding.weight[1])
        True
    """
    if not isinstance(state, Mapping):
        raise InvalidArgumentError(
            f"state: expected tensors by name, got a {type(state).__name__}; read_state_dict returns those of a file"
        )
    name = _weight_name(state, config) if weight is None else weight
    if name not in state:
        raise SchemaError(f"weight: there is no tensor {name!r}; there are {', '.join(sorted(state)) or 'none'}")
    rows = state[name].detach().cpu()
    widths = _widths(config)
    if rows.ndim != 2 or not rows.is_floating_point() or rows.shape[1] not in widths:
        expected = " or ".join(f"[rows, {width}]" for width in widths)
        without = ", its vector without the bias" if len(widths) > 1 else ""
        raise SchemaError(
            f"{name}: expected floats {expected}, as table {config.name!r} has dim {config.dim}{without}, got {rows.dtype} "
            f"{list(rows.shape)}"
        )
    if vocabulary is not None:
        ids, places = _from_vocabulary(vocabulary, len(rows))
    elif (identities := _zch_name(state, config)) is not None:
        ids, places = _from_zch(state, identities, len(rows))
    elif name == "values" and "ids" in state:
        ids, places = state["ids"].numpy(), np.arange(len(state["ids"]))
    else:
        ids = places = np.arange(len(rows))
    return _table(config, ids, places, rows)


def _widths(config: TableConfig) -> tuple[int, ...]:
    """Return how many numbers a row may have: all, or those of the vector after a bias."""
    has_bias = len(config.segments) > 1 and config.segments[0].dim == 1
    return (config.dim, config.dim - 1) if has_bias else (config.dim,)


def _weight_name(state: Mapping[str, Tensor], config: TableConfig) -> str:
    if {"ids", "values"} <= set(state):
        return "values"
    found = [
        name for name, tensor in state.items() if tensor.ndim == 2 and re.search(r"(^|[._])weight(s|_\d+)?$", name)
    ]
    own = [name for name in found if f".{name}".endswith(f".{config.name}.weight")]
    chosen = (
        own
        or [name for name in found if re.search(r"(^|\.)(embedding_bags|embeddings)\.[^.]+\.weight$", name)]
        or found
    )
    if len(chosen) != 1:
        raise SchemaError(
            f"weight: which tensor has the rows of {config.name!r}? Expected one of {', '.join(sorted(chosen or state))}"
        )
    return chosen[0]


def _zch_name(state: Mapping[str, Tensor], config: TableConfig) -> str | None:
    found = {name: match["table"] for name in state if (match := _ZCH.search(name))}
    own = [name for name, table in found.items() if table == config.name]
    if not own and len(found) > 1:
        raise SchemaError(
            f"table {config.name!r}: managed collision modules belong to {', '.join(sorted(found.values()))}; "
            "give the table one of these names"
        )
    return next(iter(own or found), None)


def _from_zch(state: Mapping[str, Tensor], name: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
    ids = state[name].reshape(-1)
    if name.endswith("_hash_zch_identities"):
        places, held = torch.arange(len(ids)), ids != -1
    else:
        mapping = name.replace("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping")
        if mapping not in state:
            raise SchemaError(f"{name}: without {mapping!r} nobody knows which row an id has")
        places, held = state[mapping].reshape(-1), ids != _NO_ID
    if len(places) != len(ids) or bool(((places < 0) | (places >= rows))[held].any()):
        raise SchemaError(f"{name}: its ids have rows outside of the {rows} there are; gather the shards first")
    return ids[held].numpy(), places[held].numpy()


def _from_vocabulary(
    vocabulary: Sequence[int] | Sequence[str] | Mapping[str, int], rows: int
) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(vocabulary, Mapping):
        keys: Sequence[int] | Sequence[str] = _numbers_or_texts(list(vocabulary))
        places = np.array(list(vocabulary.values()))
    else:
        keys, places = vocabulary, np.arange(len(vocabulary))
    if len(places) and (places.dtype.kind != "i" or places.min() < 0 or places.max() >= rows):
        raise SchemaError(f"vocabulary: expected rows from 0 to {rows - 1}, got {places.min()} to {places.max()}")
    if any(isinstance(key, str) for key in keys):
        ids = hash_strings([str(key) for key in keys]).numpy()
    else:
        ids = np.array(keys, np.int64)
    return ids, places


def _numbers_or_texts(keys: list[str]) -> list[int] | list[str]:
    """Return ids in decimal as numbers, if all are."""
    return [int(key) for key in keys] if all(re.fullmatch(r"-?\d{1,19}", key) for key in keys) else keys


def read_vocabulary(path: str | Path) -> Sequence[int] | Sequence[str] | Mapping[str, int]:
    """Return the ids of rows from a file: .npy with int64, .json with a list or an object from id to row, otherwise text with
    one id per line. Ids that are all decimal numbers are numbers.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "users.txt").write_text("anna\\nbert\\n")
        ...     read_vocabulary(f"{folder}/users.txt")
        ['anna', 'bert']
    """
    try:
        if str(path).endswith(".npy"):
            array = np.load(path, allow_pickle=False)
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise SchemaError(f"{path}: expected integers [rows], got {array.dtype} {list(array.shape)}")
            return [int(number) for number in array]
        text = Path(path).read_text()
        if not str(path).endswith(".json"):
            return _numbers_or_texts(text.splitlines())
        tree = json.loads(text)
    except OSError as error:
        raise StorageError(f"{path}: cannot read: {error.strerror or error}") from error
    except ValueError as error:
        raise SchemaError(f"{path}: is no vocabulary: {_first_line(error)}") from None
    plain = int | str
    if isinstance(tree, list) and all(isinstance(key, plain) and not isinstance(key, bool) for key in tree):
        return _numbers_or_texts([str(key) for key in tree])
    if isinstance(tree, dict) and all(isinstance(row, int) and not isinstance(row, bool) for row in tree.values()):
        return tree
    raise SchemaError(f"{path}: expected a list of ids, or an object from id to row")


def has_tfra(source: str | Path) -> bool:
    """Return whether `source` is a folder with saved tables of TFRA, or the path of one without `-keys`.

    Example:
        >>> has_tfra("no/such/path")
        False
    """
    return bool(_tfra_parts(source))


def _tfra_parts(source: str | Path) -> list[Path]:
    path = Path(source)
    if path.is_dir():
        return sorted(path.glob("*-keys"))
    one = path.with_name(f"{path.name}-keys")
    return [one] if one.is_file() else sorted(path.parent.glob(f"{path.name}_mht_*of*-keys"))


def import_tfra(source: str | Path, config: TableConfig) -> EmbeddingTable:
    """Return a table with the rows of a `tfra.dynamic_embedding` variable, as `save_to_file_system` wrote them.

    Each part of the table is a file of int64 keys that ends in `-keys`, and one of float32 values that ends in `-values`.

    Args:
        source: the folder, if it has one variable, or the path of the variable's files up to `_mht_` or `-keys`.
        config: the table, of the same dim, or with a bias before it, as in `import_state_dict`.

    Raises `SchemaError` for files that do not fit the table or each other, `CorruptFileError` for a cut file.
    """
    parts = _tfra_parts(source)
    if not parts:
        raise StorageError(f"{source}: there are no files of TFRA, <name>-keys and <name>-values")
    matches = [_TFRA_PART.fullmatch(part.name) for part in parts]
    names = {
        match["table"] if match else part.name.removesuffix("-keys") for match, part in zip(matches, parts, strict=True)
    }
    if len(names) > 1:
        raise SchemaError(f"{source}: has the tables {', '.join(sorted(names))}; say which one")
    ids, values = zip(*(_tfra_part(part, config) for part in parts), strict=True)
    return _table(config, np.concatenate(ids), np.arange(sum(map(len, ids))), torch.from_numpy(np.concatenate(values)))


def _tfra_part(keys: Path, config: TableConfig) -> tuple[np.ndarray, np.ndarray]:
    values = keys.with_name(f"{keys.name.removesuffix('-keys')}-values")
    try:
        raw_ids, raw_values = keys.read_bytes(), values.read_bytes()
    except OSError as error:
        raise StorageError(f"{error.filename}: cannot read: {error.strerror}") from error
    if len(raw_ids) % 8:
        raise CorruptFileError(f"{keys}: expected int64 keys, got {len(raw_ids)} bytes; the file was cut")
    rows = len(raw_ids) // 8
    width = next((width for width in _widths(config) if len(raw_values) == rows * width * 4), None)
    if width is None:
        raise SchemaError(
            f"{values}: expected {rows} rows of {config.dim} float32, {rows * config.dim * 4} bytes, got "
            f"{len(raw_values)} bytes; check the dim of the table, and that no file was cut"
        )
    return np.frombuffer(raw_ids, "<i8"), np.frombuffer(raw_values, "<f4").reshape(rows, width)


def _table(config: TableConfig, ids: np.ndarray, places: np.ndarray, rows: Tensor) -> EmbeddingTable:
    """Return a table in which `ids` have the rows of `places`."""
    unique, counts = np.unique(ids, return_counts=True)
    if len(unique) < len(ids):
        raise SchemaError(f"table {config.name!r}: id {unique[counts > 1][0]} has several rows, expected one")
    wrong = ~rows[torch.from_numpy(places)].isfinite().all(1)
    if bool(wrong.any()):
        raise InvalidArgumentError(f"table {config.name!r}: the row of id {ids[wrong.numpy()][0]} is not finite")
    table, fresh = EmbeddingTable(config), fresh_slots(config)
    for begin in range(0, len(ids), _BATCH):
        some = ids[begin : begin + _BATCH]
        values = rows[torch.from_numpy(places[begin : begin + _BATCH])].float().numpy()
        if values.shape[1] < config.dim:
            bias = table.lookup(some)[:, :1].numpy()  # nothing is inserted yet, so it is the initial value
            values = np.concatenate([bias, values], axis=1)
        slots = {name: np.repeat(row, len(some), axis=0) for name, row in fresh.items()}
        times = np.zeros(len(some), np.int64)
        insert(table, RowColumns(ids=some.astype(np.int64), times=times, values=values, slots=slots))
    return table
