"""Columns and slots of the original's older interface: which slices of which columns a model looks up, and their rows.

The first call of a model's logits finds out what they look up. That becomes features of an `EmbeddingBagCollection`, one table
per slot and slice, and further calls get their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from monolith.config import Finite
from monolith.errors import ConfigError, InvalidArgumentError
from monolith.features import Feature, Ragged
from monolith.features.batch import Batch, BatchColumn, column_of
from monolith.features.feature import RateFunction
from monolith.original.tasks import TaskParams
from monolith.table import Adagrad, Ftrl, Segment
from monolith.table.initializers import Initializer, RandomUniform, Zeros
from monolith.table.optimizers import Optimizer

__all__ = ["EmbeddingTaskParams", "Env", "FeatureColumn3D", "FeatureColumnV1", "FeatureSlice", "FeatureSlot"]

_Count = Annotated[int, Field(ge=1)]

BIAS_OPTIMIZER, BIAS_INITIALIZER = Ftrl(learning_rate=0.01), Zeros()
VECTOR_OPTIMIZER, VECTOR_INITIALIZER = Adagrad(learning_rate=0.01), RandomUniform(low=-0.001, high=0.001)


class EmbeddingTaskParams(TaskParams):
    """The parameters of a `BaseEmbeddingTask`."""

    config_group: ClassVar[str] = "run"

    vocab_file_path: str | None = None
    """File with a line `slot<TAB>size` for each slot. Lines that do not begin with a number are left out."""
    vocab_size_per_slot: _Count | None = None
    """One vocabulary size for all slots, instead of those of the file. Ids are taken modulo it."""
    custom_vocab_size_mapping: dict[int, _Count] = {}
    """Vocabulary sizes of some slots, instead of those of the file. Their ids are taken modulo them."""
    vocab_size_offset: int = 0
    """Added to every vocabulary size."""
    qr_multi_hashing: bool = False
    """Embed the ids of large vocabularies as the sum of two rows: of the remainder and of the quotient of the id."""
    qr_hashing_threshold: _Count = 100_000_000
    """Vocabulary size above which a slot is large."""
    qr_collision_rate: _Count = 4
    """How many times smaller the table of remainders is than the vocabulary."""
    use_random_init_embedding_for_oov: bool = False
    """Replace vectors of zeros by random ones, where a lookup gives their range."""
    merge_vector: bool = False
    """Keep all slices of a slot but the bias in one table."""
    gradient_multiplier: Finite = 1.0
    """Factor of the gradients of all embeddings."""
    enable_deepinsight: bool = False
    """Append predictions of a sample of examples to files in the folder `deep_insight` of the model_dir."""
    enable_host_call_scalar_metrics: bool = False
    """Summarise loss, labels, learning rate, and what the model records, besides the AUC."""
    enable_host_call_norm_metrics: bool = False
    """Summarise the norm of the gradients too."""
    enable_caching_with_tpu_var_mode: bool = False
    """Sample the rows of all steps for the AUC, and not only those of steps with a host call."""
    top_k_sampling_num_per_core: _Count = 6
    """Rows of each step that are sampled for the AUC."""
    files_interleave_cycle_length: _Count = 4
    """Unused: files are read one after the other, so that a run is reproducible and can be resumed."""
    deterministic: bool = False
    """Unused: reading is always deterministic."""


class FeatureSlice:
    """A part of the embedding of a slot, with its own optimizer and initializer. Made by `FeatureSlot.add_feature_slice`."""

    def __init__(
        self, feature_slot: FeatureSlot, slice_index: int, segment: Segment, learning_rate_fn: RateFunction | None
    ) -> None:
        self.feature_slot, self.slice_index, self.segment = feature_slot, slice_index, segment
        self.learning_rate_fn = learning_rate_fn

    @property
    def dim(self) -> int:
        """Elements of a vector."""
        return self.segment.dim

    def __repr__(self) -> str:
        return f"[FeatureSlice][slot_{self.feature_slot.slot_id}][{self.slice_index}]"


class FeatureSlot:
    """Ids of one meaning, and the slices of their embeddings. A bias is slice 0, of one element.

    Example:
        >>> env = Env({5: 100}, EmbeddingTaskParams(task=object))
        >>> slot = FeatureSlot(env, 5, has_bias=True)
        >>> slot.add_feature_slice(8)
        [FeatureSlice][slot_5][1]
    """

    def __init__(
        self,
        env: Env,
        slot_id: int,
        has_bias: bool = False,
        bias_optimizer: Optimizer = BIAS_OPTIMIZER,
        bias_initializer: Initializer = BIAS_INITIALIZER,
        bias_learning_rate_fn: RateFunction | None = None,
        default_vec_optimizer: Optimizer = VECTOR_OPTIMIZER,
        default_vec_initializer: Initializer = VECTOR_INITIALIZER,
        default_vec_learning_rate_fn: RateFunction | None = None,
        occurrence_threshold: int | None = None,
        expire_time: int | None = None,
    ) -> None:
        self.env, self.slot_id, self.has_bias = env, slot_id, has_bias
        self.occurrence_threshold, self.expire_time = occurrence_threshold, expire_time
        self._default = (default_vec_optimizer, default_vec_initializer, default_vec_learning_rate_fn)
        self.feature_slices: list[FeatureSlice] = []
        self.feature_columns: list[FeatureColumnV1] = []
        if has_bias:
            self.add_feature_slice(1, bias_optimizer, bias_initializer, bias_learning_rate_fn)
        env.set_feature_slot(slot_id, self)

    def add_feature_slice(
        self,
        dim: int,
        optimizer: Optimizer | None = None,
        initializer: Initializer | None = None,
        learning_rate_fn: RateFunction | None = None,
    ) -> FeatureSlice:
        """Return a new slice of `dim` elements. What is not given is the slot's default."""
        default_optimizer, default_initializer, default_rate = self._default
        segment = Segment(
            dim=dim, optimizer=optimizer or default_optimizer, initializer=initializer or default_initializer
        )
        made = FeatureSlice(self, len(self.feature_slices), segment, learning_rate_fn or default_rate)
        self.feature_slices.append(made)
        return made


