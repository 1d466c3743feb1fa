"""Danger: rows that come under another id, or from another tensor, or an import that runs what a file says."""

from __future__ import annotations

import json
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from monolith import CorruptFileError, EmbeddingTable, Segment, StorageError, TableConfig
from monolith.cli import main
from monolith.errors import MonolithError, SchemaError
from monolith.features import hash_strings
from monolith.nn.pretrained import import_state_dict, import_tfra, read_state_dict, read_vocabulary
from monolith.table import Constant

CONFIG = TableConfig(name="user", segments=(Segment(dim=3),))
PEERS = Path(__file__).parents[3] / ".venv-bench"
MAX = torch.iinfo(torch.int64).max
BIG = 2**60


def rows_of(table: EmbeddingTable) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for entries in table.iter_batches():
        found.update(zip(entries.ids.tolist(), entries.values.tolist(), strict=True))
    return found


def expected(ids: list[int], weight: Tensor) -> dict[int, list[float]]:
    return dict(zip(ids, weight.float().tolist(), strict=True))


class Model(nn.Module):
    """Two embeddings and a layer, as a user has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.EmbeddingBag(4, 3)
        self.item = nn.Embedding(5, 2)
        self.top = nn.Linear(3, 1)


def test_a_state_dict_becomes_the_table_of_its_name() -> None:
    model = Model()
    assert rows_of(import_state_dict(model.state_dict(), CONFIG)) == expected([0, 1, 2, 3], model.user.weight)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("kind", ["txt", "npy", "json", "object"])
def test_the_command_reads_a_checkpoint_with_its_vocabulary(
    suffix: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, ids = Model(), [7, -1, BIG, 12]
    file, vocabulary = tmp_path / f"model.{suffix}", tmp_path / f"users.{'json' if kind == 'object' else kind}"
    if suffix == "pt":
        torch.save({"epoch": 3, "model": model.state_dict()}, file)
    else:
        save_file(model.state_dict(), file)
    if kind == "npy":
        np.save(vocabulary, np.array(ids))
    else:
        text = {"txt": "\n".join(map(str, ids)), "json": json.dumps(ids)}
        vocabulary.write_text(text.get(kind) or json.dumps({str(key): row for row, key in enumerate(ids)}))
    (tmp_path / "user.yaml").write_text("name: user\nsegments: [{dim: 3}]\n")
    arguments = [str(file), str(tmp_path / "user.table"), "--config", str(tmp_path / "user.yaml")]
    assert main(["import-table", *arguments, "--vocabulary", str(vocabulary), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tables"]["user"]["rows"] == 4
    assert rows_of(EmbeddingTable.load(tmp_path / "user.table")) == expected(ids, model.user.weight)


def test_texts_get_the_ids_that_features_of_texts_have() -> None:
    model, names = Model(), ["anna", "bert", "7", "dora"]
    table = import_state_dict(model.state_dict(), CONFIG, vocabulary=names)
    assert rows_of(table) == expected(hash_strings(names).tolist(), model.user.weight)


def test_a_vocabulary_may_leave_rows_out_such_as_that_of_padding() -> None:
    model = Model()
    table = import_state_dict(model.state_dict(), CONFIG, vocabulary={"10": 1, "30": 3})
    assert rows_of(table) == expected([10, 30], model.user.weight[[1, 3]])


def test_half_precision_becomes_float32() -> None:
    weight = torch.randn(2, 3).bfloat16()
    assert rows_of(import_state_dict({"weight": weight}, CONFIG)) == expected([0, 1], weight)


def torchrec_state(ids: list[int], mapping: list[int]) -> dict[str, Tensor]:
    modules = "_managed_collision_collection._managed_collision_modules.user."
    return {
        "_embedding_module.embedding_bags.item.weight": torch.zeros(9, 2),
        "_embedding_module.embedding_bags.user.weight": torch.arange(12.0).reshape(4, 3),
        f"{modules}_mch_sorted_raw_ids": torch.tensor(ids),
        f"{modules}_mch_remapped_ids_mapping": torch.tensor(mapping),
    }


def test_torchrecs_managed_collisions_say_which_row_an_id_has() -> None:
    state = torchrec_state([5, BIG, MAX, MAX], [2, 0, 1, 3])
    assert rows_of(import_state_dict(state, CONFIG)) == {5: [6, 7, 8], BIG: [0, 1, 2]}


def test_torchrecs_hashed_identities_say_which_id_a_row_has() -> None:
    state = torchrec_state([], [])
    identities = {"x._managed_collision_modules.user._hash_zch_identities": torch.tensor([[-1], [BIG], [-1], [9]])}
    kept = {name: tensor for name, tensor in state.items() if name.endswith("weight")}
    assert rows_of(import_state_dict({**kept, **identities}, CONFIG)) == {BIG: [3, 4, 5], 9: [9, 10, 11]}


class Evil:
    """Runs when an unsafe reader opens the file."""

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("ran"),))


def test_nothing_in_a_file_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Evil()}, "evil.pt")
    with pytest.raises(SchemaError, match=r"evil\.pt: expected a state dict of plain tensors"):
        read_state_dict("evil.pt")
    Path("evil.bin").write_bytes(pickle.dumps(Evil(), protocol=2))
    with pytest.raises(MonolithError, match=r"evil\.bin: "):
        read_state_dict("evil.bin")
    assert not Path("ran").exists()


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "dim": (
        lambda: import_state_dict({"weight": torch.zeros(2, 4)}, CONFIG),
        r"weight: expected floats \[rows, 3\], .* got torch\.float32 \[2, 4\]",
    ),
    "no such": (
        lambda: import_state_dict(Model().state_dict(), CONFIG, weight="usr"),
        "no tensor 'usr'; there are item",
    ),
    "which": (
        lambda: import_state_dict(Model().state_dict(), CONFIG.model_copy(update={"name": "ad"})),
        r"which tensor has the rows of 'ad'\? Expected one of item\.weight, top\.weight, user\.weight",
    ),
    "twice": (
        lambda: import_state_dict(Model().state_dict(), CONFIG, vocabulary=[1, 2, 1, 3]),
        "table 'user': id 1 has several rows, expected one",
    ),
    "too many": (
        lambda: import_state_dict(Model().state_dict(), CONFIG, vocabulary=[1, 2, 3, 4, 5]),
        "vocabulary: expected rows from 0 to 3, got 0 to 4",
    ),
    "nan": (
        lambda: import_state_dict({"weight": torch.tensor([[1, 2, float("nan")]])}, CONFIG, vocabulary=[8]),
        "the row of id 8 is not finite",
    ),
    "a path": (
        lambda: import_state_dict("old.pt", CONFIG),  # type: ignore[arg-type]
        "state: expected tensors by name, got a str; read_state_dict returns those of a file",
    ),
    "shard": (lambda: import_state_dict(torchrec_state([1, 2], [4, 0]), CONFIG), "rows outside of the 4 there are"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(case: str) -> None:
    made, message = BAD[case]
    with pytest.raises(MonolithError, match=message):
        made()


def test_files_that_are_damaged_or_missing_are_refused(tmp_path: Path) -> None:
    torch.save(Model().state_dict(), tmp_path / "model.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "model.pt").read_bytes()[:300])
    (tmp_path / "cut.safetensors").write_bytes(b"\x09\0\0\0\0\0\0\0{}")
    for name in ("cut.pt", "cut.safetensors"):
        with pytest.raises(CorruptFileError, match=name):
            read_state_dict(tmp_path / name)
    with pytest.raises(StorageError, match=r"none\.pt: cannot read"):
        read_state_dict(tmp_path / "none.pt")
    (tmp_path / "users.json").write_text('{"a": "b"}')
    with pytest.raises(SchemaError, match="expected a list of ids, or an object from id to row"):
        read_vocabulary(tmp_path / "users.json")


def write_tfra(folder: Path, name: str, ids: list[int], values: np.ndarray) -> None:
    (folder / f"{name}-keys").write_bytes(np.array(ids, "<i8").tobytes())
    (folder / f"{name}-values").write_bytes(values.astype("<f4").tobytes())


def test_the_parts_of_a_table_of_tfra_become_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = np.arange(12.0).reshape(4, 3)
    write_tfra(tmp_path, "user_mht_1of2_rank0_size1", [5, -7], values[:2])
    write_tfra(tmp_path, "user_mht_2of2_rank0_size1", [BIG, 12], values[2:])
    rows = dict(zip([5, -7, BIG, 12], values.tolist(), strict=True))
    assert rows_of(import_tfra(tmp_path, CONFIG)) == rows
    write_tfra(tmp_path, "other", [1], np.zeros((1, 3)))
    with pytest.raises(SchemaError, match="has the tables other, user; say which one"):
        import_tfra(tmp_path, CONFIG)
    (tmp_path / "user.yaml").write_text("name: user\nsegments: [{dim: 3}]\n")
    arguments = [str(tmp_path / "user"), str(tmp_path / "user.table"), "--config", str(tmp_path / "user.yaml")]
    assert main(["import-table", *arguments]) == 0
    assert rows_of(EmbeddingTable.load(tmp_path / "user.table")) == rows
    assert main(["import-table", *arguments, "--weight", "x"]) == 2
    assert "only for a state dict" in capsys.readouterr().err


def test_cut_files_of_tfra_are_refused(tmp_path: Path) -> None:
    write_tfra(tmp_path, "user", [1, 2], np.zeros((2, 2)))
    with pytest.raises(SchemaError, match="expected 2 rows of 3 float32, 24 bytes, got 16 bytes"):
        import_tfra(tmp_path / "user", CONFIG)
    (tmp_path / "user-keys").write_bytes(b"1234567")
    with pytest.raises(CorruptFileError, match="user-keys: expected int64 keys, got 7 bytes"):
        import_tfra(tmp_path / "user", CONFIG)


def by_peer(peer: str, script: str, folder: Path) -> None:
    """Run a script in the environment of a peer, as `benchmarks/setup_peers.sh` installs it."""
    python = PEERS / peer / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{peer} is not installed: benchmarks/setup_peers.sh {peer}")
    subprocess.run([python, "-c", script, folder], check=True, capture_output=True, timeout=600)


TORCHREC = """
import sys, torch, json
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, ManagedCollisionCollection, MCHManagedCollisionModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
torch.manual_seed(0)
device, folder = torch.device("cpu"), sys.argv[1]
config = EmbeddingBagConfig(name="user", embedding_dim=3, num_embeddings=8, feature_names=["u"])
bags = EmbeddingBagCollection(tables=[config], device=device)
torch.save(bags.state_dict(), f"{folder}/plain.pt")
lfu = DistanceLFU_EvictionPolicy()
module = MCHManagedCollisionModule(zch_size=8, device=device, eviction_policy=lfu, eviction_interval=1, input_hash_size=2**62)
model = ManagedCollisionEmbeddingBagCollection(
    EmbeddingBagCollection(tables=[config], device=device), ManagedCollisionCollection({"user": module}, [config]))
ids = torch.tensor([5, 2**60, 77, 12])
lookup = lambda: model(KeyedJaggedTensor(keys=["u"], values=ids, lengths=torch.ones(4, dtype=torch.int64)))[0]
for _ in range(4):
    model.train()
    lookup()
model.eval()
torch.save(model.state_dict(), f"{folder}/zch.pt")
torch.save({"ids": ids, "values": lookup()["u"].detach()}, f"{folder}/expected.pt")
"""


def test_a_state_dict_of_torchrec_itself(tmp_path: Path) -> None:
    by_peer("torchrec", TORCHREC, tmp_path)
    plain = read_state_dict(tmp_path / "plain.pt")
    assert rows_of(import_state_dict(plain, CONFIG)) == expected(list(range(8)), plain["embedding_bags.user.weight"])
    answer = read_state_dict(tmp_path / "expected.pt")
    rows = rows_of(import_state_dict(read_state_dict(tmp_path / "zch.pt"), CONFIG))
    assert rows == expected(answer["ids"].tolist(), answer["values"])


TFRA = """
import os, sys
os.environ["TF_USE_LEGACY_KERAS"] = "1"
import numpy as np, tensorflow as tf
from tensorflow_recommenders_addons import dynamic_embedding as de
creator = de.CuckooHashTableCreator(saver=de.FileSystemSaver())
user = de.get_variable("user", key_dtype=tf.int64, value_dtype=tf.float32, dim=3, devices=["/CPU:0"] * 2, kv_creator=creator)
user.upsert(tf.constant([5, -7, 2**60, 12], tf.int64), tf.reshape(tf.range(12.0), [4, 3]))
user.save_to_file_system(sys.argv[1], proc_size=1, proc_rank=0)
"""


def test_a_table_that_tfra_itself_saved(tmp_path: Path) -> None:
    by_peer("tfra", TFRA, tmp_path)
    rows = dict(zip([5, -7, BIG, 12], np.arange(12.0).reshape(4, 3).tolist(), strict=True))
    assert rows_of(import_tfra(tmp_path, CONFIG)) == rows


def with_bias(initial: float) -> TableConfig:
    return TableConfig(name="user", segments=(Segment(dim=1, initializer=Constant(value=initial)), Segment(dim=3)))


def test_rows_without_a_bias_begin_with_its_initial_value(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    wanted = {7: [0.5, 0.0, 1.0, 2.0], 9: [0.5, 3.0, 4.0, 5.0]}
    table = import_state_dict({"weight": weight}, with_bias(0.5), vocabulary=[7, 9])
    assert rows_of(table) == wanted
    write_tfra(tmp_path, "user", [7, 9], weight.numpy())
    assert rows_of(import_tfra(tmp_path, with_bias(0.5))) == wanted
    with pytest.raises(SchemaError, match=r"floats \[rows, 4\] or \[rows, 3\], .* without the bias"):
        import_state_dict({"weight": torch.zeros(2, 2)}, with_bias(0.5))


def test_the_command_names_its_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(Model().state_dict(), tmp_path / "model.pt")
    (tmp_path / "ad.yaml").write_text("name: ad\nsegments:\n- dim: 3\n")
    command = ["import-table", f"{tmp_path}/model.pt", f"{tmp_path}/ad.table", "--config", f"{tmp_path}/ad.yaml"]
    assert main(command) == 2
    assert "error: --weight: which tensor has the rows of 'ad'?" in capsys.readouterr().err