class FeatureColumnV1:
    """A column of a batch with ids of one slot. Its lookups give the sum of the vectors of a row's ids."""

    max_seq_length: int | None = None
    """Ids of each row whose vectors are kept in order. None: they are summed."""

    def __init__(self, feature_slot: FeatureSlot, fc_name: str) -> None:
        self.feature_slot, self.fc_name = feature_slot, fc_name
        feature_slot.feature_columns.append(self)

    @property
    def env(self) -> Env:
        """Where the rows come from."""
        return self.feature_slot.env

    def embedding_lookup(
        self,
        feature_slice: FeatureSlice,
        init_minval_for_oov: float | None = None,
        init_maxval_for_oov: float | None = None,
    ) -> Tensor:
        """Return the vectors of one slice: [rows, dim]."""
        return self.env.lookup(self, feature_slice, init_minval_for_oov, init_maxval_for_oov)

    def get_bias(self) -> Tensor:
        """Return the bias: [rows, 1]."""
        if not self.feature_slot.has_bias:
            raise InvalidArgumentError(
                f"{self.fc_name}: slot {self.feature_slot.slot_id} has no bias; set has_bias=True"
            )
        return self.embedding_lookup(self.feature_slot.feature_slices[0])


class FeatureColumn3D(FeatureColumnV1):
    """A column whose lookups give the vectors of the first `max_seq_length` ids of a row: [rows, max_seq_length, dim]."""

    def __init__(self, feature_slot: FeatureSlot, max_seq_length: int, fc_name: str) -> None:
        super().__init__(feature_slot, fc_name)
        self.max_seq_length = max_seq_length

    def size_tensor_lookup(self) -> Tensor:
        """Return int32 [rows, max_seq_length]: 1 where a row has an id, otherwise 0."""
        return self.env.sizes(self)


class Env:
    """The slots of a task, the lookups that its logits are made of, and their results for the present batch."""

    def __init__(self, vocab_size_dict: Mapping[int, int], params: EmbeddingTaskParams) -> None:
        self.vocab_size_dict, self._params = dict(vocab_size_dict), params
        self.slot_id_to_feature_slot: dict[int, FeatureSlot] = {}
        self.is_finalized = False
        self._used: dict[tuple[str, int], tuple[FeatureColumnV1, FeatureSlice]] = {}
        self._features: Batch | None = None

    def set_feature_slot(self, slot_id: int, feature_slot: FeatureSlot) -> None:
        """Take a slot. Once the lookups are known, logits may make their slots again."""
        if self.is_finalized:
            return
        if slot_id in self.slot_id_to_feature_slot:
            raise ConfigError(f"slot {slot_id}: there is one with this number; add columns and slices to that")
        if slot_id not in self.vocab_size_dict:
            known = ", ".join(map(str, sorted(self.vocab_size_dict))) or "none"
            raise ConfigError(f"slot {slot_id}: the file of vocabulary sizes does not have it; it has {known}")
        self.slot_id_to_feature_slot[slot_id] = feature_slot

    def finalize(self) -> None:
        """Allow no further lookups."""
        if self.is_finalized:
            raise ConfigError("Env: its lookups are known already; make a new task for another model")
        self.is_finalized = True

    def set_tpu_features(self, features: Batch | None) -> None:
        """Use these results of `EmbeddingBagCollection` from now on. None: there is no batch."""
        self._features = features

    def lookup(
        self, column: FeatureColumnV1, feature_slice: FeatureSlice, minval: float | None, maxval: float | None
    ) -> Tensor:
        """Return the vectors of one slice of a column, or, before the lookups are known, zeros for one row."""
        if column.feature_slot.slot_id != feature_slice.feature_slot.slot_id:
            raise ConfigError(f"{column.fc_name}: {feature_slice} is not a slice of slot {column.feature_slot.slot_id}")
        if not self.is_finalized:
            self._used.setdefault((column.fc_name, feature_slice.slice_index), (column, feature_slice))
            length = () if column.max_seq_length is None else (column.max_seq_length,)
            return torch.zeros(1, *length, feature_slice.dim)
        found = self._vectors(column, feature_slice)
        if not self._params.use_random_init_embedding_for_oov or minval is None or maxval is None:
            return found
        is_zero = found.norm(dim=-1, keepdim=True) < 1e-10
        return torch.where(is_zero, torch.empty_like(found).uniform_(minval, maxval), found)

    def _vectors(self, column: FeatureColumnV1, feature_slice: FeatureSlice) -> Tensor:
        if self._features is None:
            raise InvalidArgumentError(
                f"{column.fc_name}: looked up outside of a batch; call logits_fn through the model"
            )
        slices, index = self._row_of(feature_slice)
        name = _feature_name(column, index)
        is_large = self.is_large(column.feature_slot.slot_id)
        row = self._tensor(f"{name}_0") + self._tensor(f"{name}_1") if is_large else self._tensor(name)
        if len(slices) == 1:
            return row
        begin = sum(other.dim for other in slices if other.slice_index < feature_slice.slice_index)
        return row[..., begin : begin + feature_slice.dim]

    def _row_of(self, feature_slice: FeatureSlice) -> tuple[list[FeatureSlice], int]:
        """Return the slices that are in one table with this one, and the number of that table in its slot."""
        slot, index = feature_slice.feature_slot, feature_slice.slice_index
        if not self._params.merge_vector or (slot.has_bias and index == 0):
            return [feature_slice], index
        first = int(slot.has_bias)
        return self.slot_id_to_feature_slot[slot.slot_id].feature_slices[first:], first

    def _tensor(self, name: str) -> Tensor:
        found = None if self._features is None else self._features.get(name)
        if not isinstance(found, Tensor):
            raise ConfigError(f"{name}: the first call of logits_fn did not look it up; look up the same in every call")
        return found

    def sizes(self, column: FeatureColumn3D) -> Tensor:
        """Return which places of the rows have an id, as int32."""
        if not self.is_finalized:
            return torch.zeros(1, column.max_seq_length or 0, dtype=torch.int32)
        first = min(index for name, index in self._used if name == column.fc_name)
        ending = "_0.mask" if self.is_large(column.feature_slot.slot_id) else ".mask"
        return self._tensor(f"{_feature_name(column, first)}{ending}").to(torch.int32)

    def is_large(self, slot_id: int) -> bool:
        """Return whether ids of a slot are embedded as the sum of two rows."""
        return self._params.qr_multi_hashing and self.vocab_size_dict[slot_id] > self._params.qr_hashing_threshold

    def remainders(self, slot_id: int) -> int:
        """Return how many remainders the ids of a large slot have."""
        return self.vocab_size_dict[slot_id] // self._params.qr_collision_rate + 1

    def features(self) -> list[Feature]:
        """Return the features of all lookups. Columns of one slot share their tables."""
        made: dict[str, Feature] = {}
        owners: dict[str, str] = {}
        for column, feature_slice in self._used.values():
            for feature in self._features_of(column, feature_slice):
                owner = owners.setdefault(feature.table or "", feature.name)
                if owner != feature.name:
                    feature = Feature(
                        name=feature.name, pooling=feature.pooling, max_length=feature.max_length, shared_with=owner
                    )
                made.setdefault(feature.name, feature)
        return list(made.values())

    def _features_of(self, column: FeatureColumnV1, feature_slice: FeatureSlice) -> list[Feature]:
        slot = feature_slice.feature_slot
        slices, index = self._row_of(feature_slice)
        name, table = _feature_name(column, index), f"table_{slot.slot_id}_{index}"
        settings: dict[str, Any] = {
            "segments": tuple(one.segment for one in slices),
            "learning_rate": tuple(one.learning_rate_fn for one in slices),
            "occurrence_threshold": slot.occurrence_threshold or 0,
            "expire_seconds": None if slot.expire_time is None else slot.expire_time * 86_400,
        }
        if column.max_seq_length is not None:
            settings |= {"pooling": "first_n", "max_length": column.max_seq_length}
        endings = ("_0", "_1") if self.is_large(slot.slot_id) else ("",)
        return [Feature(name=name + ending, table=table + ending, **settings) for ending in endings]

    def columns(self) -> list[str]:
        """Return the columns of a batch that lookups read."""
        return list(dict.fromkeys(f"{column.fc_name}_0" for column, _ in self._used.values()))

    def ids(self, batch: Mapping[str, object]) -> Batch:
        """Return the columns that the features read, made of the columns of a batch, which are named `<column>_0`."""
        made: Batch = {}
        for column, feature_slice in self._used.values():
            ids = self._checked(column, column_of(batch, f"{column.fc_name}_0"))
            for feature in self._features_of(column, feature_slice):
                if not self.is_large(column.feature_slot.slot_id):
                    made[feature.name] = ids
                    continue
                divisor = self.remainders(column.feature_slot.slot_id)
                is_remainder = feature.name.endswith("_0")
                made[feature.name] = _changed(
                    ids,
                    lambda v, d=divisor, r=is_remainder: v % d if r else v // d,  # type: ignore[misc]
                )
        return made

    def _checked(self, column: FeatureColumnV1, ids: BatchColumn) -> BatchColumn:
        """Return ids from 0 to the vocabulary size: those below are 0, others are taken modulo it, or refused."""
        slot, params = column.feature_slot.slot_id, self._params
        modulus = params.vocab_size_per_slot or params.custom_vocab_size_mapping.get(slot)
        clamped = _changed(
            ids, lambda values: values.clamp(min=0) if modulus is None else values.clamp(min=0) % modulus
        )
        values = clamped.values if isinstance(clamped, Ragged) else clamped
        size = self.vocab_size_dict[slot]
        if values.numel() and int(values.max()) >= size:
            raise InvalidArgumentError(
                f"{column.fc_name}_0: id {int(values.max())} is not in the vocabulary of slot {slot}, whose size is {size}; "
                "raise vocab_size_offset, or give the size in custom_vocab_size_mapping, modulo which ids are then taken"
            )
        return clamped


def _feature_name(column: FeatureColumnV1, index: int) -> str:
    return f"{column.fc_name}_{index}"


def _changed(column: BatchColumn, change: Callable[[Tensor], Tensor]) -> BatchColumn:
    return Ragged(change(column.values), column.offsets) if isinstance(column, Ragged) else change(column)
